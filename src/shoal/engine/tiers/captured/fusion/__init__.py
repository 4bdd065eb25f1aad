"""The operators of an uncompiled step on a GPU, recorded, and joined into few kernels."""
