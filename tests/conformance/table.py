"""Turns the results of `run.py` into `docs/conformance.md`.

python tests/conformance/table.py --results DIR docs/conformance.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from families import FAMILIES, WITHOUT_STOCK_SDPA

NAME = "adaattn"
GOOD = "passed"

Results = dict[str, dict[str, dict[str, Any]]]
"""Family -> implementation -> content of its file."""


def read(directory: Path) -> Results:
    """Returns the families that were run under both implementations."""
    found: Results = {}
    for path in sorted(directory.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(content["family"], {})[content["implementation"]] = content
    return {family: both for family, both in found.items() if {"sdpa", NAME} <= set(both)}


def group(test: str) -> str:
    """Returns the name of a test without its class and its parameters."""
    name = test.split("::")[-1].removeprefix("test_")
    return re.sub(r"_\d+(_.*)?$", "", name)


def outcomes(content: dict[str, Any]) -> dict[str, str]:
    """Returns test -> outcome."""
    return {test["test"]: test["outcome"] for test in content["tests"]}


def why(content: dict[str, Any], name: str) -> str:
    """Returns what a test said."""
    return next((str(test["why"]) for test in content["tests"] if test["test"] == name), "not collected")


def kind_of(family: str) -> str:
    """Returns the kind that a family is listed under."""
    return next((kind for kind, names in FAMILIES.items() if family in names), "other")


def summary(results: Results) -> list[str]:
    """Returns the table of families."""
    lines = [
        "| family | kind | stock `sdpa` | `adaattn` | failed by both | passed by `sdpa`, failed by `adaattn` | "
        "passed by `adaattn` alone | calls served |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    order = [*FAMILIES, "other"]
    for family in sorted(results, key=lambda name: (order.index(kind_of(name)), name)):
        stock, ours = (outcomes(results[family][name]) for name in ("sdpa", NAME))
        bad = [t for t, o in stock.items() if o == GOOD and ours.get(t) in ("failed", "error")]
        both = [
            t for t, o in stock.items() if o in ("failed", "error") and ours.get(t) in ("failed", "error")
        ]
        more = [t for t, o in ours.items() if o == GOOD and stock.get(t) != GOOD]
        calls = sum(test["calls"] for test in results[family][NAME]["tests"])
        note = "¹" if family in WITHOUT_STOCK_SDPA else ""
        lines.append(
            f"| {family}{note} | {kind_of(family)} | {list(stock.values()).count(GOOD)} | "
            f"{list(ours.values()).count(GOOD)} | {len(both)} | {len(bad)} | {len(more)} | {calls} |"
        )
    return lines


def matrix(results: Results) -> list[str]:
    """Returns family x group of tests, each cell `sdpa adaattn`: tests passed."""
    counted = Counter(
        group(t) for both in results.values() for t, o in outcomes(both["sdpa"]).items() if o == GOOD
    )
    columns = [name for name, _ in counted.most_common()]
    lines = [
        "| family | " + " | ".join(str(n + 1) for n in range(len(columns))) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for family, both in sorted(results.items()):
        cells = []
        for column in columns:
            passed = []
            for name in ("sdpa", NAME):
                passed.append(sum(o == GOOD and group(t) == column for t, o in outcomes(both[name]).items()))
            cells.append(" " if not any(passed) else f"{passed[0]} {passed[1]}")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    legend = [f"{n + 1}. `{name}`" for n, name in enumerate(columns)]
    return [*legend, "", *lines]


def listed(results: Results, outcome_of_ours: tuple[str, ...]) -> list[str]:
    """Returns the tests that sdpa passes and ours does not, with what ours said."""
    lines = []
    for family, both in sorted(results.items()):
        ours = outcomes(both[NAME])
        for test, outcome in outcomes(both["sdpa"]).items():
            if outcome == GOOD and ours.get(test, "skipped") in outcome_of_ours:
                lines.append(f"* {family}: `{test}`: {why(both[NAME], test)}")
    return lines or ["None."]


def refused() -> tuple[list[str], list[str]]:
    """Returns the model types of the installed Transformers that are refused, and those that look up a table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import adaattn_hf  # noqa: F401  registers the names
    from adaattn_hf.patches.refusal import refusal_of

    plain, tables = [], []
    for model_type, config_class in sorted(CONFIG_MAPPING.items()):
        reason = refusal_of(config_class)
        if reason is not None:
            (tables if "table of its own" in reason else plain).append(model_type)
    return plain, tables


def document(results: Results) -> str:
    """Returns the page."""
    versions = {
        name: {str(b[i]["versions"][name]) for b in results.values() for i in b}
        for name in ("transformers", "torch")
    }
    stock_passed = sum(o == GOOD for b in results.values() for o in outcomes(b["sdpa"]).values())
    failed, skipped = listed(results, ("failed", "error")), listed(results, ("skipped",))
    count = 0 if failed == ["None."] else len(failed)
    plain, tables = refused()
    text = f"""# Conformance

Generated by `make conformance`; do not edit. transformers {", ".join(sorted(versions["transformers"]))},
torch {", ".join(sorted(versions["torch"]))}.

Transformers' own model tests (`tests/conformance/selection.txt` says which), run with stock `sdpa` and with
`adaattn` in
its place: **{len(results)} families, {stock_passed} tests that `sdpa` passes, {count} of them fail with
    `adaattn`.**

The tests are Transformers' and are not part of this project. The per-model files come from a checkout of
Transformers, the shared mixins from the source distribution of the installed version; where the checkout is
older than the installed version, some tests fail with both implementations.

## Families

¹ The family declares that stock `sdpa` cannot serve it (softcap, learned sinks), so that its column is stock
*eager*; `adaattn` is put in its place all the same.

{chr(10).join(summary(results))}

## Passed by `sdpa`, failed by `adaattn`

{chr(10).join(failed)}

## Passed by `sdpa`, skipped by the test itself with `adaattn`

Such tests draw random inputs and skip themselves when these do not hold what they need.

{chr(10).join(skipped)}

## Family by test

Each cell is the number of tests that passed with `sdpa` and with `adaattn`; an empty one means that none ran.

{chr(10).join(matrix(results))}

## Refused

These model types compute attention in code of their own, past Transformers' attention interface, which
nevertheless accepts any registered name for them. `adaattn_hf.check(model_or_config)` refuses all of them
with one sentence, before or after loading. Where the model asks for a mask, running it is refused with the
same sentence.

{", ".join(f"`{name}`" for name in plain)}

These look the implementation up in a table of their own, so that loading them ends in `KeyError: 'adaattn'`
inside
Transformers:

{", ".join(f"`{name}`" for name in tables)}

The models among them that never ask for a mask (DeBERTa, for one) load and run their own attention; only
`check` says so. Transformers offers no place at which a registered implementation could object earlier.
"""
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    results = read(args.results)
    if not results:
        parser.error(f"--results: no family in {args.results} was run under both implementations")
    temporary = args.out.with_suffix(".tmp")
    temporary.write_text(document(results), encoding="utf-8")
    os.replace(temporary, args.out)


if __name__ == "__main__":
    main()
