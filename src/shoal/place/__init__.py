"""Layers where their resources are: a network over a server and workers."""
