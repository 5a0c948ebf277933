"""The sections of a spec, a module for each subject; attribute names are the keys of the YAML.

Annotations are not postponed in these modules: pydantic would have to evaluate the text of each at every start.
"""
