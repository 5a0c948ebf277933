test "$(cat total.txt)" = 42
