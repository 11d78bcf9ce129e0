"""Plans as pages: complete, self-contained, legible in a real browser, by keyboard and in the dark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from adaattn_hf.cli.main import app
from adaattn_hf.plans.choices import EXACT
from adaattn_hf.plans.page import compared, plan_page
from adaattn_hf.plans.plan import LayerPlan, Plan, UnitRecord
from adaattn_hf.plans.render import heat_map

from ..support.browser import CONTRASTS, drawn, needs_browser
from ..support.choices import make_choice
from .test_plan import make_plan

KINDS = (make_choice("window", 256, 16, precision="bf16"), EXACT, make_choice(precision="int8"))


def wide_plan(heads: int, layers: int = 3) -> Plan:
    choices = tuple(KINDS[head % 3] for head in range(heads))
    units = [UnitRecord(i, h, 1e-5 * h, 0.1, 0.3, 0.0, 0.0, 0.0) for i in range(layers) for h in range(heads)]
    return make_plan(
        layers=tuple(LayerPlan(i, "ef" * 32, choices) for i in range(layers)), units=tuple(units)
    )


def embedded(page: str) -> Any:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_holds_the_plan_and_asks_for_nothing_from_elsewhere() -> None:
    plan = make_plan(model_type="</script><b>")
    page = plan_page(plan)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "</script><b>" not in page
    data = embedded(page)
    (stop,) = data["stops"]
    assert data["rows"] == [0, 1]  # the plan is silent of the first layer
    assert [data["choices"][pick] for pick in stop["picks"]] == ["exact", "exact", "w256+16 bf16", "exact"]
    assert stop["time"] == [1.0, 1.0, 0.3333, 1.0]
    assert stop["speed"] == 1.5
    assert stop["proof"] == {"mean": 1e-4, "upper": 5e-4, "sentence": "passed"}
    assert embedded(plan_page(make_plan(layers=(), units=())))["rows"] == []


@pytest.mark.parametrize("heads", [2, 12, 32])
def test_a_terminal_of_80_columns_shows_every_head(heads: int) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(heat_map(wide_plan(heads)))
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    signs = "w256+16 bf16" if heads == 2 else ("A·B" * heads)[:heads]
    assert text.count(signs) >= 3
    assert all(choice.label in text for choice in KINDS[: min(heads, 3)])


def test_two_plans_differ_in_numbers_and_picture(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(wide_plan(2).to_json())
    second.write_text(make_plan().to_json())
    page = tmp_path / "diff.html"
    done = CliRunner().invoke(app, ["plan", "diff", str(first), str(second), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "layer 0 head 0: w256+16 bf16 -> exact" in done.output
    assert "predicted loss, nats/token: 3e-05 -> 1e-05" in done.output
    assert "attention of planned layers, times as fast: 3 -> 1.5" in done.output
    data = embedded(page.read_text(encoding="utf-8"))
    assert data["compared"]
    assert [stop["name"] for stop in data["stops"]] == ["first: first.json", "second: second.json"]
    told = json.loads(CliRunner().invoke(app, ["plan", "diff", str(first), str(second), "--json"]).output)
    assert [one["heads that are not exact"] for one in told["plans"]] == [3, 1]
    assert [unit["layer"] for unit in told["units"]] == [0, 2]


@needs_browser
@pytest.mark.parametrize(("heads", "window"), [(2, "1280,900"), (32, "420,900")])
def test_a_browser_draws_it_so_that_it_can_be_read(heads: int, window: str, tmp_path: Path) -> None:
    page = drawn(plan_page(wide_plan(heads)), CONTRASTS, tmp_path, f"--window-size={window}")
    assert page.count('role="gridcell"') == 3 * heads
    assert "Layer 0, head 0" in page
    assert 'data-wide="false"' in page
    least = re.search(r'data-least="([\d.]+)"', page)
    assert least is not None
    assert float(least[1]) >= 4.5  # WCAG AA
    assert "<title>Plan for llama</title>" in page


@needs_browser
def test_a_browser_marks_what_differs_and_obeys_the_keyboard(tmp_path: Path) -> None:
    page = compared([("a", wide_plan(2)), ("b", make_plan())], ["two plans"])
    press = "$('grid').dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));"
    press = f"for (const key of ['ArrowDown', 'End']) {press}"
    found = drawn(
        page, f"$('stop').value = 1; $('stop').dispatchEvent(new Event('input')); {press}", tmp_path
    )
    assert found.count('class="changed"') == 2  # layer 0 head 0, layer 2 head 0; layer 1 is the same
    assert "Layer 1, head 1" in found
    assert ">b</output>" in found
