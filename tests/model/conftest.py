"""What tests of models share: nothing compiled, the warnings that plans log, a text."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaattn_hf import errors
from adaattn_hf.calibration import passes

from ..support.letters import random_words


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What other tests traced would make lengths symbols."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(logging.getLogger("adaattn_hf"), "propagate", True)
    caplog.set_level("WARNING", "adaattn_hf")
    return caplog


@pytest.fixture(scope="module")
def few_rounds() -> Iterator[None]:
    """Whole passes are timed as often as is asked for, and no oftener where they are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "WORTH", 0.0)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [random_words(tmp_path_factory.mktemp("text") / "book.txt")]
