"""What this processor's native kernels do with products in bfloat16."""

from adaattn_hf.backends.capability import of_level
from adaattn_hf.backends.native.library import library

_loaded = library()
ROUNDS_BF16 = _loaded is None or of_level(_loaded.level_name).bf16
"""Whether heads in bf16 are rounded: without such instructions they are multiplied in float32, which loses nothing."""

TILES_BF16 = _loaded is not None and _loaded.level_name == "amx"
"""Whether they are multiplied in AMX tiles."""
