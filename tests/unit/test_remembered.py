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
    kept.clear()
    assert not len(kept)


def test_bytes_are_bounded_and_what_is_too_large_is_not_kept() -> None:
    kept = Remembered(10, most_bytes=100)

    def get(key: str, size: int) -> None:
        kept.get(key, lambda: key, lambda made: size)

    get("a", 60)
    get("b", 40)
    assert len(kept) == 2
    get("large", 101)
    assert len(kept) == 2
    get("c", 50)
    assert len(kept) == 2, "60 of a went for 50 of c"
    get("d", 100)
    assert len(kept) == 1
