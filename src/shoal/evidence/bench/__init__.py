"""`shoal bench`, which measures several ways to do the same work.

Importing this package does not import torch, so that the command line stays quick.
"""
