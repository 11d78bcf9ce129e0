"""Key/value caches for Transformers: storage that grows in place, and the cache layers on it."""
