"""Steps compiled whole and captured: the fast form of the stacked and streams tiers."""
