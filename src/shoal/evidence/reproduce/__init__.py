"""`shoal reproduce`, which repeats comparisons of published work with Shoal."""
