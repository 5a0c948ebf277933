"""Runs as people look at them: what `show`, `compare`, `report` and `view` say of a run directory.

Nothing here plays, scores or writes into a run; a run may go on meanwhile.
"""
