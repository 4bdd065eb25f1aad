"""A training step as a graph of operators; which steps are the same computation."""
