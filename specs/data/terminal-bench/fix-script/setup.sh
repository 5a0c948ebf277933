printf 'echo "Hello, $2!"\n' > greet.sh
