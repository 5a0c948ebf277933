"""Implement `type: scripted`: a real HTTP server on loopback that returns scripted turns instead of calling a model."""
