"""The tables of docs/figures.md, from kept results, each with its machine and its commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .budget.report import elsewhere, inside
from .pages import commit, loss, machine, percent, table
from .real_page import GAINS, cells, key_of


def tables(reports: Mapping[str, Any]) -> dict[str, str]:
    """Every table by the name of its marks."""
    found = {
        "losses": losses([reports["budget"], reports["budget_cuda"]]),
        "times": speed([reports["budget"], reports["budget_cuda"]]),
        "generation": generation(reports["gpu_plans"]),
        "real": real(reports["real_models"]),
    }
    return {name: "\n".join(lines[:-1]) for name, lines in found.items()}


def _budgets(study: Mapping[str, Any]) -> list[float]:
    return sorted({record["budget"] for record in study["seeds"]})


def losses(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many calibrations of each study found a plan, and which plans keep their budget on unseen text."""
    rows = []
    for study in studies:
        made = study["seeds"][0]["provenance"]
        for budget in _budgets(study):
            own = [record for record in study["seeds"] if record["budget"] == budget]
            met = [record for record in own if record["met"]]
            bound = max(verdict["upper"] for record in met for verdict in record["report"]["verdicts"])
            counts = [
                met,
                [one for one in met if elsewhere(one) <= budget],
                [one for one in own if inside(one)],
            ]
            checked = [len(counts[0]), *(len(c) if own[0].get("check") else None for c in counts[1:])]
            written = ["not measured" if n is None else f"{n} of {len(own)}" for n in checked]
            rows.append((
                percent(budget), own[0]["settings"]["dtype"], *written, f"{loss(bound)} (limit {loss(budget)})",
                f"{machine(made)}, {commit(made)}",
            ))  # fmt: skip
    head = (
        "budget", "dtype", "calibrations that found a plan", "on unseen text: mean rise within budget",
        "95 % bound within budget, too", "largest bound when verified, nats/token", "measured on, commit",
    )  # fmt: skip
    return table(head, rows)


def speed(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """The speedup of one plan of each budget: of the whole prefill, and of its attention."""
    rows = []
    for study in studies:
        timed = study["speed"]
        length = max((shape for shape in timed["attention"] if shape.isdigit()), key=int)
        shapes = [length, *(shape for shape in timed["attention"] if shape.endswith(f" x {length}"))]
        for shape in shapes:
            made = [
                timed.get("renewed", {}).get(f"{level}, {shape}", timed)["provenance"]
                for level in ("model", "attention")
                if shape in timed.get(level, {})
            ]
            where = " and ".join(dict.fromkeys(f"{machine(one)}, {commit(one)}" for one in made))
            for budget in _budgets(study):
                rows.append((
                    percent(budget), where, shape.partition(" x ")[0] if "x" in shape else "1",
                    *_ratios(timed, shape, percent(budget)),
                ))  # fmt: skip
    head = (
        "budget", "measured on, commit", "batch", "whole prefill: speedup over stock", "over exact AdaAttn",
        "attention only: over stock", "over exact AdaAttn",
    )  # fmt: skip
    return table(head, rows)


def _ratios(timed: Mapping[str, Any], shape: str, budget: str) -> Iterator[str]:
    """Cells of one plan; a study may have timed only attention."""
    for level in ("model", "attention"):
        arms = timed.get(level, {}).get(shape)
        for base in ("stock sdpa", "exact"):
            if arms is None:
                yield "–"
            else:
                plan = arms.get(budget) or arms[f"plan-{budget}".replace(" ", "")]
                yield f"{arms[base]['seconds'] / plan['seconds']:.2f}"


def real(report: Mapping[str, Any]) -> list[str]:
    """What budgets bring Qwen2.5-Coder-1.5B, at the lengths at which whole passes were timed."""
    shown = {
        name: GAINS[name]
        for name in ("kept", "third kind, %", "inside", "bound inside", "whole pass × stock", "× exact")
    }
    shown["measured on"] = lambda seeds, _: f"{machine(seeds[0]['provenance'])}, {commit(seeds[0]['provenance'])}"
    rows = []
    for device in report.values():
        timed = {(one["model"], one["length"]) for one in device["speed"]}
        own = [one for one in device["rows"] if not one["random"] and key_of(one)[:2] in timed]
        rows += [cell for _, *cell in cells(own, device["speed"], shown)]
    head = (
        "tokens", "budget", "calibrations that found a plan", "rise on unseen text, %", "mean within budget",
        "95 % bound within budget, too", "whole pass: speedup over stock", "over exact AdaAttn", "measured on, commit",
    )  # fmt: skip
    return table(head, rows)


def generation(report: Mapping[str, Any]) -> list[str]:
    """Generation with a static cache, as Transformers compiles it on a CUDA device."""
    arms = ("sdpa", "exact", "plan 0.1 %", "plan 1 %")
    rows = [
        (
            cell["cell"].removesuffix(", ms a token"), *(f"{cell[arm]:.1f} ms" for arm in arms),
            *(f"{cell['sdpa'] / cell[arm]:.2f}" for arm in ("exact", "plan 1 %")),
        )
        for cell in report["sections"]["generation"]
    ]  # fmt: skip
    made = report["settings"].get("generation", report["setting"])
    head = (
        f"one token after ({machine(made)}, commit {commit(made)})", "stock sdpa", "exact AdaAttn",
        *(f"{arm.removeprefix('plan ')} windows" for arm in arms[2:]),
        "speedup, exact", "speedup, 1 %",
    )  # fmt: skip
    return table(head, rows)
