"""`adaattn profile`: JSON, and a page that draws itself in a browser without a network."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from adaattn_hf.errors import DataUnavailable
from adaattn_hf.eval import corpora, pages

from ..support.browser import drawn, needs_browser
from ..support.choices import make_choice
from ..support.command import adaattn
from ..support.plans import plan_for

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


profile = partial(adaattn, "profile")


@pytest.fixture(scope="module")
def made(llama: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile")
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="adaattn")
    (out / "plan.json").write_text(plan_for(model, make_choice("window", 4)).to_json(), encoding="utf-8")
    words = ("--data", texts / "plain.txt", "--output-dir", out, "--map", "1.3")
    result = profile(llama, *words, "--against", out / "plan.json", "--json", says="decode")
    assert json.loads(result.stdout) == json.loads((out / "profile.json").read_text(encoding="utf-8"))
    return out


def test_the_json_holds_every_layer_and_phase(made: Path) -> None:
    recorded = json.loads((made / "profile.json").read_text(encoding="utf-8"))
    assert recorded["provenance"]["versions"]["torch"]
    assert [layer["layer"] for layer in recorded["layers"]] == [0, 1]
    assert all(set(layer["phases"]) == {"prefill", "decode"} for layer in recorded["layers"])
    (image,) = recorded["maps"]
    assert (image["layer"], image["head"]) == (1, 3)
    assert len(image["labels"]) == len(image["weights"]) == len(image["error"])
    assert max(abs(v) for row in image["error"] for v in row) > 1e-3
    assert any(label.strip() for label in image["labels"])
    for layer in recorded["layers"]:
        assert len(layer["scores"]["spectrum"]) == 2  # key/value heads
        assert layer["scores"]["rank"]["0.95"][0] <= layer["scores"]["rank"]["0.999"][0]


def test_the_page_asks_for_nothing_from_elsewhere(made: Path) -> None:
    page = (made / "atlas.html").read_text(encoding="utf-8")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "</script><b>" not in pages.atlas({"layers": [], "maps": []}, "</script><b>", "x")


@needs_browser
def test_a_browser_draws_the_page(made: Path, tmp_path: Path) -> None:
    page = (made / "atlas.html").read_text(encoding="utf-8")
    clipped = (
        'document.body.dataset.cut = [...document.querySelectorAll("#grid button")]'
        ".filter(b => b.scrollWidth > b.clientWidth).length;"
    )
    small = re.sub(r'("entropy":\s*\[)[-0-9.e]+', r"\g<1>0.0030312345", page)
    assert small != page
    drawn_small = drawn(small, clipped, tmp_path)
    assert ">0.003</button>" in drawn_small
    assert 'data-cut="0"' in drawn_small
    first = drawn(page, "", tmp_path)
    assert first.count('role="gridcell"') == 8  # two layers of four heads
    assert "Layer 1, head 3" in first  # whose map was asked for
    assert first.count("<canvas") == 2  # weights, and the error of the plan
    read = "document.querySelectorAll('canvas')[1].dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}));"
    assert re.search(r"query “.+”, key “.+”: [-0-9.e]+", drawn(page, read, tmp_path))
    press = "$('grid').dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true}));"
    press += "$('measure').value = 'rank'; $('measure').dispatchEvent(new Event('change')); $('theme').click();"
    moved = drawn(page, press, tmp_path)
    assert "Layer 1, head 0" in moved
    assert "Rank for 99 % energy" in moved
    assert "<canvas" not in moved
    assert 'data-theme="' in moved


def test_the_packages_text_is_for_its_model_alone(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the name of somebody's directory."""
    asked: list[str] = []

    def absent(spec: str) -> Any:
        asked.append(spec)
        raise DataUnavailable("data: none here")

    monkeypatch.setattr(corpora, "load", absent)
    profile(shutil.copytree(llama, tmp_path / "model-of-mine"), code=3)
    assert asked == ["wikitext"]
    own = profile("--length", 16, "--sequences", 1, "--decode", 0, "--json")
    assert (len(asked), json.loads(own.stdout)["text"]) == (1, "the package's held-out pages")


@pytest.mark.parametrize(("words", "code", "says"), [
    (("--map", "1"), 2, "layer.head"), (("--map", "9" * 5000 + ".0"), 2, "layer.head"),
    (("--against", "nowhere"), 2, "no map"), (("--map", "0.0", "--against", "nowhere"), 4, "does not exist"),
    (("--length", "65"), 2, "at most the 64"), (("--plan", "nowhere"), 4, "does not exist"),
    (("--threads", "0"), 2, "threads"), (("--output-dir", f"{__file__}/out"), 2, "cannot be made"),
])  # fmt: skip
def test_wrong_words_are_refused(llama: Path, texts: Path, words: tuple[str, ...], code: int, says: str) -> None:
    profile(llama, "--data", texts / "plain.txt", *words, code=code, says=says)


def test_a_head_that_is_not_there_is_refused_below_the_table_of_those_that_are(llama: Path, texts: Path) -> None:
    """The measurement is not thrown away with it, and the error may point to it."""
    result = profile(llama, "--data", texts / "plain.txt", "--map", "9.0", "--decode", 0, code=2)
    table, _, error = result.output.partition("error: map: got 9.0")
    assert "entropy" in table
    assert "see the table above" in error
