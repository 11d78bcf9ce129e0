"""The registered names, as they are in a fresh process and with those of backends that can serve nothing here."""

from collections.abc import Iterator
from contextlib import contextmanager

import adaattn_hf


@contextmanager
def registered(*, impossible: bool = False) -> Iterator[None]:
    """The names of a fresh process, or all of them; those of a fresh process afterwards."""
    adaattn_hf.unregister()
    adaattn_hf.register(impossible=impossible)
    try:
        yield
    finally:
        adaattn_hf.unregister()
        adaattn_hf.register()
