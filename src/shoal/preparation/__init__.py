"""Prepares jobs for training: checks, a dry run of one step, cross-validation folds."""
