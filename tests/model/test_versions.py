"""What differs between the supported versions of Transformers, and that we notice it."""

import inspect
from importlib import metadata
from typing import Any

import torch
import transformers as tf
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.generic import is_flash_attention_requested

from adaattn_hf import NAMES
from adaattn_hf.patches.models.support import is_ours
from adaattn_hf.patches.registry import engine_name

from ..support.names import registered
from ..support.versions import HERE

HANDED = ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table", "cache")
"""What the engine of continuous batching hands to attention, as far as we read it."""


def test_the_installed_versions_are_among_the_declared_ones() -> None:
    declared = {r.name: r for r in map(Requirement, metadata.requires("adaattn-hf") or []) if r.marker is None}
    assert HERE in declared["transformers"].specifier
    assert Version(Version(torch.__version__).base_version) in declared["torch"].specifier


def test_every_name_has_one_for_the_engine_of_continuous_batching() -> None:
    """5.17 and 5.18 put `paged|` in front of it; later versions let in what holds `flash`."""
    assert engine_name("adaattn") == ("paged|adaattn" if Version("5.19") > HERE else "adaattn|flash")
    with registered(impossible=True):
        for name in NAMES:
            assert engine_name(name) in AttentionInterface._global_mapping
            assert engine_name(name) not in AttentionMaskInterface._global_mapping
            assert is_ours(engine_name(name))


def missing(*places: tuple[Any, str]) -> list[str]:
    """Of names in modules, classes and dictionaries those that are not there."""
    return [
        f"{getattr(place, '__name__', 'PagedAttentionArgs')}.{name}" for place, name in places
        if not (name in place if isinstance(place, dict) else hasattr(place, name))
    ]  # fmt: skip


def test_the_engine_has_every_name_that_we_rely_on() -> None:
    """`make canary` asks this of the next Transformers: what is listed, `patches/call/batching.py` has to learn."""
    from transformers.generation.continuous_batching import cache, input_outputs

    handed = getattr(input_outputs, "PagedAttentionArgs", Any)
    lost = missing(
        (tf, "ContinuousBatchingConfig"), (tf.GenerationMixin, "generate_batch"),
        (tf.GenerationMixin, "init_continuous_batching"), (input_outputs, "PagedAttentionArgs"),
        (cache, "PagedAttentionCache"), *((handed.__annotations__, name) for name in HANDED),
        *((tf.ContinuousBatchingConfig, name) for name in ("use_cuda_graph", "max_blocks_per_request")),
    )  # fmt: skip
    assert not lost, f"Transformers {HERE} no longer has, or names anew: {', '.join(lost)}"
    if "cache" in handed.__annotations__:
        taken = set(inspect.signature(cache.PagedAttentionCache.update).parameters)
        assert taken >= {"key_states", "value_states", "layer_idx"}, f"PagedAttentionCache.update takes {sorted(taken)}"
    assert missing((tf, "GenerationConfig"), (tf, "no such name"), ({}, "read_index")) == [
        "transformers.no such name", "PagedAttentionArgs.read_index"
    ]  # fmt: skip


def test_the_engine_hands_its_tables_of_blocks_to_no_name_of_ours() -> None:
    """Names of flash-attn 2 and 3 alone get them, whose kernels write to the cache themselves; a step refuses them."""
    for name in NAMES:
        assert not is_flash_attention_requested(requested_attention_implementation=engine_name(name), version=[2, 3])
    assert is_flash_attention_requested(requested_attention_implementation="flash_attention_2", version=[2, 3])
