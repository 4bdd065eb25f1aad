"""Which units of a network belong together, which worker gets them, and the narrow networks that they make."""
