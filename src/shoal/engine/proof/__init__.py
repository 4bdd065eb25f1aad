"""Proof, before any training, that a stacked program computes what the user's own code computes."""
