"""The job, its checks, its early stopping and the direction of its metrics."""
