"""Implement `type: scripted`: a real HTTP server on loopback that plays written turns instead of calling a model."""
