"""CUDA kernels of stacked operators, registered as custom operators that a compiler does not look into."""
