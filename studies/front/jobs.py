"""Jobs of the first page, with all their arms: what a user gets from stock by one argument, and ours.

After a trial of each, arms take turns in one process, another one first in each round. An arm that a machine or a
version cannot run is in the record with its reason.
"""

import copy
import datetime
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from adaattn_hf import prepare
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import turn
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.stats.stopwatch import timed

FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError, MemoryError)
"""What a call that a machine or a version cannot run ends in."""
ROUNDS = 15
STOCK = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_4")
FLAT = "flash_attention_2, unpadded"
QWEN05 = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
QWEN15 = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
LLAMA8 = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA8 |= {"num_key_value_heads": 8, "vocab_size": 128256}
SHARED = {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768 + 4096}
BIG = "writes whole score matrices"


@dataclass(frozen=True)
class Arm:
    """One way to do a job: `before`, which is not timed, and the work, which with `clocks` returns its seconds."""

    call: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    clocks: bool = False


@dataclass(frozen=True)
class Job:
    """What a cell times: what ran, in a row's words, under which conditions, and ways to do it, or why there is none.

    Arms of this package begin with `adaattn`. A sample is of `repeats` calls; `after` frees what the arms hold.
    """

    says: str
    conditions: Mapping[str, Any]
    arms: Mapping[str, Arm | str]
    repeats: int = 1
    after: Callable[[], Any] = field(default=lambda: None)


def measure(job: Job, device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of every arm in every round, or why there are none; on a GPU also what `_on_gpu` says of a call."""
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
    if not running:
        raise RuntimeError(f"no arm of {job.says} ran: {found}")
    for number in range(rounds):
        for place in turn(len(running), number):
            arm = job.arms[running[place]]
            assert isinstance(arm, Arm)
            for clock, seconds in _sample(arm, device, job.repeats).items():
                found[running[place]].setdefault(clock, []).append(seconds)
    for name in running if device.type == "cuda" else ():
        arm = job.arms[name]
        if isinstance(arm, Arm) and not arm.clocks:
            found[name] |= _on_gpu(arm)
    return found


def _sample(arm: Arm, device: torch.device, repeats: int) -> dict[str, float]:
    arm.before()
    if arm.clocks:
        return {"wall": arm.call()}
    elapsed = timed(arm.call, device, repeats)[1]
    return {"wall": elapsed.wall, **({"process": elapsed.process} if device.type == "cpu" else {})}


def _on_gpu(arm: Arm) -> dict[str, float]:
    """Seconds that a GPU works on a call, and the most bytes that the call holds beside what was there before it."""
    arm.before()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        arm.call()
        torch.cuda.synchronize()
    kernels = float(sum(event.self_device_time_total for event in seen.key_averages())) * 1e-6
    return {"kernels": kernels, "peak": torch.cuda.max_memory_allocated() - held}


def shaped(sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A language model of a shape, with random weights."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()


def twin(model: Any) -> Any:
    """A copy of a model with a configuration of its own, whose weights are the model's."""
    return copy.deepcopy(model, {id(held): held for held in (*model.parameters(), *model.buffers())})


def two(model: Any) -> tuple[Any, Any]:
    """Copies of a model that run ours by the string alone, and prepared."""
    plain = twin(model)
    plain.set_attn_implementation("adaattn")
    return plain, prepare(twin(plain))


def way(model: Any, call: Callable[[], Any], implementation: str) -> Arm | str:
    """An arm of stock, or why it cannot run here."""
    if implementation.startswith("flash") and model.device.type != "cuda":
        return "for GPUs"
    if implementation == "flash_attention_4":
        return "not installed on this machine"
    return Arm(call, partial(model.set_attn_implementation, implementation))


def noted(job: Job, device: torch.device, arms: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a job's measurement."""
    made = {"date": datetime.date.today().isoformat(), "provenance": provenance(device)}
    return {"says": job.says, "conditions": dict(job.conditions), "arms": arms} | made


def told(name: str, seconds: float, record: Mapping[str, Any]) -> None:
    """Prints how long a cell took, and the milliseconds of its arms."""
    arms = record["arms"].items()
    shown = {arm: own.get("absent") or round(statistics.median(own["wall"]) * 1e3, 3) for arm, own in arms}
    print(f"{name}: {seconds:.0f} s {json.dumps(shown)}", flush=True)


@torch.no_grad()
def _through(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    for batch in batches:
        model(**batch)


Shape = tuple[str, Any, Any]
"""What an encoder is called in a row, its class and its configuration."""


def encoders(
    device: torch.device, lengths: Sequence[int], shape: Shape, absent: Mapping[str, str], dtype: str = "bfloat16",
    by: int = 0, alone: bool = False,
) -> Job:  # fmt: skip
    """Texts through an encoder: as they come (with `by` sorted, in batches of it), sorted into four, each alone."""
    torch.manual_seed(0)
    title, kind, config = shape
    with device:
        stock = kind._from_config(copy.deepcopy(config), dtype=getattr(torch, dtype)).eval()
    plain, prepared = two(stock)

    def batch(of: Sequence[int]) -> dict[str, Tensor]:
        mask = (torch.arange(max(of))[None] < torch.tensor(of)[:, None]).long()
        ids = torch.randint(5, 1000, mask.shape).masked_fill(mask == 0, config.pad_token_id)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def flat(of: Sequence[int]) -> dict[str, Any]:
        # as sentence-transformers (`unpad_inputs`) calls models with flash-attn; what they return stays flat
        first = config.pad_token_id + 1 if "roberta" in config.model_type else 0
        places = torch.cat([torch.arange(first, first + n) for n in of])[None].to(device)
        sums = torch.tensor((0, *of)).cumsum(0).int().to(device)
        flash = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": max(of), "max_length_k": max(of)}
        return flash | {"input_ids": torch.randint_like(places, 5, 1000), "position_ids": places}

    order, size = sorted(lengths, reverse=True), -(-len(lengths) // 4)
    cuts: dict[str, Any] = {"": [batch(lengths)]}
    cuts[", sorted into four"] = [batch(order[at : at + size]) for at in range(0, len(order), size)]
    cuts[", each text alone"] = [batch([n]) for n in lengths] if alone else "a call of its own waits for the host"
    if len(lengths) == 1 or (order == list(lengths) and order[-1] > 0.9 * order[0]):
        cuts[", sorted into four"] = "one text" if len(lengths) == 1 else "comes sorted"
        if len(lengths) == 1:
            cuts[", each text alone"] = "one text"
    groups = [order[at : at + by] for at in range(0, len(order), by)] if by else [lengths]
    if by:
        cuts |= {"": [batch(of) for of in groups], ", sorted into four": "comes sorted"}
    arms: dict[str, Arm | str] = {}
    for name in STOCK:
        arms[name] = absent.get(name) or way(stock, partial(_through, stock, cuts[""]), name)
    arms[FLAT] = way(stock, partial(_through, stock, [flat(of) for of in groups]), "flash_attention_2")
    if not kind.__name__.endswith("Model"):
        arms[FLAT] = "for embeddings: a head that reads the first place of each row finds one row"
    for cut, own in list(cuts.items())[1:]:
        for name in ("sdpa", "flash_attention_2"):
            arms[name + cut] = own if isinstance(own, str) else way(stock, partial(_through, stock, own), name)
    own = cuts[", sorted into four"]
    for name, model in (("adaattn", plain), ("adaattn, prepare", prepared)):
        arms[name] = Arm(partial(_through, model, cuts[""]))
        arms[f"{name}, sorted into four"] = own if isinstance(own, str) else Arm(partial(_through, model, own))
    some = f"{len(lengths)} texts of {max(lengths)} to {min(lengths)}"
    texts = some if len(lengths) > 1 else f"one text of {lengths[0]}"
    real = sum(lengths) / sum(len(of) * max(of) for of in groups)
    said = {"timed": "whole model", "dtype": dtype, "real tokens": real}
    return Job(f"{title}, {texts} tokens{f', sorted, in batches of {by}' * bool(by)}", said, arms)


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "DynamicCache": lambda model, _: DynamicCache(config=model.config),
    "StaticCache": lambda model, room: StaticCache(config=model.config, max_cache_len=room),
    "AdaAttnCache": lambda model, room: AdaAttnCache(model, "model", reserve=room),
}


def language(device: torch.device, sizes: Mapping[str, Any], directory: str | None) -> Any:
    """A language model in bfloat16: of a directory, or of a shape with random weights."""
    if directory is None:
        return shaped(SHARED | dict(sizes), device)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval().to(device)


def named(sizes: Mapping[str, Any], directory: str | None) -> str:
    """What a language model is called in a row."""
    shape = {1536: "Qwen2.5-1.5B", 4096: "LLaMA 8B"}.get(sizes["hidden_size"], "Qwen2.5-0.5B")
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
    work = partial(_prompt, stock, inputs, CACHES["DynamicCache"])
    for name in STOCK:
        arms[f"{name}, DynamicCache"] = (absent or {}).get(name) or way(stock, work, name)
    arms["sdpa, StaticCache"] = way(stock, partial(_prompt, stock, inputs, CACHES["StaticCache"]), "sdpa")
    for kind in ("DynamicCache", "StaticCache"):
        arms[f"adaattn, {kind}"] = Arm(partial(_prompt, plain, inputs, CACHES[kind]))
    arms["adaattn, prepare"] = Arm(partial(_prompt, prepared, inputs, CACHES["DynamicCache"]))
    said = {"timed": "whole model", "dtype": "bfloat16", "real tokens": sum(real) / batch / length}
    said["prompt or step"] = "prompt"
    rows = f"{batch} x " * (batch > 1)
    return Job(f"{named(sizes, directory)}, prompt of {rows}{length:,} tokens{', left-padded' * left}", said, arms)


@torch.no_grad()
def filled(model: Any, make: Callable[[Any, int], Any], batch: int, length: int, room: int) -> Any:
    """A cache that holds random keys and values of so many tokens."""
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


def step(model: Any, kind: str, token: Tensor, batch: int, length: int, room: int) -> Callable[[], None]:
    """A step behind a cache of random numbers, which is filled when its turn comes first."""
    past = cache(partial(filled, model, CACHES[kind], batch, length, room))
    return lambda: _step(model, token, past())


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

    of = token, batch, length, room
    for name, kind in (*((name, "DynamicCache") for name in STOCK), ("sdpa", "StaticCache"), ("eager", "StaticCache")):
        arms[f"{name}, {kind}"] = (absent or {}).get(name) or way(stock, step(stock, kind, *of), name)
    for kind in ("DynamicCache", "StaticCache"):
        arms[f"adaattn, {kind}"] = Arm(step(plain, kind, *of))
    arms["adaattn, prepare"] = Arm(step(prepared, "AdaAttnCache", *of))
    if device.type == "cuda":
        arms["flash_attention_2, StaticCache, captured"] = "generate() compiles no step of flash-attn"
        for name, model in (("sdpa", stock), ("adaattn", plain)):
            own = twin(model)
            own.set_attn_implementation(name)
            past = filled(own, CACHES["StaticCache"], batch, length, room)
            arms[f"{name}, StaticCache, captured"] = Arm(_captured(own, token, past))
    title = f"{named(sizes, directory)}, a token behind {f'{batch} x ' * (batch > 1)}{length:,} tokens"
    said = {"timed": "whole model", "dtype": "bfloat16", "prompt or step": "step", "room": room}
    return Job(title, said, arms, repeats, torch._dynamo.reset if device.type == "cuda" else lambda: None)


def _captured(model: Any, token: Tensor, past: Any) -> Callable[[], None]:
    """A step that is compiled and captured."""
    compiled: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(token, past_key_values=past, use_cache=True)

    return step
