"""The version of this package, without what else its front door knows."""

__version__ = "0.1.0"
