mkdir -p logs && seq 17 > logs/a.log && seq 25 > logs/b.log && seq 3 > logs/c.txt
