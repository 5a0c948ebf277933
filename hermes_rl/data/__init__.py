"""Load rows: read sources, derive columns and keys, split training from evaluation rows, and sort.

Owns files, generators, hub datasets and task folders as sources, and the identity of a row.

Entry points: `load_rows` returns the rows of a split, `Row` is one of them.
Left to others: templates over a row (`spec`), and what runs for it (`rollouts`).
"""
