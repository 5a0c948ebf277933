"""The spec: one YAML file becomes a frozen, typed `Spec`, with every problem at its file, line and column."""

from hermes_rl.spec.load import find_spec, load_spec, parse_spec, shipped_specs
from hermes_rl.spec.model import Mode, Spec

__all__ = ["Mode", "Spec", "find_spec", "load_spec", "parse_spec", "shipped_specs"]
