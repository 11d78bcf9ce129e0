"""Finds the sequence length and the numbers of sequences that a text can fill, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from adaattn_hf.calibration.inputs import LEAST_HELD_OUT
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.texts import read_documents
from adaattn_hf.eval.windows import Encode
from adaattn_hf.patches import checkpoint

LENGTHS = (4096, 2048, 1024, 512, 256, 128)
"""Lengths that are tried where none is asked for, longest first."""


def opened(name: str, **source: Any) -> tuple[Any, Encode]:
    """Returns a checkpoint's configuration and its tokenizer, else ModelUnavailable."""
    config = checkpoint.read_config(name, **source)
    return config, partial(checkpoint.encoded, checkpoint.read_tokenizer(name, **source))


def count_tokens(paths: Sequence[Path], encode: Encode, enough: int) -> int:
    """Returns the tokens of a text, counted no further than `enough`."""
    total = 0
    for _, pieces in read_documents(paths):
        for piece in pieces:
            total += len(encode(piece))
            if total >= enough:
                return total
    return total


def fit_to_text(
    settings: CalibrationSettings,
    encode: Encode,
    data: Sequence[Path],
    verify_data: Sequence[Path] | None,
    positions: int | None,
) -> tuple[CalibrationSettings, str]:
    """Returns settings whose length and folds the text can fill, and a sentence that says which.

    The longest length is taken at which the text holds as many held-out sequences as are asked for, then half, then the
    least. Text too short for the shortest length is a ValueError.
    """
    lengths = [length for length in LENGTHS if positions is None or length <= positions] or [positions or 0]
    if positions is not None and lengths[0] < min(positions, LENGTHS[0]):
        lengths.insert(0, positions)
    searched = settings.sequences + settings.joint
    enough = lengths[0] * (searched + settings.held_out)
    fewest = max(min(LEAST_HELD_OUT, settings.held_out), 2 * len(verify_data or ()))
    tokens = count_tokens(data, encode, enough)
    held_out_tokens = count_tokens(verify_data, encode, enough) if verify_data else 0
    for wanted in (settings.held_out, max(settings.held_out // 2, fewest), fewest):
        for length in lengths:
            room = tokens // length - searched if not verify_data else held_out_tokens // length
            if room >= wanted and tokens // length >= searched:
                most = min(settings.held_out, room)
                sentence = f"text: {searched} sequences of {length:,} tokens to choose the plan, {most} to verify it"
                return replace(settings, lengths=(length,)), sentence
    needed = lengths[-1] * (searched + (0 if verify_data else fewest))
    also = f" and {lengths[-1] * fewest} held out" if verify_data else ""
    raise ValueError(
        f"data: {tokens} tokens of text{f' and {held_out_tokens} held out' if verify_data else ''}, expected at "
        f"least {needed}{also} for sequences of {lengths[-1]}; give more text"
    )
