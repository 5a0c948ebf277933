"""Analysis of runs for people: the output of `show`, `compare`, `report`, `view`, `audit`, `export` and `push`.

Owns reading records, summaries, findings, statistics and the pages. Nothing here runs or scores rollouts or writes
into a run; the run may still be in progress.

Entry points: `RunRecord` reads a run directory, `summarise` makes its figures, `compare_runs` compares two runs.
Left to others: writing records (`runs`), printing (`cli`), and serving pages (`view`).
"""
