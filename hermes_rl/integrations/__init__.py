"""Integrations with trainers, one module each.

They run a spec through the Python API and import a trainer only when it is used.
"""
