"""Measurements: benchmarks, reproductions of published comparisons, the demo."""
