"""The comparison of two checkouts asks for two that can run."""

from pathlib import Path

import pytest

from studies.tiny_call import Checkout


def test_a_checkout_without_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make the checkout an environment"):
        Checkout(tmp_path)
