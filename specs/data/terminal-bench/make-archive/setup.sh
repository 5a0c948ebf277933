mkdir -p docs && echo one > docs/one.md && echo two > docs/two.md && echo junk > docs/three.tmp
