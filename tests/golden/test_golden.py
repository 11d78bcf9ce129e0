"""Golden reports: the packaged models, with fixed seeds and one file of prices, give the numbers that are kept here.

Byte for byte where processor and torch are those that wrote the file, since products of matrices are rounded as the
processor's instructions and its libraries add them up. Elsewhere within `CLOSE`, and sentences but for their numbers,
under the plan that was made there: which of two choices that are all but equal is taken follows from the last bits.
Timings, versions and paths are left out. `--write-snapshots` writes the files again: look at the difference.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn_hf.backends.capability import cpu_name
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages, lastword_items

from ..support.command import adaattn

HERE = Path(__file__).parent
LEFT_OUT = {
    "adaattn", "torch", "transformers", "provenance", "cost", "whole_forward", "path", "plans", "plan_sha256", "prices",
    "differing", "stored_verdict",
}  # fmt: skip
"""What differs from run to run, from version to version or from directory to directory."""
CLOSE, LEAST, OF_WORDS = 5e-2, 3e-3, 3e-2
"""How far numbers of another machine may be, as a share and in nats, also of a few last words: plans round to bfloat16.

On a processor that multiplies no bfloat16 a mean of 96 tokens was 4 % apart, and a bound on six words 1.4e-2 nats.
"""
SIZE = "--sequences 2 --joint 2 --rows 16 --labels 1 --held-out 8"
CALIBRATIONS = {
    "gpt2": ["--lengths", "160,320", "--budget", "3%"],
    "llama": ["--lengths", "320", "--budget", "5%", "--aim", "memory"],
    "bert": ["--lengths", "128", "--budget", "3%", "--maskings", "2"],
}
EVALUATIONS: dict[str, list[object]] = {
    "gpt2": ["--context", 96, "--stride", 64, "--limit-docs", 3, "--windows", "strided", "--batch-size", 2],
    "llama": ["--context", 96, "--limit-docs", 3, "--batch-size", 2, "--padding", "left", "--anchor", "eager"],
    "bert": ["--context", 96, "--limit-docs", 3, "--mask-fraction", 0.05],
}


def prices() -> dict[str, Any]:
    """A table of fixed prices in seconds: of a window by the share of keys that it keeps, and lower in a format."""
    table: dict[str, Any] = {"prefill": {}, "decode": {}}
    for length in (64, 128, 160, 320):
        row = {"exact": 10.0, "r16": 9.5, "bf16": 8.0, "int8": 7.0}
        for window in (32, 64, 128):
            for form, share in (("", 1.0), (" bf16", 0.8), (" int8", 0.7)):
                row[f"w{window}+16{form}"] = min((2 + 8 * min(window / length, 1.0)) * share, 9.5)
        for phase, queries in (("prefill", length), ("decode", 1)):
            table[phase][length] = {name: [1e-5, round(price * queries * 1e-6, 10)] for name, price in row.items()}
    return {"machine": "a table of fixed prices", "launch_of": {}, "prices": table}


def machine() -> dict[str, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": cpu_name(), "instructions": f"{level_here()}, {capability}", "torch": torch.__version__}


def lasting(value: Any) -> Any:
    """A report without what changes from run to run."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in LEFT_OUT}
        return {name: lasting(one) for name, one in kept.items() if not (name == "plan" and isinstance(one, str))}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def written(value: Any) -> str:
    """As JSON, of which what fits in a line has one."""
    line = json.dumps(value, sort_keys=True)
    if len(line) <= 200 or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {written(value[name])}" for name in sorted(value)) + "\n}"
    return "[\n" + ",\n".join(map(written, value)) + "\n]"


def differing(there: Any, here: Any, exact: bool, place: str = "") -> list[str]:
    """Where two reports differ: in the last bit, or by more than machines do."""
    if exact:
        kept, now = (json.dumps(one, sort_keys=True) for one in (there, here))
        at = next((at for at, pair in enumerate(zip_longest(kept, now)) if len({*pair}) == 2), None)
        return [] if at is None else [f"{kept[max(at - 80, 0) : at + 40]} is now {now[max(at - 80, 0) : at + 40]}"]
    if isinstance(there, dict) and isinstance(here, dict):
        names = {*there, *here}
        return [line for name in sorted(names)
                for line in differing(there.get(name), here.get(name), False, f"{place}.{name}")]  # fmt: skip
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = zip(there, here, strict=True)
        return [line for at, pair in enumerate(pairs) for line in differing(*pair, False, f"{place}.{at}")]
    if isinstance(there, float) and isinstance(here, float):
        least = OF_WORDS if place.startswith("lastword") else LEAST
        same = math.isclose(there, here, rel_tol=CLOSE, abs_tol=least)
    elif isinstance(there, str) and isinstance(here, str):
        same = re.sub(r"[\d.]+(e-?\d+)?", "#", there) == re.sub(r"[\d.]+(e-?\d+)?", "#", here)
    else:
        same = there == here
    return [] if same else [f"{place}: {there!r} is now {here!r}"]


def measured(name: str, directory: Path, kept: Path | None = None) -> dict[str, Any]:
    """What the commands say of a packaged model, under the plan that they make, or under one that is kept."""
    texts = {"own": calibration_pages()[:14], "news": heldout_pages()[:14], "words": []}
    for text, pages in texts.items():
        (directory / f"{text}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in pages), "utf-8")
    words = [item["text"] for item in lastword_items()[:6]]
    (directory / "words.txt").write_text("\n".join(words), encoding="utf-8")
    model, plan = demo_model_path(name), kept or directory / "plan"
    (directory / "prices.json").write_text(json.dumps(prices()), encoding="utf-8")
    news = directory / "news.jsonl"

    def said(*line: object, code: tuple[int, ...] = (0,)) -> Any:
        return lasting(json.loads(adaattn(*line, "--quiet", "--json", "--threads", 1, code=code).stdout))

    own: list[object] = ["--data", directory / "own.jsonl", "--verify-data", news, "--output-dir", plan]
    own += ["--prices", directory / "prices.json", *SIZE.split(), *CALIBRATIONS[name]]
    found = {} if kept else {"calibrate": said("calibrate", model, *own)}
    found["verify"] = said("verify", model, "--plan", plan, "--data", news, "--held-out", 8, code=(0, 1))
    how: list[object] = [*EVALUATIONS[name], "--plan", plan, "--output-dir"]
    found["eval"] = said("eval", model, "--data", news, *how, directory / "pages")
    how = ["--context", 96, "--plan", plan, "--output-dir", directory / "lastword"]
    found["lastword"] = said("eval", model, "--data", f"lambada:{directory / 'words.txt'}", *how)
    return found


@pytest.mark.native
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_the_packaged_models_give_the_numbers_that_are_kept(
    name: str, tmp_path: Path, snapshot: Callable[[Path, str], None], request: pytest.FixtureRequest
) -> None:
    path, kept, writes = HERE / f"{name}.json", HERE / name, request.config.getoption("--write-snapshots")
    there = json.loads(path.read_text(encoding="utf-8"))
    there["calibrate"]["plan"] = lasting(json.loads((kept / "adaattn_plan.json").read_text(encoding="utf-8")))
    same = there.pop("machine") == machine()
    found = measured(name, tmp_path, None if same or writes else kept)
    if writes:
        kept.mkdir(exist_ok=True)
        for file in (tmp_path / "plan").glob("adaattn_plan.safetensors"):
            shutil.copy(file, kept)
        plan = json.loads((tmp_path / "plan" / "adaattn_plan.json").read_text(encoding="utf-8"))
        snapshot(kept / "adaattn_plan.json", written(plan) + "\n")
        reports = {**found, "calibrate": {**found["calibrate"], "plan": None}}  # that one
        snapshot(path, written({"machine": machine(), **reports}) + "\n")
    for command, report in found.items():
        assert differing(there[command], json.loads(json.dumps(report)), same, command) == []


def test_what_moves_a_number_further_than_machines_do_is_seen() -> None:
    there = json.loads((HERE / "gpt2.json").read_text(encoding="utf-8"))["eval"]["quality"]["arms"][1]
    for share, exact, seen in ((1e-12, True, 1), (1e-12, False, 0), (3 * CLOSE, False, 1)):
        here = {**there, "nll_per_token": there["nll_per_token"] * (1.0 + share)}
        assert len(differing(there, here, exact)) == seen
