"""Turns the results of `run.py` into `docs/conformance.md`.

    python tests/conformance/table.py --results DIR docs/conformance.md
    python tests/conformance/table.py docs/conformance.md

Without results the table of versions alone is made anew, from what `matrix.py --record` kept.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any

import yaml

from adaattn_hf._files import write_atomically

HERE = Path(__file__).parent
VERSIONS = HERE.parents[1] / "docs" / "results" / "versions.json"

NAME = "adaattn"
GOOD = "passed"
LISTED: dict[str, str] = yaml.safe_load((HERE / "families.yaml").read_text(encoding="utf-8"))
WITHOUT_STOCK_SDPA = LISTED.pop("without stock sdpa").split()
NOTES: dict[str, str] = yaml.safe_load((HERE / "notes.yaml").read_text(encoding="utf-8"))

Results = dict[str, dict[str, dict[str, Any]]]
"""Family -> implementation -> content of its file."""


def read(directory: Path) -> Results:
    found: Results = {}
    for path in sorted(directory.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(content["family"], {})[content["implementation"]] = content
    return {family: both for family, both in found.items() if {"sdpa", NAME} <= set(both)}


def group(test: str) -> str:
    return re.sub(r"_\d+(_.*)?$", "", test.split("::")[-1].removeprefix("test_"))


def outcomes(content: dict[str, Any]) -> dict[str, str]:
    return {test["test"]: test["outcome"] for test in content["tests"]}


def why(content: dict[str, Any], name: str) -> str:
    said = next((str(test["why"]) for test in content["tests"] if test["test"] == name), "not collected")
    known = NOTES.get(f"{content['family']}::{name}")
    return said if known is None else f"{said}. {known[0].upper()}{known[1:]}."


def kind_of(family: str) -> str:
    return next((kind for kind, names in LISTED.items() if family in names.split()), "other")


def summary(results: Results) -> list[str]:
    lines = [
        "| family | kind | stock `sdpa` | `adaattn` | failed by both | passed by `sdpa`, failed by `adaattn` | "
        "passed by `adaattn` alone | calls |", "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    order = [*LISTED, "other"]
    for family in sorted(results, key=lambda name: (order.index(kind_of(name)), name)):
        stock, ours = (outcomes(results[family][name]) for name in ("sdpa", NAME))
        bad = [t for t, o in stock.items() if o == GOOD and ours.get(t) in ("failed", "error")]
        both = [t for t, o in stock.items() if o in ("failed", "error") and ours.get(t) in ("failed", "error")]
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
    counted = Counter(group(t) for both in results.values() for t, o in outcomes(both["sdpa"]).items() if o == GOOD)
    columns = [name for name, _ in counted.most_common()]
    lines = [
        "| family | " + " | ".join(str(n + 1) for n in range(len(columns))) + " |", "|---|" + "---|" * len(columns),
    ]  # fmt: skip
    for family, both in sorted(results.items()):
        cells = []
        for column in columns:
            tests = [[o for t, o in outcomes(both[name]).items() if group(t) == column] for name in ("sdpa", NAME)]
            passed = [found.count(GOOD) for found in tests]
            cells.append(" " if not any(passed) else f"{passed[0]} {passed[1]}")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    legend = [f"{n + 1}. `{name}`" for n, name in enumerate(columns)]
    return [*legend, "", *lines]


def listed(results: Results, outcome_of_ours: tuple[str, ...], stock_sdpa: bool = True) -> list[str]:
    """Tests that stock passes and ours does not, of families that sdpa serves, or whose stock column is eager's."""
    lines = []
    for family, both in sorted(results.items()):
        if (family in WITHOUT_STOCK_SDPA) == stock_sdpa:
            continue
        ours = outcomes(both[NAME])
        for test, outcome in outcomes(both["sdpa"]).items():
            if outcome == GOOD and ours.get(test, "skipped") in outcome_of_ours:
                lines.append(f"* {family}: `{test}`: {why(both[NAME], test)}")
    return lines or ["None."]


def versions_table(record: Path) -> list[str]:
    """Returns the tests that ran under each set of versions, from what `matrix.py --record` kept."""
    kept = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    lines = [
        "| Python | torch | Transformers | tests | passed | failed | skipped | commit |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in kept.values():
        head = f"| {row['python']} | {row['torch']} | {row['transformers']}"
        own = {name: n for name, n in row["runs"].items() if name.startswith("tests")}
        other = {name: n for name, n in row["runs"].items() if name not in own}
        paths = sorted(
            {path.removeprefix("tests/") for name in own for path in name.split() if path.startswith("tests")}
        )
        rooms = sorted({path for path in paths if "/" not in path})
        of = Counter(path.partition("/")[0] for path in paths if "/" in path)
        named = ", ".join([f"`{room}`" for room in rooms] + [f"{n} of `{room}`'s files" for room, n in of.items()])
        for name, runs in [(named, own), *((k, {k: v}) for k, v in other.items())]:
            if runs:
                passed, bad, skipped = (
                    sum(counts.get(outcome, 0) for counts in runs.values() for outcome in outcomes)
                    for outcomes in (("passed",), ("failed", "error"), ("skipped",))
                )
                commits = ", ".join(sorted({counts.get("commit", "–")[:9] for counts in runs.values()}))
                lines.append(f"{head} | {name} | {passed} | {bad} | {skipped} | {commits} |")
    return lines if kept else ["None yet."]


def with_versions(page: str, record: Path) -> str:
    """Returns a page with another table of versions, of which it must have one."""
    table = "\n".join(versions_table(record))
    head = re.escape(table.partition("\n")[0])
    renewed, count = re.subn(rf"^{head}\n(?:\|.*\n)*", lambda _: f"{table}\n", page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"the page: got {count} tables of versions, expected one; run with --results")
    return renewed


def document(results: Results) -> str:
    versions = {
        name: {str(b[i]["versions"][name]) for b in results.values() for i in b} for name in ("transformers", "torch")
    }
    commits = sorted({str(b[i]["commit"]) for b in results.values() for i in b})
    stock_passed = sum(
        outcome == GOOD for family, both in results.items() if family not in WITHOUT_STOCK_SDPA
        for outcome in outcomes(both["sdpa"]).values()
    )  # fmt: skip
    failed, skipped = listed(results, ("failed", "error")), listed(results, ("skipped",))
    eager = listed(results, ("failed", "error", "skipped"), stock_sdpa=False)
    count = 0 if failed == ["None."] else len(failed)
    template = Template((HERE / "page.md").read_text(encoding="utf-8"))
    return template.substitute(
        transformers=", ".join(sorted(versions["transformers"])), torch=", ".join(sorted(versions["torch"])),
        commit=", ".join(commits),
        families=sum(any(t["calls"] for t in both[NAME]["tests"]) for both in results.values()), passed=stock_passed,
        failures=count, beside=0 if eager == ["None."] else len(eager), summary="\n".join(summary(results)),
        failed="\n".join(failed), skipped="\n".join(skipped), eager="\n".join(eager), alone="\n".join(alone(results)),
        matrix="\n".join(matrix(results)), versions="\n".join(versions_table(VERSIONS)),
    )  # fmt: skip


def alone(results: Results) -> list[str]:
    """Returns what adaattn fails in tests that stock skips or lacks."""
    lines = []
    for family, both in sorted(results.items()):
        stock = outcomes(both["sdpa"])
        for test, outcome in outcomes(both[NAME]).items():
            if outcome in ("failed", "error") and stock.get(test) not in (GOOD, "failed", "error"):
                lines.append(f"* {family}: `{test}`: {why(both[NAME], test)}")
    return lines or ["None."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.results is None:
        page = with_versions(args.out.read_text(encoding="utf-8"), VERSIONS)
    else:
        results = read(args.results)
        if not results:
            parser.error(f"--results: no family in {args.results} was run under both implementations")
        page = document(results)
    write_atomically(args.out, page)


if __name__ == "__main__":
    main()
