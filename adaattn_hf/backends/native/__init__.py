"""Attention on CPUs by the project's own C++ kernels; optional, see `library.missing`."""
