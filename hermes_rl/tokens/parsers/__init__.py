"""Parse tool calls in a model's text.

This package owns the formats, one file each (`table` lists them by name), and the conversion from token ids to a turn
(`base`).
"""
