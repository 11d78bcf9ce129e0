"""Statistics of attention from s sampled query rows against all n keys, in O(n * s); decisions are made in `policy`."""
