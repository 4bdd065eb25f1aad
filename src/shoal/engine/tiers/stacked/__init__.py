"""The stacked tier: one network with a member axis."""
