"""Jobs of the first page, with all their arms: what a user gets from stock by one argument, and ours.

After a trial of each, arms take turns in one process, another one first in each round. An arm that a machine or a
version cannot run is in the record with its reason.
"""

from __future__ import annotations

import copy
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, BertModel, DynamicCache, LlamaConfig, StaticCache

from adaattn_hf import prepare
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import turn
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.stats.stopwatch import timed

FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError, NotImplementedError)
"""What a call that a machine or a version cannot run ends in."""
ROUNDS = 15
STOCK = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_4")
QWEN05 = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
QWEN15 = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
SHARED = {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768 + 4096}
BIG = "writes whole score matrices"


@dataclass(frozen=True)
class Arm:
    """One way to do a job.

    Attributes:
        call: The work; with `clocks` it returns the seconds that count.
        before: What is not timed.
        clocks: Whether the work reads the clock itself.
    """

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None
    clocks: bool = False


@dataclass(frozen=True)
class Job:
    """What a cell times.

    Attributes:
        says: What ran, for the row.
        conditions: What a reader must know: share of real tokens, dtype, whether a prompt or a step was timed, …
        arms: Ways to do it by name, or why there is none; those of this package begin with `adaattn`.
        repeats: Calls in a row that a sample is of.
        after: What frees what the arms hold.
    """

    says: str
    conditions: Mapping[str, Any]
    arms: Mapping[str, Arm | str]
    repeats: int = 1
    after: Callable[[], Any] = field(default=lambda: None)


def measure(job: Job, device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of every arm in every round, or why there are none; on a GPU also the seconds that its kernels ran."""
    found: dict[str, dict[str, Any]] = {}
    for name, arm in job.arms.items():
        try:
            if isinstance(arm, str):
                found[name] = {"absent": arm}
                continue
            for _ in range(2):
                _sample(arm, device, 1)
            found[name] = {"wall": [], **({"process": []} if device.type == "cpu" and not arm.clocks else {})}
        except FAILURES as error:
            found[name] = {"absent": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    running = [name for name in found if "wall" in found[name]]
    for number in range(rounds):
        for place in turn(len(running), number):
            arm = job.arms[running[place]]
            assert isinstance(arm, Arm)
            for clock, seconds in _sample(arm, device, job.repeats).items():
                found[running[place]].setdefault(clock, []).append(seconds)
    for name in running if device.type == "cuda" else ():
        arm = job.arms[name]
        if isinstance(arm, Arm) and not arm.clocks:
            found[name]["kernels"] = _kernels(arm)
    return found


def _sample(arm: Arm, device: torch.device, repeats: int) -> dict[str, float]:
    if arm.before is not None:
        arm.before()
    if arm.clocks:
        return {"wall": arm.call()}
    elapsed = timed(arm.call, device, repeats)[1]
    return {"wall": elapsed.wall, **({"process": elapsed.process} if device.type == "cpu" else {})}


def _kernels(arm: Arm) -> float:
    """Seconds that a GPU works on a call: where it is much less than the call takes, the GPU waits for the host."""
    if arm.before is not None:
        arm.before()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        arm.call()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in seen.key_averages())) * 1e-6


def shaped(sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A language model of a shape, with random weights."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()


def two(model: Any) -> tuple[Any, Any]:
    """Copies of a model that run ours by the string alone, and prepared; with configurations of their own."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("adaattn")
    return plain, prepare(copy.deepcopy(plain))


def way(model: Any, call: Callable[[], Any], implementation: str) -> Arm | str:
    """An arm of stock, or why it cannot run here."""
    on_cuda = model.device.type == "cuda"
    if implementation.startswith("flash") and not on_cuda:
        return "for GPUs"
    if implementation == "flash_attention_4":
        return "not installed on this machine"
    return Arm(call, partial(model.set_attn_implementation, implementation))


def noted(job: Job, device: torch.device, arms: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a job's measurement."""
    return {
        "says": job.says, "conditions": dict(job.conditions), "date": datetime.date.today().isoformat(), "arms": arms,
        "provenance": provenance(device),
    }  # fmt: skip


def told(name: str, seconds: float, record: Mapping[str, Any]) -> None:
    """Prints how long a cell took, and the milliseconds of its arms."""
    shown = {
        arm: own.get("absent") or round(statistics.median(own["wall"]) * 1e3, 3) for arm, own in record["arms"].items()
    }
    sys.stdout.write(f"{name}: {seconds:.0f} s {json.dumps(shown)}\n")
    sys.stdout.flush()


@torch.no_grad()
def _through(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    for batch in batches:
        model(**batch)


def encoders(
    device: torch.device, lengths: Sequence[int], dtype: str, sizes: Mapping[str, Any], alone: bool = True,
    absent: Mapping[str, str] | None = None,
) -> Job:  # fmt: skip
    """A batch of texts through an encoder: as it comes, sorted into four batches, and a text at a time."""
    torch.manual_seed(0)
    with device:
        stock = BertModel._from_config(BertConfig(**sizes), dtype=getattr(torch, dtype)).eval()
    plain, prepared = two(stock)

    def batch(of: Sequence[int]) -> dict[str, Tensor]:
        mask = (torch.arange(max(of))[None] < torch.tensor(of)[:, None]).long()
        return {"input_ids": torch.randint(0, 1000, mask.shape).to(device), "attention_mask": mask.to(device)}

    order, size = sorted(lengths, reverse=True), -(-len(lengths) // 4)
    cuts: dict[str, Any] = {"": [batch(lengths)]}
    cuts[", sorted into four"] = [batch(order[at : at + size]) for at in range(0, len(order), size)]
    cuts[", each text alone"] = [batch([n]) for n in lengths] if alone else "a call of its own waits for the host"
    if len(lengths) == 1 or (order == list(lengths) and order[-1] > 0.9 * order[0]):
        cuts[", sorted into four"] = "one text" if len(lengths) == 1 else "comes sorted"
        if len(lengths) == 1:
            cuts[", each text alone"] = "one text"
    arms: dict[str, Arm | str] = {}
    for name in STOCK:
        arms[name] = (absent or {}).get(name) or way(stock, partial(_through, stock, cuts[""]), name)
    for name in ("sdpa", "flash_attention_2"):
        for cut, batches in list(cuts.items())[1:]:
            if isinstance(batches, str):
                arms[name + cut] = batches
            else:
                arms[name + cut] = way(stock, partial(_through, stock, batches), name)
    arms["adaattn"] = Arm(partial(_through, plain, cuts[""]))
    arms["adaattn, prepare"] = Arm(partial(_through, prepared, cuts[""]))
    own = cuts[", sorted into four"]
    arms["adaattn, prepare, sorted into four"] = own if isinstance(own, str) else Arm(partial(_through, prepared, own))
    name = "BERT-large" if sizes.get("num_hidden_layers") == 24 else "BERT-base"
    texts = f"{len(lengths)} texts of {max(lengths)} to {min(lengths)} tokens"
    return Job(
        f"{name}, {texts}" if len(lengths) > 1 else f"{name}, one text of {lengths[0]} tokens",
        {"timed": "whole model", "dtype": dtype, "real tokens": sum(lengths) / len(lengths) / max(lengths)},
        arms,
    )


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "DynamicCache": lambda model, room: DynamicCache(config=model.config),
    "StaticCache": lambda model, room: StaticCache(config=model.config, max_cache_len=room),
    "AdaAttnCache": lambda model, room: AdaAttnCache(model, "model", reserve=room),
}


def language(device: torch.device, sizes: Mapping[str, Any], directory: str | None) -> Any:
    """A language model in bfloat16: of a directory, or of a shape with random weights."""
    if directory is None:
        return shaped(dict(sizes) | SHARED, device)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval().to(device)


def named(sizes: Mapping[str, Any], directory: str | None) -> str:
    """What a language model is called in a row."""
    shape = "Qwen2.5-1.5B" if sizes is QWEN15 else "Qwen2.5-0.5B"
    return Path(directory).name if directory else f"{shape}'s shape, random weights"


@torch.no_grad()
def _prompt(model: Any, inputs: Mapping[str, Tensor], make: Callable[[Any, int], Any]) -> None:
    past = make(model, inputs["input_ids"].shape[1])
    model(**inputs, past_key_values=past, use_cache=True, logits_to_keep=1)


def prompt(
    device: torch.device, batch: int, length: int, sizes: Mapping[str, Any], directory: str | None = None,
    left: bool = False, absent: Mapping[str, str] | None = None,
) -> Job:  # fmt: skip
    """A prompt read into a cache, to the last logits."""
    stock = language(device, sizes, directory)
    plain, prepared = two(stock)
    real = [length - length * row // batch * left for row in range(batch)]
    mask = (torch.arange(length)[None] >= length - torch.tensor(real)[:, None]).long().to(device)
    inputs = {"input_ids": torch.randint(0, 1000, (batch, length), device=device)}
    if left:
        inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    arms: dict[str, Arm | str] = {}
    for name in STOCK:
        work = partial(_prompt, stock, inputs, CACHES["DynamicCache"])
        arms[f"{name}, DynamicCache"] = (absent or {}).get(name) or way(stock, work, name)
    arms["sdpa, StaticCache"] = way(stock, partial(_prompt, stock, inputs, CACHES["StaticCache"]), "sdpa")
    for kind in ("DynamicCache", "StaticCache"):
        arms[f"adaattn, {kind}"] = Arm(partial(_prompt, plain, inputs, CACHES[kind]))
    arms["adaattn, prepare"] = Arm(partial(_prompt, prepared, inputs, CACHES["DynamicCache"]))
    rows = f"{batch} x " if batch > 1 else ""
    said = {"timed": "whole model", "dtype": "bfloat16", "prompt or step": "prompt"}
    return Job(
        f"{named(sizes, directory)}, prompt of {rows}{length:,} tokens{', left-padded' * left}",
        {**said, "real tokens": sum(real) / batch / length}, arms,
    )  # fmt: skip


@torch.no_grad()
def _filled(model: Any, make: Callable[[Any, int], Any], batch: int, length: int, room: int) -> Any:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = make(model, room)
    shape = (batch, config.num_key_value_heads, length, dim)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, device=model.device, dtype=model.dtype)
        past.update(keys, keys.clone(), layer)
    return past


@torch.no_grad()
def _step(model: Any, token: Tensor, past: Any) -> None:
    model(token, past_key_values=past, use_cache=True)


def steps(
    device: torch.device, batch: int, length: int, sizes: Mapping[str, Any], directory: str | None = None,
    absent: Mapping[str, str] | None = None, repeats: int = 4,
) -> Job:  # fmt: skip
    """A decode step behind a filled cache; on a GPU also captured, as `generate` does with a static cache."""
    stock = language(device, sizes, directory)
    plain, prepared = two(stock)
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    room = -(-(length + (ROUNDS + 6) * repeats) // 64) * 64
    arms: dict[str, Arm | str] = {}

    def step(model: Any, kind: str) -> Callable[[], None]:
        past: list[Any] = []  # filled when its turn comes first

        def work() -> None:
            if not past:
                past.append(_filled(model, CACHES[kind], batch, length, room))
            _step(model, token, past[0])

        return work

    for name in STOCK:
        arms[f"{name}, DynamicCache"] = (absent or {}).get(name) or way(stock, step(stock, "DynamicCache"), name)
    for name in ("sdpa", "eager"):
        arms[f"{name}, StaticCache"] = (absent or {}).get(name) or way(stock, step(stock, "StaticCache"), name)
    for kind in ("DynamicCache", "StaticCache"):
        arms[f"adaattn, {kind}"] = Arm(step(plain, kind))
    arms["adaattn, prepare"] = Arm(step(prepared, "AdaAttnCache"))
    if device.type == "cuda":
        arms["flash_attention_2, StaticCache, captured"] = "generate() compiles no step of flash-attn"
        for name, model in (("sdpa", stock), ("adaattn", plain)):
            own = copy.deepcopy(model)
            own.set_attn_implementation(name)
            past = _filled(own, CACHES["StaticCache"], batch, length, room)
            arms[f"{name}, StaticCache, captured"] = Arm(_captured(own, token, past))
    rows = f"{batch} x " if batch > 1 else ""
    return Job(
        f"{named(sizes, directory)}, a token behind {rows}{length:,} tokens",
        {"timed": "whole model", "dtype": "bfloat16", "prompt or step": "step", "room": room}, arms, repeats,
        torch._dynamo.reset if device.type == "cuda" else lambda: None,
    )  # fmt: skip


def _captured(model: Any, token: Tensor, past: Any) -> Callable[[], None]:
    """A step that is compiled and captured."""
    compiled: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(token, past_key_values=past, use_cache=True)

    return step
