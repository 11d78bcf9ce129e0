"""Pairs that plans of windows read."""

import pytest

from studies.budget import fewer_pairs


@pytest.mark.parametrize("length", [5, 64])
def test_fewer_pairs_are_those_that_rows_see(length: int) -> None:
    """Counted row by row; kept blocks depend on the data, and sinks may be more than what a window hides."""
    rules = {"w2+1": (2, 1), "w16+4": (16, 4), "w3+60 int8": (3, 60), "exact": (length, 0), "int8": (length, 0)}
    for picks in ([*rules], ["exact"], ["w2+1", "w2+1", "w3+60 int8"]):
        read = sum(
            min(i + 1, window) + min(sinks, max(i + 1 - window, 0)) for window, sinks in map(rules.__getitem__, picks)
            for i in range(length)
        )  # fmt: skip
        expected = len(picks) * length * (length + 1) / 2 / read
        assert fewer_pairs(picks, length) == pytest.approx(expected)
    assert fewer_pairs(["exact", "p0.9"], length) is None
