"""Agentic reinforcement-learning environments from one YAML file."""

__version__ = "0.1.0"
