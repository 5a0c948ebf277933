"""Analysis of runs for people: the output of `show`, `compare`, `report` and `view` for a run directory.

Nothing here runs or scores rollouts or writes into a run; the run may still be in progress.
"""
