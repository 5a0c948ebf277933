"""The spec: one YAML file becomes a frozen, typed `Spec`, with every problem at its file, line and column."""
