"""The page of formats names every key of the settings, of a plan and of a benchmark's report."""

import dataclasses
import json
from collections.abc import Iterable
from importlib import resources

import pytest

from adaattn_hf import AdaAttnConfig, Plan
from adaattn_hf.patches.cache import disk

from ..support.source_tree import ROOT

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
