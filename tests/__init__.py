"""Tests of hermes-rl. This file makes it a package that goes before those called `tests` in wheels of trainers."""
