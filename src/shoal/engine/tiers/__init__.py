"""How members run: the interface of all tiers, the serial tier, validation."""
