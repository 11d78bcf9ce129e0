"""Evidence: perplexity, last words and cost against stock attention, on the same tokens."""
