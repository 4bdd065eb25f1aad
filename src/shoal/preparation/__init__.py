"""From jobs to members: checks, a dry run of one step, folds."""
