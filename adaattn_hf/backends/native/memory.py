"""Working memory of the native kernels: what they hold beside a call's tensors, which torch's allocator cannot see."""

from __future__ import annotations

from .library import library


def reset_peak() -> None:
    """Begins a new count; without a native library there is nothing to count."""
    if (loaded := library()) is not None:
        loaded.handle.ada_peak_bytes(1)


def peak_bytes() -> int:
    """Returns the most bytes that native calls worked with at a time since `reset_peak`.

    These are packed keys and values, tables and scratch, in the sizes that the calls asked for; a thread keeps such
    buffers between calls, which counts where a call uses them.
    """
    loaded = library()
    return 0 if loaded is None else int(loaded.handle.ada_peak_bytes(0))
