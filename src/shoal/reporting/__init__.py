"""What happens in a run, for people and programs: events, callbacks, progress, TensorBoard."""
