"""What a user looks at: what runs where and why, what attention does, profiler spans, comparisons, training logs."""
