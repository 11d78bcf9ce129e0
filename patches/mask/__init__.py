"""One mask of Transformers: what it says in a few numbers, and what carries them to every layer."""
