"""One attention call of Transformers: what it asks, and which launch answers it."""
