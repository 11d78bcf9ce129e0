"""What is remembered for calls of one shape: the last few, within a number of bytes."""

from __future__ import annotations

from adaattn_hf.backends.remembered import Remembered


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    kept, made = Remembered(2), []

    def get(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key.upper()

        return kept.get(key, make)

    assert [get(key) for key in "abacab"] == ["A", "B", "A", "C", "A", "B"]
    assert made == ["a", "b", "c", "b"]


def test_bytes_are_bounded_and_what_is_too_large_is_not_kept() -> None:
    kept, sizes = Remembered(10, most_bytes=100), {"a": 60, "b": 40, "large": 101, "c": 50, "d": 100}

    def remade(key: str) -> bool:
        made: list[str] = []
        kept.get(key, lambda: made.append(key), lambda _: sizes[key])
        return bool(made)

    assert [remade(key) for key in ("a", "b", "a", "b")] == [True, True, False, False]
    assert [remade(key) for key in ("large", "large", "a", "b")] == [True, True, False, False]
    assert [remade(key) for key in ("c", "b", "c")] == [True, False, False], "60 of a went for 50 of c"
    assert [remade(key) for key in ("d", "d", "b")] == [True, False, True]
