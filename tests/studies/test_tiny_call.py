"""The comparison of two checkouts counts what it says."""

from pathlib import Path

import pytest

from studies.tiny_call import Checkout, steps


def test_steps_are_counted_and_the_same_every_time() -> None:
    def little() -> int:
        return len("a")

    def more() -> int:
        return sum(len(word) for word in ("a", "b", "c"))

    assert steps(little) == steps(little)
    assert steps(more)[0] > steps(little)[0] > 0
    assert steps(more)[1] - steps(little)[1] == 3


def test_a_checkout_without_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make the checkout an environment"):
        Checkout(tmp_path)
