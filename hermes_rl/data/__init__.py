"""Load rows: sources, derived columns, keys, the split between training and evaluation, order."""
