"""A network's forward pass as a list of calls of the user's own modules, so that it can be cut into parts."""
