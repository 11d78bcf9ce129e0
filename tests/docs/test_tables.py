"""Tables of the documentation have what the source has: backends and their order, keys of formats, variables."""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import pytest

from adaattn_hf import AdaAttnConfig, Plan
from adaattn_hf.attention import kind
from adaattn_hf.backends.order import RULES, Rule
from adaattn_hf.patches.cache import disk

from ..support.source_tree import ROOT


def table() -> str:
    lines = ["| calls | tried in this order | measured |", "|---|---|---|"]
    for rule in RULES:
        page = f"[{rule.page.partition('.')[0]}](results/{rule.page})" if rule.page else ""
        lines.append(f"| {rule.calls} | {', '.join(f'`{name}`' for name in rule.names)} | {page} |")
    return "\n".join(lines)


def test_the_table_of_the_order_is_that_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def untimed(rule: Rule) -> list[str]:
    """Backends of a rule for GPUs that no table of its page has a column of; `eager` takes what is left."""
    page = (ROOT / "docs" / "results" / rule.page.partition("#")[0]).read_text(encoding="utf-8")
    return [name for name in rule.names if name != "eager" and f"| {name} |" not in page]


def test_no_backend_is_in_the_order_on_gpus_that_was_not_timed() -> None:
    rules = [rule for rule in RULES if rule.page.startswith("gpu_plans.md")]
    assert [rule.calls for rule in rules if untimed(rule)] == []
    assert untimed(rules[0]._replace(names=("fa2", "fa3", "triton"))) == ["fa2", "fa3"]


def test_the_how_to_of_backends_has_every_option_of_a_call() -> None:
    page = (ROOT / "docs" / "howto" / "backend.md").read_text(encoding="utf-8")
    table = page.partition("| option | the call has |")[2].partition("\n\n")[0]
    bits = {bit: name for name, bit in vars(kind).items() if name.isupper() and isinstance(bit, int)}
    assert set(re.findall(r"`([A-Z_0-9]+)`", table)) == {bits[bit] for bit in kind.OPTIONS}


SCHEMA = json.loads(resources.files("adaattn_hf.eval.bench").joinpath("schema.json").read_text("utf-8"))


def fields(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


@pytest.mark.parametrize(("section", "keys"), [
    ("Settings: `config.adaattn`", fields(AdaAttnConfig)), ("Plan", ["format", *fields(Plan)]),
    ("Cache", [*disk._FIELDS, *disk._OF_LAYER]),
    ("Report of `adaattn bench`", [*SCHEMA["properties"], *SCHEMA["$defs"]["cell"]["properties"]]),
])  # fmt: skip
def test_every_key_is_on_the_page(section: str, keys: Iterable[str]) -> None:
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    text = page.split(f"## {section}\n")[1].split("\n## ")[0]
    ways = "`{}`", "`{}[]", "`cells[].{}`", "`layers[].{}`"
    assert [key for key in keys if not any(way.format(key) in text for way in ways)] == []


VARIABLE = re.compile(r"\bADAATTN_[A-Z][A-Z_]*\b")


def read_in(checkout: Path) -> Iterator[Path]:
    for room in ("adaattn_hf", "adaattn_cli", "patches", "eval", "tests", "hub", "studies"):
        yield from (checkout / room).rglob("*.py")
    yield checkout / "Makefile"


def described(checkout: Path) -> set[str]:
    page = (checkout / "docs" / "tuning.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## Environment variables")
    return set(VARIABLE.findall(table.partition("\n## ")[0]))


def test_the_table_has_all_that_the_source_names(checkout: Path) -> None:
    named = {
        name
        for path in read_in(checkout)
        if path != Path(__file__)
        for name in VARIABLE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) >= 5
    assert named == described(checkout)
