"""The version of this package, without the imports of the package itself."""

__version__ = "0.1.0"
