cat logs/*.log | wc -l | tr -d ' ' > total.txt
