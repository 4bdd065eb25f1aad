"""The fast form of the stacked and streams tiers: whole steps that are compiled and captured as CUDA graphs."""
