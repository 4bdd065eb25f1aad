"""For searches that stay with Optuna or Ray Tune: their trials, packed."""
