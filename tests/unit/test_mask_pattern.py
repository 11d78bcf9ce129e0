"""Reading Transformers' nested mask functions: every factory, and everything that is not one."""

from typing import Any

import pytest
import torch
from transformers import masking_utils as mu

from adaattn_hf.patches.mask.mask_pattern import read_pattern

PADDING = torch.ones(1, 6, dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2]])
SPANS = torch.tensor([[-1, 0, 0, -1, 1, 1]])
LEFT = torch.tensor([2])
TWICE = mu.and_masks(mu.causal_mask_function, mu.sliding_window_causal_mask_function(4))  # one rule


@pytest.mark.parametrize(("function", "expected"), [
    (mu.causal_mask_function, {"causal": True}), (mu.bidirectional_mask_function, {"causal": False}),
    (mu.sliding_window_overlay(4), {"window": 4}), (mu.sliding_window_bidirectional_overlay(4), {"window": 5}),
    (mu.sliding_window_causal_mask_function(4), {"causal": True, "window": 4}),
    (mu.chunked_causal_mask_function(3, LEFT), {"causal": True, "chunk": 3, "chunk_start": LEFT}),
    (mu.padding_mask_function(PADDING), {"key_padding": PADDING}),
    (mu.packed_sequence_mask_function(DOCUMENTS), {"k_segments": DOCUMENTS}),
    (mu.blockwise_overlay(SPANS), {"spans": SPANS}),
    (mu.and_masks(mu.sliding_window_causal_mask_function(4), mu.packed_sequence_mask_function(DOCUMENTS),
                  mu.padding_mask_function(PADDING)),
     {"causal": True, "window": 4, "k_segments": DOCUMENTS, "key_padding": PADDING}),
    (TWICE, {"causal": True, "window": 4}),
    (mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)), {"causal": True, "spans": SPANS}),
    (mu.or_masks(mu.blockwise_overlay(SPANS), mu.causal_mask_function), {"causal": True, "spans": SPANS}),
])  # fmt: skip
def test_composition_is_read(function: Any, expected: dict[str, Any]) -> None:
    found = read_pattern(function)
    assert found is not None
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] is value if isinstance(value, torch.Tensor) else found[name] == value


def foreign(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query == key


@pytest.mark.parametrize("function", [
    foreign, lambda b, h, q, k: q >= k, mu.and_masks(mu.causal_mask_function, foreign),
    mu.or_masks(mu.causal_mask_function, foreign),
    mu.or_masks(mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)), foreign),
    mu.or_masks(mu.causal_mask_function, mu.sliding_window_overlay(3)),
    mu.or_masks(mu.causal_mask_function, mu.bidirectional_mask_function, mu.blockwise_overlay(SPANS)),
    mu.or_masks(mu.sliding_window_causal_mask_function(3), mu.blockwise_overlay(SPANS)),
    mu.and_masks(mu.sliding_window_overlay(3), mu.sliding_window_overlay(4)),
    mu.and_masks(mu.causal_mask_function, mu.bidirectional_mask_function),
    mu.and_masks(mu.packed_sequence_mask_function(DOCUMENTS), mu.packed_sequence_mask_function(SPANS)),
    mu.and_masks(
        mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)),
        mu.packed_sequence_mask_function(DOCUMENTS),
    ),
])  # fmt: skip
def test_what_has_no_structure_is_unknown(function: Any) -> None:
    assert read_pattern(function) is None


@pytest.mark.skipif(not hasattr(mu, "remap_positions_for_packed_sequence"), reason="this version remaps no positions")
def test_positions_counted_per_document_change_no_rule() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    remapped = mu.remap_positions_for_packed_sequence(mu.sliding_window_causal_mask_function(2), positions)
    found = read_pattern(mu.and_masks(remapped, mu.packed_sequence_mask_function(DOCUMENTS)))
    assert found is not None
    assert found.keys() == {"causal", "window", "k_segments"}


def test_every_factory_of_transformers_is_known_or_known_to_be_unknown() -> None:
    """A factory that a new release adds must be looked at."""
    functions = {
        name for name, value in vars(mu).items() if callable(value) and getattr(value, "__module__", "") == mu.__name__
        and (name.endswith(("_overlay", "_mask_function", "_masks")) or name.startswith("remap_"))
    }  # fmt: skip
    looked_at = {
        "add_offsets_to_mask_function", "and_masks", "bidirectional_mask_function", "blockwise_overlay",
        "causal_mask_function", "chunked_causal_mask_function", "chunked_overlay",
        "create_chunked_causal_mask_function", "or_masks", "packed_sequence_mask_function", "padding_mask_function",
        "remap_positions_for_packed_sequence", "sliding_window_bidirectional_mask_function",
        "sliding_window_bidirectional_overlay", "sliding_window_causal_mask_function", "sliding_window_overlay",
    }  # fmt: skip
    assert functions - looked_at == set()
