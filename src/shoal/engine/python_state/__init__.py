"""Python state that a step can reach: found, compared, restored, saved and copied."""
