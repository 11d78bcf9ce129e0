"""Which blocks of keys each row keeps, chosen on a CUDA device for every backend that walks lists of blocks."""
