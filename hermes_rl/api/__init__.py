"""The Python API: a spec as something to play, whoever trains."""
