"""Comparisons of published work, run again with Shoal: what `shoal reproduce` does."""
