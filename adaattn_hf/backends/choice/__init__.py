"""Triton kernels that choose which blocks of keys each query row keeps, for CUDA backends that take lists of blocks."""
