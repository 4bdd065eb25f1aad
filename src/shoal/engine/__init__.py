"""Many networks, one device."""
