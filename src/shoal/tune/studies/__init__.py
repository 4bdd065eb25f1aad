"""Studies: the trials of a search as one run, what it writes down, and what comes out."""
