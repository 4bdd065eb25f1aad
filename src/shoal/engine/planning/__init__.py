"""Decisions as plain data: which job runs first, which jobs run together, what it costs in seconds and bytes."""
