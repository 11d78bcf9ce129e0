"""`adaattn verify`: a stored plan proved again, by the figures of its proof on the text of its proof."""

import json
from pathlib import Path
from typing import Any

import pytest

from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.policy.prices import Price, PriceTable

from ..support.command import adaattn
from ..support.processor import ROUNDS_BF16

pytestmark = pytest.mark.usefixtures("few_rounds")
LENGTH = 192
MODEL = str(demo_model_path("llama"))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts, and plans: proved on the second, on a part of the first, and over a smaller cache on the second."""
    directory = tmp_path_factory.mktemp("verify")
    for name, pages in (("own.txt", calibration_pages()), ("news.txt", heldout_pages())):
        (directory / name).write_text("\n\n".join(pages[:12]), encoding="utf-8")
    row = {label: Price(1e-4, 1.0 / (1 + place)) for place, label in enumerate(("exact", "bf16"))}
    prices = PriceTable("a table", {}, {"prefill": {LENGTH: row}, "decode": {LENGTH: row}})
    (directory / "prices.json").write_text(prices.to_json())
    size = f"--lengths {LENGTH} --sequences 2 --rows 16 --labels 1 --joint 2 --held-out 6"
    rest = f"{size} --quiet".split()
    news: list[object] = ["--verify-data", directory / "news.txt"]
    cheap: list[object] = ["--prices", directory / "prices.json", "--families", "bf16", "--budget", "1%"]
    small: list[object] = ["--aim", "memory", "--budget", "3%"]
    for plan, how in (("plan", news + cheap), ("split", cheap), ("memory", news + small)):
        words = ["--data", directory / "own.txt", "--output-dir", directory / plan]
        adaattn("calibrate", MODEL, *words, *rest, *how)
    return directory


AS_MADE = ["--sequences", "2", "--joint", "2", "--held-out", "6"]


def verified(plan: Path, *words: object) -> tuple[int, dict[str, Any]]:
    done = adaattn("verify", MODEL, "--plan", plan, "--quiet", "--json", *AS_MADE, *words, code=(0, 1))
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


FIGURES = {"delta_nll", "upper", "kl", "kl_p999"}
"""Sums over tokens, which are the same to 1e-6 nats where machine and versions are."""


@pytest.mark.parametrize(("plan", "text"), [("plan", "news.txt"), ("split", "own.txt"), ("memory", "news.txt")])
def test_the_text_of_the_proof_gives_its_figures(material: Path, plan: str, text: str) -> None:
    code, found = verified(material / plan, "--data", material / text)
    (verdict,), stored = found["verdicts"].values(), found["stored"]
    assert (code, found["passed"]) == (0, True)
    for name in FIGURES:
        assert verdict[name] == pytest.approx(stored[name], abs=1e-6), name
    for name in set(stored) - FIGURES - {"sentence", "tries", "predicted_kl"}:
        assert verdict[name] == stored[name], name
    assert verdict["confidence"] == found["limits"]["confidence"] == 0.95


def test_a_plan_with_a_cache_is_proved_over_it(material: Path, tmp_path: Path) -> None:
    code, over = verified(material / "memory", "--data", material / "news.txt")
    plan = json.loads((material / "memory" / "adaattn_plan.json").read_text())
    assert (code, over["cache"]) == (0, plan["protocol"]["cache"]["stored"])
    assert over["cache"] != "model"
    assert over["stored"] == plan["protocol"]["cache"]["verified"] != plan["verified"]
    del plan["protocol"]["cache"]
    (tmp_path / "adaattn_plan.json").write_text(json.dumps(plan))
    code, without = verified(tmp_path, "--data", material / "news.txt")
    assert (code, without["cache"]) == (0, "model")
    (coded,), (plain,) = over["verdicts"].values(), without["verdicts"].values()
    assert coded["kl"] != plain["kl"]
    says = f"tokens over a cache in {over['cache']}: passed"
    adaattn("verify", MODEL, "--plan", material / "memory", "--data", material / "news.txt", *AS_MADE, says=says)


def test_other_text_has_figures_of_its_own_and_what_differs_is_said(material: Path) -> None:
    code, found = verified(material / "plan", "--data", material / "own.txt")
    (verdict,) = found["verdicts"].values()
    assert code == (0 if verdict["passed"] else 1)
    assert (verdict["delta_nll"] != found["stored"]["delta_nll"]) == ROUNDS_BF16, "the plan is one of bf16"
    (differing,) = found["differing"]  # the prices came from a table
    assert differing.startswith("machine was a table, is ")
    says = (
        f"warning: {differing}", verdict["sentence"], f"stored verification: {found['stored_verdict']}",
        "limits: perplexity +1 % at a level of 95 %",
    )  # fmt: skip
    words = ("--plan", material / "plan", "--data", material / "own.txt", *AS_MADE)
    adaattn("verify", MODEL, *words, code=code, says=says)


def test_a_plan_that_does_not_keep_its_budget_fails(material: Path, tmp_path: Path) -> None:
    plan = json.loads((material / "memory" / "adaattn_plan.json").read_text())  # of windows, which cost something
    plan |= {"budget": 1e-12, "verified": None}
    del plan["protocol"]["cache"]
    (tmp_path / "adaattn_plan.json").write_text(json.dumps(plan))
    code, found = verified(tmp_path / "adaattn_plan.json", "--data", material / "news.txt")
    (verdict,) = found["verdicts"].values()
    assert (code, found["passed"], found["stored"]) == (1, False, None)
    assert verdict["sentence"].startswith("failed: the perplexity may rise by ")


def test_what_cannot_be_proved_is_a_sentence(material: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A lamp.")
    plan, text = material / "plan", material / "news.txt"
    for words, said in (
        ((MODEL, "--plan", plan), "data is absent, expected text"),
        ((MODEL, "--plan", tmp_path, "--data", text), f"{tmp_path} holds no plan; expected a plan"),
        ((MODEL, "--plan", material, "--data", text), f"wrote, such as {material}/"),
        ((demo_model_path("gpt2"), "--plan", plan, "--data", text), "plan"),
        ((MODEL, "--plan", plan, "--data", short), "the text holds 0 sequences of 192 tokens, 2 are wanted"),
        ((MODEL, "--plan", plan, "--data", text, "--data", short), f"data: {short} holds 0 sequences of 192 tokens"),
        ((MODEL, "--plan", plan, "--data", text, "--data", text), "is named twice"),
    ):
        adaattn("verify", *words, "--quiet", code=2, says=said)
    (tmp_path / "config.json").write_bytes((plan / "config.json").read_bytes())  # which carries the plan
    adaattn("verify", tmp_path, "--data", text, code=4, says=f"tokenizer: cannot load '{tmp_path}'")
