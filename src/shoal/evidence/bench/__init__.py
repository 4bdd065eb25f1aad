"""The same work done several ways, side by side: what `shoal bench` runs.

Importing this package loads no torch, so that the command line stays quick.
"""
