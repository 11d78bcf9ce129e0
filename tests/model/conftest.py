"""What tests of models share: the warnings that plans log."""

from __future__ import annotations

import logging

import pytest

from adaattn_hf.patches.plans import running


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that is logged from now on, said anew though it was said before."""
    monkeypatch.setattr(running, "_said", set())
    monkeypatch.setattr(logging.getLogger("adaattn_hf"), "propagate", True)
    caplog.set_level("WARNING", "adaattn_hf")
    return caplog
