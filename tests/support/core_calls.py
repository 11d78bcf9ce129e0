"""Digests of what the package computes under a default dtype, on which none may depend, as all inputs name theirs."""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import adaattn_hf
from adaattn_hf.attention import reference, stored
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.models.cache_keyword import with_cache
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import LayerPlan
from adaattn_hf.plans.sampled import losses
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.stats import paired, profile, spectrum

from ..model import test_streaming_cache as streaming
from . import cached
from .calls import ON_CPU, attended, leaves
from .choices import make_choice
from .models import fresh_pair, padding, tokens

LENGTH = 40


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def call(structure: MaskStructure, dtype: torch.dtype = torch.float32) -> AttentionCall:
    q = draw(structure.batch, 4, structure.q_len, 32, seed=1, dtype=dtype)
    k, v = (draw(structure.batch, 2, structure.kv_len, 32, seed=seed, dtype=dtype) for seed in (2, 3))
    return AttentionCall(q, k, v, structure, 0.2, need_lse=True)


def structures() -> Iterator[tuple[str, MaskStructure]]:
    whole = MaskStructure(2, LENGTH, LENGTH, causal=True)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, :7] = False
    documents = (torch.arange(LENGTH) // 13).expand(2, -1)
    yield "full", MaskStructure(2, LENGTH, LENGTH)
    yield "causal", whole
    yield "step", MaskStructure(2, 1, LENGTH, causal=True, q_offset=LENGTH - 1)
    yield "suffix", MaskStructure(2, 9, LENGTH, causal=True, q_offset=LENGTH - 9)
    yield "window", whole.with_changes(window=8, sinks=2)
    yield "padded", whole.with_changes(key_padding=real)
    yield "documents", whole.with_changes(q_segments=documents, k_segments=documents)
    yield "chunks", whole.with_changes(chunk=9)
    yield "mask", MaskStructure(2, LENGTH, LENGTH, mask=draw(2, 1, LENGTH, LENGTH, seed=9) > 0)


def attention() -> Iterator[tuple[str, Any]]:
    for name, structure in structures():
        for dtype in (torch.float32, torch.bfloat16):
            asked = call(structure, dtype)
            yield f"reference {name} {dtype}", reference.attention(asked)
            for backend, serve in ON_CPU.items():
                yield f"{backend} {name} {dtype}", attended(serve, asked)
        for backend, serve in ON_CPU.items():
            asked, inputs = leaves(call(structure))
            attended(serve, asked).out.square().sum().backward()
            yield f"{backend} {name} gradients", [tensor.grad for tensor in inputs]


def planned() -> Iterator[tuple[str, Any]]:
    basis = {head: torch.linalg.qr(draw(32, 32, seed=5 + head)).Q[:, :8].contiguous() for head in (0, 1)}
    for choice in (
        make_choice("window", 16, 2), make_choice("window", 16, 2, precision="int8"), make_choice(precision="int8"),
        make_choice(precision="bf16"), make_choice(rank=8),
    ):  # fmt: skip
        held = LayerTensors(query_basis=basis, key_basis=basis)
        bound_layer = BoundLayer(LayerPlan(0, "hash", (choice, choice)), held, 4 * LENGTH)
        for name in ("causal", "step", "padded"):
            asked = call(dict(structures())[name].with_changes())
            yield f"{choice.label} {name}", execute.attend(bound_layer, asked)
        asked = call(MaskStructure(1, LENGTH, LENGTH, causal=True))
        yield f"{choice.label} losses", losses(bound_layer, asked, torch.arange(0, LENGTH, 5))


def formats() -> Iterator[tuple[str, Any]]:
    keys, queries = draw(2, 2, LENGTH, 32, seed=6), draw(2, 4, LENGTH, 32, seed=7)
    along = stored.direction_of(queries, 2)
    yield "along", along
    for bits in (8, 4):
        codes, scale = stored.quantise(keys, bits=bits, mean=keys.mean(dim=2), along=along if bits == 8 else None)
        yield f"{bits} bits", (codes, scale, stored.dequantise(codes, scale))
    yield "hadamard", [stored.hadamard(n) for n in (1, 32, 96)]


def caches(model: Any) -> Iterator[tuple[str, Any]]:
    ids = cached.ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for kept in ("model", "int8", "k8v4"):
        for streams in (False, True):
            for pieces in ((20, 1, 12, 1), (1, 1, 9, 1, 6)):
                cache = adaattn_hf.AdaAttnCache(model, kept, streaming=streams)
                name = f"{kept} cache{' streaming' * streams} {pieces}"
                yield name, cached.run(model, ids, cache, *pieces, mask=mask)
            with tempfile.TemporaryDirectory() as directory:
                again = adaattn_hf.load_cache(adaattn_hf.save_cache(cache, Path(directory) / "cache"), model)
            yield f"{name} again", cached.run(model, ids, again, 2, 1, mask=mask)
        yield f"{kept} cache in words", str(adaattn_hf.explain(model, cache=kept))


def models(bert: Any, gpt2: Any, llama: Any) -> Iterator[tuple[str, Any]]:
    ids, mask = tokens(), padding("left")
    for name, model in (("bert", bert), ("gpt2", gpt2), ("llama", llama)):
        with torch.no_grad():
            yield f"{name} padded", tuple(model(input_ids=ids, attention_mask=mask).values())[:1]
            adaattn_hf.prepare(model)
            yield f"{name} prepared", tuple(model(input_ids=ids, attention_mask=mask).values())[:1]
    yield "bert in words", str(adaattn_hf.explain(bert))
    with torch.no_grad():
        cache = adaattn_hf.GrowingCache(config=llama.config)
        parts = [llama(part, **with_cache(llama, cache)).logits for part in ids.split([7, 1, 3], 1)]
    yield "growing cache", parts


def statistics() -> Iterator[tuple[str, Any]]:
    scores = paired.score_tokens([draw(30, 11, seed=seed) for seed in (1, 2)], torch.arange(30) % 11)
    yield "scores", [torch.from_numpy(part) for part in (scores.nll, scores.kl)]
    q, k = draw(4, LENGTH, 16, seed=3), draw(2, LENGTH, 16, seed=4)
    moments = spectrum.gram(q, k)
    yield "spectrum", spectrum.score_spectrum(moments)
    yield "factors", spectrum.score_factors(moments, 4)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = torch.softmax(draw(4, LENGTH, LENGTH, seed=5).masked_fill(~visible, -torch.inf), dim=-1)
    yield "profile", [*profile.row_statistics(weights, visible, torch.arange(LENGTH)).values()]


def digest(answer: Any) -> str:
    if isinstance(answer, Tensor):
        data = answer.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{answer.dtype}{list(answer.shape)}".encode() + data).hexdigest()[:16]
    if isinstance(answer, str) or answer is None:
        return hashlib.sha256(repr(answer).encode()).hexdigest()[:16]
    parts = answer if isinstance(answer, (list, tuple)) else vars(answer).values()
    return " ".join(digest(part) for part in parts)


def main(dtype: str) -> None:
    torch.set_num_threads(1)
    built: list[nn.Module] = [fresh_pair(name)[1] for name in ("bert", "gpt2", "llama")]
    windows = streaming.llama()
    torch.set_default_dtype(getattr(torch, dtype))
    found: dict[str, str] = {}
    for calls in (attention(), planned(), formats(), caches(windows), models(*built), statistics()):
        found |= {name: digest(answer) for name, answer in calls}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
