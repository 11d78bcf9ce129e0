"""Speed under the plans of a study: `python -m studies.budget.speed MODEL --record NAME=FILE …`.

Two levels, each timed in rounds that take the arms in turn, the smallest time of each arm kept: all attention
calls of the model on its own queries, keys and values (stock sdpa as Transformers calls it, this package's
exact attention, each plan), and one prefill of the whole model. CPU time of the process on a CPU; on CUDA the
device's time of attention, the wall clock of a prefill. Every run adds to the file, so that lengths and levels may be
measured apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.patches.plans import attach, hashes, parts
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans import store
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.stats.stopwatch import on_device, quartiles, timed

from . import study

LEVELS = ("attention", "model")
MEANS = 1024
"""Tokens of the text that mean keys are taken from."""
_PASSES = 3
"""Timed ones of an arm in each round: to attach a plan takes longer."""
NOTHING: Mapping[int, LayerTensors] = {}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def plans_of_records(records: Sequence[str], model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Returns the plans of `NAME=FILE` arguments by name, with mean keys of a text; see `plan_of_record`."""
    plans, means = {}, mean_keys(model, tokens[:, :MEANS])
    for one in records:
        name, _, path = one.partition("=")
        plans[name] = plan_of_record(json.loads(Path(path).read_text(encoding="utf-8")), model, means)
    return plans


@torch.no_grad()
def mean_keys(model: nn.Module, tokens: Tensor) -> dict[int, LayerTensors]:
    """Returns the mean keys of each layer over a text `[1, n]`, which a record does not hold and int8 takes off."""
    from adaattn_hf.attention.tap import tapping
    from adaattn_hf.calibration.fisher import Moments

    moments, base = Moments(), cast(Any, model.base_model)
    with tapping(moments.tap):
        base(input_ids=tokens, use_cache=False)
    return {index: LayerTensors(gram.key_mean.float().to(tokens.device)) for index, gram in moments.grams.items()}


def tokens_of(
    data: Sequence[Path], encode: Callable[[str], Sequence[int]], length: int, model: Any, batch: int = 1
) -> Tensor:
    """Returns stretches of text `[batch, length]` on the model's device, the same for every measurement."""
    from adaattn_hf.calibration import corpus

    texts = corpus.draw(data, encode, length, {"text": batch}, 0).parts["text"]
    return torch.tensor([text.tokens for text in texts], device=model.device)


def plan_of_record(record: Mapping[str, Any], model: nn.Module, tensors: Mapping[int, LayerTensors] = NOTHING) -> Any:
    """Returns the plan of a seed's record for a model on this machine.

    Windows and blocks need nothing but their names, int8 mean keys; ranks need bases that a record does not hold.

    Args:
        record: A file of `study seeds`.
        model: The model.
        tensors: Mean keys by layer index, see `mean_keys`; int8 keys are rounded as they are without them.

    Raises:
        UsageError: If the record is of a model of other units, or takes a rank.
    """
    import importlib.metadata

    from adaattn_hf.calibration.assemble import needed_tensors
    from adaattn_hf.patches.plans.configured import computes_by
    from adaattn_hf.plans.plan import PLAN_FORMAT, LayerPlan, Plan, Verified
    from adaattn_hf.policy.candidates import candidates, known_families

    config: Any = model.config
    modules = dict(attention_modules(model, config.model_type))
    settings = record["settings"]
    known = {
        choice.label: choice
        for choice in candidates(
            settings["lengths"][-1],
            0,
            settings["dtype"],
            [family for family in settings["families"] if family in known_families()],  # others have left since
            settings["windows"],
        ).choices
    }
    labels = record["picks"]
    if len(labels) % len(modules):
        raise UsageError(f"record: has {len(labels)} units, expected a multiple of the model's {len(modules)} layers")
    unknown = sorted(set(labels) - set(known))
    if unknown:
        raise UsageError(f"record: takes {unknown}, expected choices without bases: {sorted(known)}")
    per = len(labels) // len(modules)
    own = {index: hashes.weight_hash(module) for index, module in modules.items()}
    layers = [
        LayerPlan(index, own[index], tuple(known[label] for label in labels[place * per : (place + 1) * per]))
        for place, index in enumerate(sorted(modules))
    ]
    verdicts = record.get("report", {}).get("verdicts", ())
    needed: dict[str, Tensor] = {}
    for layer in layers:
        needed.update(needed_tensors(layer, tensors.get(layer.layer, LayerTensors())))
    return Plan(
        format=PLAN_FORMAT,
        model_type=config.model_type,
        weight_hash=hashes.model_hash(model),
        configuration=computes_by(config),
        dtype=parts.module_dtype(next(iter(modules.values()))),
        adaattn=importlib.metadata.version("adaattn-hf"),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        budget=record["budget"],
        seed=record["seed"],
        data_fingerprint="",
        protocol={},
        lengths=tuple(settings["lengths"]),
        layers=tuple(layer for layer in layers if not layer.is_exact),
        units=(),
        verified=Verified(**verdicts[-1]) if record.get("met") else None,  # of the longest length
        tensors=store.remember_tensors(needed),
    )


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the time of one call: the process's CPU time on a CPU, wall time elsewhere."""
    elapsed = timed(call, device)[1]
    return elapsed.process if device.type == "cpu" else elapsed.wall


@torch.no_grad()
def attention_seconds(
    forward: Callable[[], object],
    arms: Mapping[str, Mapping[int, Program | None]],
    rounds: int,
) -> dict[str, float]:
    """Returns seconds of all attention calls of one forward pass: stock sdpa's, the exact ones, each arm's.

    Args:
        forward: The pass, which goes on with exact attention.
        arms: Programs by layer, by name; a layer without one is exact.
        rounds: Rounds over the arms in each call on a CPU, the smallest time kept.
    """
    from transformers import AttentionInterface

    from adaattn_hf.attention.tap import tapping
    from adaattn_hf.calibration.arms import exact_tap
    from adaattn_hf.plans.execute import attend

    stock = AttentionInterface()["sdpa"]
    total = dict.fromkeys(("stock sdpa", "exact", *arms), 0.0)

    def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
        index, device = int(module.layer_idx), request.query.device  # type: ignore[arg-type]
        tensors = (request.query, request.key, request.value)
        calls: dict[str, Callable[[], object]] = {
            "stock sdpa": partial(stock, module, *tensors, None, scaling=request.scaling, is_causal=True),
            "exact": partial(exact_tap, module, request),
        }
        for name, programs in arms.items():
            program = programs.get(index)
            calls[name] = calls["exact"] if program is None else partial(attend, program, request)
        if device.type == "cuda":
            best = {name: quartiles(runs)[1] for name, runs in on_device(calls, host=False).items()}
        else:
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(rounds):
                for name, call in calls.items():
                    best[name] = min(best[name], seconds(call, device))
        for name in calls:
            total[name] += best[name]
        return exact_tap(module, request)

    with tapping(tap):
        forward()
    return total


def attention_level(
    model: nn.Module, plans: Mapping[str, Any], tokens: Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns seconds of all attention calls of one prefill, per arm."""
    from adaattn_hf.calibration.arms import programs_of

    means = mean_keys(model, tokens[:, :MEANS])
    arms = {name: programs_of(plan, means) for name, plan in plans.items()}
    base: Any = model.base_model
    total = attention_seconds(lambda: base(input_ids=tokens, use_cache=False), arms, rounds)
    return {name: {"seconds": value} for name, value in total.items()}


@torch.no_grad()
def model_level(
    model: Any, plans: Mapping[str, Any], tokens: Tensor, rounds: int, monitor: str | None, loss: bool
) -> dict[str, dict[str, float]]:
    """Returns seconds of one prefill of the whole model to its last logits, per arm, and the KL of each plan there.

    Beside a pass behind one of the same length stands one of a length that was not met before, `new_length`: behind
    another such, as a model with one plan meets them. Each is a token shorter than the last.

    Args:
        model: Loaded with `attn_implementation="adaattn"`.
        plans: By name.
        tokens: `[1, n]`.
        rounds: Rounds over the arms.
        monitor: A plan that is timed once more while it is watched.
        loss: Measure the KL of each plan, in forward passes that are not timed.
    """
    from adaattn_hf.calibration.arms import ModelArms

    def call(length: int = tokens.shape[1]) -> Any:
        return model(input_ids=tokens[:, :length], use_cache=False, logits_to_keep=1)

    scores = ModelArms(model)
    arms: dict[str, tuple[str, Any, bool]] = {
        "stock sdpa": ("sdpa", None, False),
        "exact": ("adaattn", None, False),
    }
    arms |= {name: ("adaattn", plan, False) for name, plan in plans.items()}
    if monitor is not None:
        arms[f"{monitor}, monitored"] = ("adaattn", plans[monitor], True)
    most = (tokens.shape[1] - 1) // (2 * len(arms))
    if rounds > most:
        raise UsageError(
            f"rounds: got {rounds} over {len(arms)} arms, all of lengths of their own below {tokens.shape[1]}; "
            f"pass at most {most}, or longer --lengths"
        )
    found: dict[str, dict[str, float]] = {name: {"seconds": float("inf")} for name in arms}
    exact = scores.exact(tokens) if loss else None
    shorter = iter(range(tokens.shape[1] - 1, 0, -1))
    for turn in range(rounds):
        for name, (implementation, plan, watched) in arms.items():
            model.set_attn_implementation(implementation)
            if plan is not None:
                attach.attach(model, plan, unverified=True)
                model.config.adaattn = {**model.config.adaattn, "monitor": watched}
            call()  # untimed: it reads the plan, and makes what later passes of this length share
            before = _watching(model)
            taken = min(seconds(call, tokens.device) for _ in range(_PASSES))
            if taken < found[name]["seconds"]:
                found[name]["seconds"] = taken
                if watched:
                    found[name]["watching"] = (_watching(model) - before) / _PASSES
            call(next(shorter))
            met_first = seconds(partial(call, next(shorter)), tokens.device)
            found[name]["new_length"] = min(met_first, found[name].get("new_length", met_first))
            if plan is not None and not watched and turn == 0 and exact is not None:
                found[name]["kl"] = _kl(scores, exact, tokens)
            attach.remove_plan(model)
            model.config.__dict__.pop("adaattn", None)
    model.set_attn_implementation("adaattn")
    return found


def _watching(model: nn.Module) -> float:
    """Seconds that watching has taken so far."""
    from adaattn_hf.patches.observe import monitoring

    return float(sum(layer["seconds"] for layer in monitoring.statistics(model)))


def _kl(scores: Any, exact: Tensor, tokens: Tensor) -> float:
    planned = scores.hidden(tokens)
    parts = []
    for _, (left, right) in scores.chunks(exact, planned):
        first, second = left[0].double().log_softmax(-1), right[0].double().log_softmax(-1)
        parts.append((first.exp() * (first - second)).sum(-1))
    return float(torch.cat(parts).mean())


@app.command()
def speed(
    model: study.Model,
    record: Annotated[list[str], typer.Option(help="A plan to time, NAME=FILE of `study seeds`.")],
    data: study.Data,
    output: Annotated[Path, typer.Option(help="The file of the figures; what it holds of other cells is kept.")],
    lengths: study.Lengths = "4096,8192",
    level: Annotated[str, typer.Option(help="attention, model, or both by a comma.")] = ",".join(LEVELS),
    rounds: Annotated[int, typer.Option(help="Rounds over the arms; the smallest time counts.")] = 2,
    monitor: Annotated[str | None, typer.Option(help="Name of a plan to time once more while it is watched.")] = None,
    loss: Annotated[
        bool, typer.Option(help="Measure the KL of each plan on the text as well, of a single sequence.")
    ] = True,
    batch: Annotated[int, typer.Option(help="Sequences that are read at once.")] = 1,
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Time attention and whole prefills under plans beside stock and exact attention."""
    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    words = {
        "model": Path(model).name,
        "dtype": dtype,
        "data": [path.name for path in data],
        "rounds": rounds,
        "warm_up": "a pass of the same length",
    }
    kept: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    if kept.get("settings", words) != words:
        raise UsageError(f"output: {output} was measured with other settings; give another --output, or remove it")
    kept |= {"settings": words, "provenance": provenance(torch.device(device))}
    for length in study.numbers(lengths):
        tokens = tokens_of(data, encode, length, loaded, batch)
        plans = plans_of_records(record, loaded, tokens[:1])
        shape = str(length) if batch == 1 else f"{batch} x {length}"
        for name in level.split(","):
            if name == "attention":
                cells = attention_level(loaded, plans, tokens, rounds)
            elif name == "model":
                cells = model_level(loaded, plans, tokens, rounds, monitor, loss and batch == 1)
            else:
                raise UsageError(f"level: got {name!r}, expected one of {', '.join(LEVELS)}")
            kept.setdefault(name, {})[shape] = cells
            study.write(output, kept)
            typer.echo(f"{name} {shape}: " + ", ".join(f"{arm} {cell['seconds']:.2f} s" for arm, cell in cells.items()))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "speed", argv)


if __name__ == "__main__":
    main()
