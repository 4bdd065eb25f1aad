"""CUDA kernels of stacked operators, as operators that a compiler leaves alone."""
