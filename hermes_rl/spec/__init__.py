"""The spec: one YAML file becomes a frozen, typed `Spec`, with every problem at its file, line and column.

Owns keys and their types, `extends`, overrides, templates and their limits, static checks, JSON Schema, and old names.

Entry points: `load_spec` loads a file, `parse_spec` a text, `Spec` is the result.
Left to others: code and data that a spec names (`data`, `rollouts`), and printing problems (`cli`).
"""
