"""Rules per key/value head for tests, in the model's precision."""

from adaattn_hf.attention.heads import HeadRules


def rules(windows: tuple[int, ...], sinks: tuple[int, ...] | None = None) -> HeadRules:
    """Rules of as many heads as there are windows; no sinks unless said."""
    count = len(windows)
    return HeadRules(windows, sinks or (0,) * count, ("model",) * count)
