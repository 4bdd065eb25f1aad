"""The job, its early stopping and the direction of metrics."""
