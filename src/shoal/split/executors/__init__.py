"""Executors on this machine: parts one after another, or as a pack."""
