#!/bin/bash
right=1
[ "$(sh greet.sh Ada)" = "Hello, Ada!" ] || right=0
[ "$(sh greet.sh)" = "Hello, you!" ] || right=0
echo "$right" > /logs/verifier/reward.txt
