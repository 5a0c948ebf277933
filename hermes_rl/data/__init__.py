"""Load rows: read sources, derive columns and keys, split training from evaluation rows, and sort."""
