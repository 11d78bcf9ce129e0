"""Calls that are made as if they were repeated do at once what others do after hundreds of their kind."""

from __future__ import annotations

import pytest

from adaattn_hf.backends import repeats


def test_it_is_asked_for_within_and_no_longer() -> None:
    assert not repeats.asked()
    with repeats.as_if_repeated():
        with repeats.as_if_repeated():
            assert repeats.asked()
        assert repeats.asked()
    assert not repeats.asked()
    with pytest.raises(RuntimeError, match="broken"), repeats.as_if_repeated():
        raise RuntimeError("broken")
    assert not repeats.asked()
