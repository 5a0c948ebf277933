"""Doors to trainers, a module for each. They play a spec through the Python API, and load a trainer when it is used."""
