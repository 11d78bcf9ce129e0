"""The only place that knows Transformers' internals: names, masks, families, caches, checkpoints."""
