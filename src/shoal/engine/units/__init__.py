"""From planned members to units that run: timed trials, the choice of a tier and form, construction."""
