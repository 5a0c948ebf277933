test "$(tar -tzf docs.tar.gz | grep -v '/$' | sort | tr '\n' ' ')" = "docs/one.md docs/two.md "
