"""`adaattn plan show` answers on any file, without a traceback, and prints nothing that a terminal obeys."""

import errno
import json
from cProfile import Profile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from adaattn_hf.plans.plan import LayerPlan, Plan
from adaattn_hf.plans.store import MOST_BYTES

from ..support.choices import make_choice
from ..support.command import adaattn
from .test_plan import make_plan

GOOD: dict[str, Any] = make_plan().to_dict()
LAYER: dict[str, Any] = GOOD["layers"][0]
BAD: dict[str, bytes] = {
    "no UTF-8": b"\xff\xfe{", "nested": b"[" * 5000 + b"]" * 5000,
    "a number of 9,000 digits": b'{"format": ' + b"9" * 9000 + b"}", "a list": b"[]", "empty": b"",
    "protocol 5": json.dumps({**GOOD, "protocol": 5}).encode(),
    "half a character": json.dumps({**GOOD, "model_type": "\ud800"}).encode(),
    "layer 10**9": json.dumps({**GOOD, "layers": [{**LAYER, "layer": 10**9}]}).encode(),
    "70,000 units": json.dumps({**GOOD, "units": GOOD["units"][:1] * 70_000}).encode(),
    **{f"{n} heads": json.dumps({**GOOD, "layers": [{**LAYER, "choices": LAYER["choices"][1:] * n}]}).encode()
       for n in (100_000, 400_000)},
}  # fmt: skip


def show(path: Path, **expected: Any) -> Result:
    with Profile() as calls:
        result = adaattn("plan", "show", path, **expected)
    # seconds would be the machine's; to read every head before they are counted takes seven million calls or more
    assert sum(one.callcount for one in calls.getstats()) < 5_000_000
    return result


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What the first command of a process loads is no plan's fault."""
    adaattn("plan", "show", Path(__file__).parent, code=2)


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(BAD[name])
    show(path, code=2, says="error:")


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"adaattn": 5}', '{"adaattn": {"plan": 5}}'])
def test_bad_configurations_are_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    show(tmp_path, code=2, says="error:")


@pytest.mark.parametrize("words", [("show", "p"), ("explore", "p", "--html", "h")])
def test_a_place_that_may_not_be_read_is_a_sentence(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Plan, "from_pretrained", forbidden)
    assert adaattn("plan", *words, code=2).stderr == "error: p: Permission denied\n"
    monkeypatch.undo()
    adaattn("plan", words[0], "x" * 300, *words[2:], code=2, says="error: plan: got 'xxx")


@pytest.mark.parametrize("words", ["plan show", "plan explore --html h", "verify m --data d.txt"])
def test_without_a_plan_it_is_said_how_to_get_one(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.txt").write_text("text")
    said = " ".join(adaattn(*words.split(), code=2).stderr.split())
    assert said == "error: plan: no plan in adaattn-plan; run `adaattn calibrate MODEL`, or name another directory"
    for budget in ("0.1pct", "1pct"):
        (tmp_path / "adaattn-plan" / budget).mkdir(parents=True)
        (tmp_path / "adaattn-plan" / budget / "adaattn_plan.json").touch()
    says = "error: plan: adaattn-plan holds no plan; expected a plan, or a directory or "
    refused = adaattn(*words.split(), code=2, says=says)
    assert " ".join(refused.stderr.split()).endswith("such as adaattn-plan/0.1pct, adaattn-plan/1pct")


def test_large_plans_and_free_ones_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    far = make_plan(layers=(LayerPlan(4000, "", (make_choice("window", 8),) * 300),))
    path.write_text(far.to_json(), encoding="utf-8")
    show(path, says="4001 layers of up to 300")
    unit = {**GOOD["units"][0], "price": 0.0, "exact_price": 0.0}
    path.write_text(json.dumps({**GOOD, "units": [unit]}), encoding="utf-8")
    show(path)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_plan_of_the_largest_size_is_read_and_no_larger_one(beyond: int, tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", make_plan().to_json().encode()
    path.write_bytes(text + b" " * (MOST_BYTES - len(text) + beyond))
    show(path, code=2 if beyond else 0, says="expected a plan of at most" * beyond)


def test_control_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    nasty = "\x1b]0;owned\x07\x1b[31m\u202e"
    changed = {**GOOD, "model_type": nasty, "verified": {**GOOD["verified"], "sentence": nasty}}
    for data, code in ((changed, 0), ({**GOOD, nasty: 1}, 2)):
        path.write_text(json.dumps(data), encoding="utf-8")
        assert not set(show(path, code=code).output) & {"\x1b", "\x07", "\u202e"}
