"""What differs between the supported versions of Transformers, and that we notice it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from adaattn_hf import NAMES
from adaattn_hf.patches.mask.mask_pattern import read_pattern
from adaattn_hf.patches.models.support import is_ours
from adaattn_hf.patches.registry import engine_name

from ..support.names import registered

HERE = Version(tf.__version__)


def test_the_installed_versions_are_among_the_declared_ones() -> None:
    declared = {r.name: r for r in map(Requirement, metadata.requires("adaattn-hf") or []) if r.marker is None}
    assert HERE in declared["transformers"].specifier
    assert Version(Version(torch.__version__).base_version) in declared["torch"].specifier


def test_names_are_registered_with_a_mask_function_each() -> None:
    with registered(impossible=True):
        for name in NAMES:
            assert name in AttentionInterface._global_mapping
            assert name in AttentionMaskInterface._global_mapping


def test_every_name_has_one_for_the_engine_of_continuous_batching() -> None:
    """5.17 and 5.18 put `paged|` in front of it; later versions let in what holds `flash`."""
    assert engine_name("adaattn") == ("paged|adaattn" if Version("5.19") > HERE else "adaattn|flash")
    with registered(impossible=True):
        for name in NAMES:
            assert engine_name(name) in AttentionInterface._global_mapping
            assert engine_name(name) not in AttentionMaskInterface._global_mapping
            assert is_ours(engine_name(name))


@pytest.mark.parametrize(
    "mask_function",
    [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(4),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(torch.zeros(1, 5))
        ),
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(torch.zeros(1, 5, dtype=torch.long)),
        ),
    ],
    ids=["causal", "bidirectional", "sliding", "chunked", "packed", "blocks"],
)
def test_compositions_of_this_version_are_read_as_dense_evaluation_says(mask_function: Any) -> None:
    from adaattn_hf.patches.mask.masks import adaattn_mask

    pattern = read_pattern(mask_function)
    assert pattern is not None, "this version composes masks in another way: the reader must learn it"
    ours = adaattn_mask(1, 5, 5, mask_function=mask_function)
    stock = masking_utils.sdpa_mask(
        batch_size=1, q_length=5, kv_length=5, mask_function=mask_function, allow_is_causal_skip=False
    )
    dense = ours if isinstance(ours, torch.Tensor) else ours.dense()
    assert torch.equal(dense, torch.ones(1, 1, 5, 5, dtype=torch.bool) if stock is None else stock)


def test_a_composition_of_a_users_own_is_evaluated() -> None:
    def odd(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k % 2 == 0)

    assert read_pattern(odd) is None
