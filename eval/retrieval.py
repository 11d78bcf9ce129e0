"""Needles in the user's own text: how many an attention implementation still finds, by length and depth.

Perplexity does not see retrieval; this does. The needles, keys and values of tokens from the text itself, are those of
`adaattn_hf.calibration.needles`, which also guard calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from adaattn_hf.calibration.arms import ModelArms, exact_tap
from adaattn_hf.calibration.corpus import draw
from adaattn_hf.calibration.needles import build, retrieved


def measure(
    model: Any,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[Path],
    lengths: Sequence[int],
    *,
    haystacks: int = 2,
    needles: int = 8,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Returns, per length and depth, the share of needles found by exact attention and by the model as it is.

    Args:
        model: A causal model loaded with `attn_implementation="adaattn"`, with or without a plan.
        encode: Text to token ids, without special tokens.
        data: Text files.
        lengths: Tokens per context.
        haystacks: Contexts per length.
        needles: Needles per context, spread over the depths.
        seed: Seed of the text, the needles and the order of the questions.
    """
    arms = ModelArms(model.eval())
    rows: list[dict[str, Any]] = []
    for length in lengths:
        generator = torch.Generator().manual_seed(seed)
        sample = draw(list(data), encode, length, {"haystacks": haystacks}, seed)
        stacks = [build(torch.tensor(s.tokens), needles, generator) for s in sample.parts["haystacks"]]
        exact = [retrieved(arms, stack, exact_tap) for stack in stacks]
        found = [retrieved(arms, stack, None) for stack in stacks]
        for place, depth in enumerate(stacks[0].depths):
            rows.append(
                {
                    "length": length,
                    "depth": depth,
                    "exact": sum(one[place] for one in exact) / haystacks,
                    "model": sum(one[place] for one in found) / haystacks,
                    "needles": haystacks,
                }
            )
    return rows
