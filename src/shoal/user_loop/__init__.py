"""`shoal.Pack`: stacked training steps in the user's own loop."""
