test "$(sh greet.sh Ada)" = "Hello, Ada!" && test "$(sh greet.sh Grace)" = "Hello, Grace!"
