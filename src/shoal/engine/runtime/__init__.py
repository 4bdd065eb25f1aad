"""The training loop of a run: admit jobs, run turns, validate, save, release; worker processes."""
