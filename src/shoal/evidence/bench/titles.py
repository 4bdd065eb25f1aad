"""The names of the ways in the table. They are not in `ways`, so that listing them does not import torch."""

TITLES = {
    "eager": "sequential, eager",
    "captured": "sequential, compiled and captured",
    "vmap": "vmap",
    "vmap-captured": "vmap, compiled and captured",
    "shoal": "Shoal",
}
