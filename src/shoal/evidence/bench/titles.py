"""The ways, and what the table calls them. Apart from `ways`, so that naming them loads no torch."""

TITLES = {
    "eager": "sequential, eager",
    "captured": "sequential, compiled and captured",
    "vmap": "vmap",
    "vmap-captured": "vmap, compiled and captured",
    "shoal": "Shoal",
}
