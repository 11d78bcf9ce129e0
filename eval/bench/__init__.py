"""Attention, models and decode steps beside every stock implementation, in one interleaved run."""
