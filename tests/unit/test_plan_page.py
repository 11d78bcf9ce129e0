"""Plans as pages: complete, self-contained, legible in a real browser, by keyboard and in the dark."""

import io
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaattn_cli.pictures.headline import Speedups, below, cost, digest, heat_map, print_plan, speed_of, speedups_beside
from adaattn_cli.pictures.page import plan_page, rounded
from adaattn_hf.plans.choices import EXACT
from adaattn_hf.plans.plan import LayerPlan, Plan, PlanError, UnitRecord
from adaattn_hf.plans.wording import allowed, at_most, quotient, rise

from ..support.browser import CONTRASTS, drawn, needs_browser
from ..support.choices import make_choice
from ..support.command import adaattn
from .test_plan import make_plan

CUTS = """{
const cut = [...document.querySelectorAll(".scroll, .grid button")].filter(e => e.scrollWidth > e.clientWidth);
document.body.dataset.cut = cut.map(e => e.outerHTML.slice(0, 80)).join();
}"""
"""Writes what of a picture is wider than its place, and so cut."""
KINDS = (make_choice("window", 256, 16, precision="bf16"), EXACT, make_choice(precision="int8"))


def wide_plan(heads: int, layers: int = 3) -> Plan:
    choices = tuple(KINDS[head % 3] for head in range(heads))
    units = [UnitRecord(i, h, 1e-5 * h, 0.1, 0.3, 0.0, 0.0, 0.0) for i in range(layers) for h in range(heads)]
    return make_plan(layers=tuple(LayerPlan(i, "ef" * 32, choices) for i in range(layers)), units=tuple(units))


def embedded(page: str) -> Any:
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
    words = "perplexity +0.010 %, at most +0.051 %, allowed +0.1 %"
    assert data["title"] == "</script><b>"
    assert stop["verdict"] == f"{words} · attention 1.50 times as fast"
    proof = {"mean": 1e-4, "upper": 5e-4, "sentence": "Confidence of the bound: 95 %, held-out text."}
    assert stop["proof"] == proof
    assert embedded(plan_page(make_plan(layers=(), units=())))["rows"] == []


@pytest.mark.parametrize("heads", [2, 12, 32])
def test_a_terminal_of_80_columns_shows_every_head(heads: int) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(console, wide_plan(heads), Speedups(), verbose=False)
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    signs = "w256+16 bf16" if heads == 2 else ("A·B" * heads)[:heads]
    assert text.count(signs) >= 3
    assert all(choice.label in text for choice in KINDS[: min(heads, 3)])
    assert "w256+16: the last 256 keys and the first 16; bf16: products in bfloat16" in text.replace("\n", " ")


@needs_browser
@pytest.mark.parametrize(("heads", "window"), [(2, "1280,900"), (9, "390,900"), (32, "390,900")])
def test_a_browser_draws_it_so_that_it_can_be_read(heads: int, window: str, tmp_path: Path) -> None:
    page = drawn(plan_page(wide_plan(heads)), CONTRASTS + CUTS, tmp_path, f"--window-size={window}")
    assert page.count('role="gridcell"') == 3 * heads
    assert "Layer 0, head 0" in page
    assert 'data-wide="false"' in page
    assert 'data-cut=""' in page
    least = re.search(r'data-least="([\d.]+)"', page)
    assert least is not None
    assert float(least[1]) >= 4.5  # WCAG AA
    assert "<title>llama</title>" in page
    assert re.search(r'id="headline"[^>]*>perplexity \+0\.010 %, at most \+0\.051 %, allowed \+0\.1 % · ', page)
    assert ">Exact heads are grey; other colours run from the smallest to the largest value on this page." in page


@needs_browser
def test_a_browser_obeys_the_keyboard_and_colours_what_is_not_exact(tmp_path: Path) -> None:
    press = "$('grid').dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));"
    press = f"for (const key of ['ArrowDown', 'End']) {press}"
    found = drawn(plan_page(wide_plan(2), Speedups((1.3, 1.3), 1.5)), press, tmp_path)
    assert found.count('role="grid"') == 1
    # a third of the time, and exact heads, whatever theirs is
    assert found.count("background: rgb(254, 232, 56)") == 3
    assert found.count("background: rgb(211, 211, 211)") == 3
    assert "Layer 1, head 1" in found
    assert len(re.findall(r'<button[^>]* aria-selected="true"', found)) == 1
    assert re.search(r'<p id="headline"[^>]*>perplexity .* · whole model 1.30 times as fast</p>', found)


@needs_browser
def test_a_plan_that_is_exact_says_so_instead_of_a_picture(tmp_path: Path) -> None:
    page = drawn(plan_page(make_plan(layers=(), units=(), attention_layers=(0, 1))), "", tmp_path)
    assert ">every layer is exact (two layers): perplexity and speed of the model</p>" in page
    assert re.search(r'<main id="main" hidden', page)


@pytest.mark.parametrize(("price", "speed"), [(1e12, 1.0), (1e-30, 1e-42), (0.0, 0.0)])
def test_figures_at_the_ends_of_what_a_plan_may_hold_are_drawn(price: float, speed: float, tmp_path: Path) -> None:
    """What the perplexity rises by is then beyond any float."""
    units = tuple(UnitRecord(1, head, 1e12, 1e12, price, 0.0, 0.0, 0.0) for head in (0, 1))
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    path.write_text(make_plan(units=units).to_json())
    adaattn("plan", "show", path, "--verbose", "--html", page, says="without bound")
    (stop,) = embedded(page.read_text(encoding="utf-8"))["stops"]
    assert (stop["loss"], stop["speed"]) == (2e12, speed)


def test_sums_that_no_float_can_say_are_unknown() -> None:
    assert rounded(math.inf) is rounded(math.nan) is None
    for ratio, told in ((quotient([1e308] * 9, [1e308] * 3), 3.0), (quotient([1e308], [5e-324]), None)):
        assert ratio == told


@pytest.mark.parametrize("heads", [2, 12])
def test_a_plan_says_what_its_picture_shows_and_leaves_out(heads: int) -> None:
    def printed(plan: Plan) -> str:
        console = Console(width=200, file=io.StringIO())
        print_plan(console, plan, Speedups((1.2, 1.29), 2.77), verbose=False)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    plan = replace(wide_plan(heads), protocol={"model": "owner/name", "held_out_sources": 2})
    text = printed(plan)
    assert text.startswith("owner/name: perplexity +0.010 %, at most +0.051 %, allowed +0.1 % (95 %, held-out text")
    assert text.splitlines()[1] == "layers by key/value heads"
    assert "(95 %, held-out text, two sources) · whole model 1.20 to 1.29 times as fast, attention 2.77\n" in text
    exact = printed(replace(plan, layers=(), units=(), verified=None))
    assert exact == "owner/name: every layer is exact: perplexity and speed of the model\n"
    kept = {"stored": "int8", "streaming": False, "share": 0.5641, "verified": asdict(plan.verified)}
    cached = replace(plan, protocol={"cache": kept})
    assert printed(cached).splitlines()[0].endswith(" · cache 0.56 of the bytes")
    assert "of the bytes" not in printed(replace(plan, protocol={"cache": {**kept, "share": 10**400}}))


def test_every_layer_of_the_model_is_drawn_and_counted() -> None:
    """Layers 4 and 5 are exact; so is 0. Of a model with other layers between, only those of attention count."""
    for layers in ((0, 1, 2, 3, 4, 5), (1, 3, 7, 11)):
        plan = make_plan(attention_layers=layers)
        data = embedded(plan_page(plan))
        assert data["rows"] == list(layers)
        assert len(data["stops"][0]["picks"]) == 2 * len(layers)
        assert sum(map(bool, data["stops"][0]["picks"])) == 1
        table = heat_map(plan)
        assert [str(cell) for cell in table.columns[0].cells] == list(map(str, layers))
    assert speed_of(make_plan()) == pytest.approx(1.5)
    assert speed_of(make_plan(attention_layers=(0, 1, 2, 3))) == pytest.approx(4 / (3 + 1 / 1.5)), "of all four layers"
    assert below(plan) == ["w256+16: the last 256 keys and the first 16; bf16: products in bfloat16"]
    assert below(replace(plan, attention_layers=()))[1] == "layers 2 and up: exact"
    exact = replace(plan, layers=(), units=())
    assert cost(exact) == "every layer is exact (four layers): perplexity and speed of the model"
    assert embedded(plan_page(exact))["rows"] == [1, 3, 7, 11]


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 1), (0, 2), (0, 1.0)])
def test_layers_of_a_model_that_cannot_be_are_refused(layers: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError, match="layers"):
        make_plan(attention_layers=layers)


def test_layers_are_kept_with_the_plan() -> None:
    plan = make_plan(attention_layers=(1, 2))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_report_speaks_for_its_own_plan_alone(tmp_path: Path) -> None:
    plan, report = tmp_path / "adaattn_plan.json", tmp_path / "adaattn_report.json"
    plan.write_text(make_plan().to_json())
    told: dict[str, Any] = {"whole_forward": [{"ratio": 1.3}], "price_exact_seconds": 3.0, "price_plan_seconds": 2.0}
    report.write_text(json.dumps({**told, "plan_sha256": digest(plan.read_bytes())}))
    assert speedups_beside(tmp_path) == speedups_beside(plan) == Speedups((1.3, 1.3), 1.5)
    report.write_text(json.dumps({**told, "plan_sha256": digest(b"another")}))
    assert speedups_beside(tmp_path) == Speedups()
    huge = {"whole_forward": [{"ratio": 10**400}]}
    for wrong in ({"whole_forward": 5}, {"whole_forward": [{"ratio": "fast"}]}, huge, {"price_plan_seconds": -1.0}):
        report.write_text(json.dumps({**told, **wrong, "plan_sha256": digest(plan.read_bytes())}))
        adaattn("plan", "show", tmp_path, code=2, says="delete it, or calibrate again")


@pytest.mark.parametrize(("nats", "middle", "upper", "asked"), [
    (7.08e-3, "+0.71 %", "+0.72 %", "+0.711 %"),  # a bound is never rounded down
    (math.log1p(0.009), "+0.90 %", "+0.90 %", "+0.9 %"), (math.log1p(1e-3), "+0.10 %", "+0.10 %", "+0.1 %"),
    (0.0, "+0 %", "+0 %", "+0 %"), (-3e-4, "-0.030 %", "-0.029 %", "-0.030 %"), (1e-7, *["+1.0e-5 %"] * 3),
    (math.inf, *["without bound"] * 3), (math.nan, *["unknown"] * 3),
])  # fmt: skip
def test_a_loss_is_written_in_percent_of_the_perplexity(nats: float, middle: str, upper: str, asked: str) -> None:
    assert (rise(nats), at_most(nats), allowed(nats)) == (middle, upper, asked)
