"""Subnets: which units of a network belong together, how they are dealt, and the narrow networks they make."""
