"""Reports on a run: events, callbacks, progress, loggers."""
