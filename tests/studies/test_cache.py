"""The study of caches at tiny sizes: every cache that runs here has its bytes, its speed and its loss on the page."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from adaattn_hf.eval.demo import demo_model_path, pages_path
from studies.cache import app
from studies.cache_arms import ARMS, READ, shaped, weights_read
from studies.cache_page import page
from studies.cache_speed import beyond, foretold, speed
from studies.cache_text import PARTS, Arm, compared, read, read_more, texts

MODEL = ("--model", str(demo_model_path("llama")))


def study(*words: str, code: int = 0) -> str:
    """What the program says, which is in a frame as wide as the terminal."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


def test_the_study_writes_bytes_speed_and_loss_of_every_cache(tmp_path: Path) -> None:
    sizes = "--lengths 64,128 --batches 2 --rounds 2 --steps 1 --windows 3 --window 96"
    options = f"{sizes} --shape tiny --skip quanto,hqq"
    call = [*MODEL, "--text", str(pages_path("heldout")), "--write", str(tmp_path), *options.split()]
    file = tmp_path / "cache.json"
    study(*call, "--only", "loss")
    found = json.loads(file.read_text())
    assert (len(found["loss"]["rows"]) > 1, "speed" in found) == (True, False)
    found["loss"]["provenance"]["commit"] += "+dirty"  # as the page's own writing makes it in a checkout
    file.write_text(json.dumps(found))
    assert "loss of" not in study(*call, "--resume")
    found = json.loads(file.read_text())
    ran = {arm.name for arm in ARMS} - set(found["speed"]["absent"])
    assert {"DynamicCache", "StaticCache", "AdaAttnCache model", "AdaAttnCache int8"} <= ran
    rows, named = found["speed"]["models"].values()
    assert {row["cache"] for row in named} >= {"DynamicCache", "AdaAttnCache k8v4"}
    cells = {(row["cache"], row["batch"], row["length"]) for row in rows}
    assert cells == set(itertools.product(ran, [2], [64, 128]))
    size = {row["cache"]: row["bytes_per_token"] for row in rows if row["length"] == 128}
    assert size["AdaAttnCache int8"] < 0.75 * size["DynamicCache"]
    loss = {row["cache"]: row for row in found["loss"]["rows"]}
    assert set(loss) == {arm.name for arm in READ} - set(found["loss"]["absent"])
    assert loss["DynamicCache"]["delta_nll"] == 0
    for name in ("StaticCache", "AdaAttnCache model", "AdaAttnCache int8"):  # beside the rounding of bfloat16
        assert abs(loss[name]["delta_nll"]) < 0.01
    assert loss["AdaAttnCache k8v4"]["delta_nll"] != 0
    assert {row["needles"] for row in loss.values()} == {9}
    held = found["loss"]["held"]
    assert {held["DynamicCache"]} == {row["bytes_per_token"] for row in named if row["cache"] == "DynamicCache"}
    assert held["AdaAttnCache k8v4"] < held["AdaAttnCache int8"] < 0.75 * held["DynamicCache"]
    words = (tmp_path / "cache.md").read_text()
    assert words.count("With no cache to read a step would be as many times as fast") == 2
    assert "Not timed" not in words
    title, tiny = next((title, many) for title, many in found["speed"]["models"].items() if "random weights" in title)
    cell = {row["cache"]: row for row in tiny if row["length"] == 128}
    held = {one: 256 * cell[one]["bytes_per_token"] for one in ("DynamicCache", "AdaAttnCache int8")}
    weights = found["speed"]["weights"][title]
    ratio = (weights + held["DynamicCache"]) / (weights + held["AdaAttnCache int8"])
    table = words[words.index(f"### {title}") :]
    assert re.search(rf"^\| 2 \| 128 \| AdaAttnCache int8 \|.* {ratio:.2f} \|$", table, re.M)
    share = held["DynamicCache"] / (weights + held["DynamicCache"])
    assert f"(batch 2, 128 tokens; {share:.1%} of the bytes)" in table
    assert f"A step reads {weights:,} bytes of weights" in table
    assert words.count("Caches of this package more than 5% from what `explain` foretells: none.") == 2
    assert all(f"| {name} |" in words for name in ran)
    timed = found["speed"]["models"]
    timed[next(iter(timed))] = [row for row in rows if row["length"] == 64]
    file.write_text(json.dumps(found))
    again = study(*call, "--resume")
    assert again.count("tokens, batch") == 1  # the cell that was taken out, and nothing else
    assert "loss of" not in again
    assert "another asked" in study(*call, "--resume", "--steps", "3", code=2)
    before = json.loads(file.read_text())
    study(*call, "--only", "loss", "--windows", "2")  # anew, beside the times as they are
    found = json.loads(file.read_text())
    assert found["speed"] == before["speed"]
    assert {row["windows"] for row in found["loss"]["rows"]} == {2}
    found["speed"]["provenance"]["source"] = "another"
    file.write_text(json.dumps(found))
    assert "another source" in study(*call, "--resume", "--only", "speed", code=2)
    assert "expected the first two both" in study(*call, "--only", "all", code=2)


def test_losses_go_on_behind_the_last_text_and_refuse_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "text.txt"
    source.write_bytes(pages_path("heldout").read_bytes())
    options = "--only loss --skip quanto,hqq,kvpress,Static,fp8 --windows 5 --window 96"
    call = [*MODEL, "--text", str(source), *options.split()]
    reads: list[tuple[str, int, int]] = []
    stop_at = 0

    def spied(model: Any, arm: Arm, tokens: Tensor, prompt: int) -> Tensor:
        if len(reads) == stop_at:
            raise KeyboardInterrupt
        reads.append((arm.name, hash(tuple(tokens.tolist())), prompt))
        return read(model, arm, tokens, prompt)

    monkeypatch.setattr("studies.cache_text.read", spied)

    def run(code: int, directory: str, *more: str) -> tuple[str, dict[str, Any], str]:
        (place := tmp_path / directory).mkdir(exist_ok=True)
        output = study(*call, "--write", str(place), *more, code=code)
        return output, json.loads((place / "cache.json").read_text()), (place / "cache.md").read_text()

    stop_at = -1
    _, whole, words = run(0, "whole")
    assert "Without a loss here: none." in words
    asked, reads = list(reads), []
    arms = [arm for arm in READ if arm.name not in whole["loss"]["absent"]]
    each = sum(texts(5).values())
    assert len(asked) == len(set(asked)) == each * len(arms) == 9 * 4
    # within stock, within another cache, between two, before the last text of one
    for stop_at in (3, each + 7, 2 * each, 3 * each - 1):
        _, found, words = run(130, "parts", "--resume")
        assert reads == asked[:stop_at]
        assert len(found["loss"]["rows"]) == stop_at // each
        assert f"{arms[-1].name} (0 of {each} texts read)" in words
    for other, refused in (("--windows 4", "asked"), ("--window 128", "asked"), ("--name another", "text")):
        output, found, _ = run(2, "parts", "--resume", *other.split())
        assert f"another {refused}" in output
    source.write_text("Another text. " * 400)
    output, found, _ = run(2, "parts", "--resume")
    assert "another input" in output
    source.write_bytes(pages_path("heldout").read_bytes())
    assert len(reads) == 3 * each - 1
    stop_at = -1
    _, found, words = run(0, "parts", "--resume")
    assert reads == asked  # nothing twice, in the same order
    assert [found["loss"][key] for key in ("rows", "read")] == [whole["loss"][key] for key in ("rows", "read")]
    assert "Without a loss here: none." in words
    output, _, _ = run(0, "parts", "--resume")
    assert "loss of" not in output
    assert reads == asked
    output, _, _ = run(2, "parts", "--resume", "--name", "another")  # though nothing is left to read
    assert "another text" in output


def test_a_cache_that_fails_in_a_cell_leaves_its_reason_and_the_others() -> None:
    model = shaped("tiny", torch.device("cpu"))
    arms = [arm for arm in ARMS if arm.name in ("DynamicCache", "AdaAttnCache int8")]

    class Full(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("the device is full\nby far")

    arms.insert(1, Arm("Full", "sdpa", lambda model, room: Full(config=model.config)))
    memory = foretold(model)
    rows = speed(model, arms, 1, 256, 3, 1, 60, memory)
    assert [row["cache"] for row in rows] == ["DynamicCache", "Full", "AdaAttnCache int8"]
    assert rows[1]["failed"] == "OutOfMemoryError: the device is full"
    assert "wall" in rows[2]
    assert beyond(rows) == []
    assert beyond([{**rows[2], "bytes_per_token": 1.06 * rows[2]["foretold_per_token"]}])
    without_stock = speed(model, arms[1:], 1, 64, 2, 1, 60, memory)
    assert "wall" not in without_stock[1]
    assert without_stock[1]["tokens_per_second"] > 0
    made = {"driver": None, "cpu": "a", "threads": 1, "commit": "b"}
    section = {"provenance": made, "asked": {"rounds": 2, "steps": 1}, "absent": {}, "libraries": ""}
    words = page(
        {"speed": section | {"models": {"m": rows + without_stock}, "floor": {"m": {"1": 1.0}}, "weights": {}}}
    )
    assert "| 1 | 256 | Full | – | – | – | – | OutOfMemoryError: the device is full | – | – |" in words
    missing = [arm.name for arm in ARMS if arm.name not in ("DynamicCache", "AdaAttnCache int8")]
    assert f"Not timed at batch 1, 256 tokens: {'; '.join(missing)}." in words
    assert f"Not timed at batch 1, 64 tokens: {'; '.join(['DynamicCache', *missing])}." in words


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_step_reads_leave_out_an_embedding_that_is_looked_up(tied: bool) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied))
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert weights_read(model) == 2 * (layer + 32 + 61 * 32)  # norm and output layer


def test_a_press_is_at_work_while_the_prompt_is_read_and_no_longer() -> None:
    """By the way in which those of kvpress are called: entered with the model, told the positions of the prompt."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    seen: list[int] = []

    @contextmanager
    def press(inside: Any) -> Iterator[None]:
        def half(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            seen.append(len(kwargs["cache_position"]))
            layer = kwargs["past_key_values"].layers[0]
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

        hook = inside.model.layers[0].self_attn.register_forward_hook(half, with_kwargs=True)
        yield
        hook.remove()

    def dynamic(model: Any, room: int) -> DynamicCache:
        return DynamicCache(config=model.config)

    plain = Arm("DynamicCache", "sdpa", dynamic)
    pressed = Arm("pressed", "sdpa", dynamic, 0.5, lambda: press)
    tokens = torch.randint(61, (200,), generator=torch.Generator().manual_seed(0))
    exact, less = read(model, plain, tokens, 100), read(model, pressed, tokens, 100)
    assert seen == [100]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert exact.shape == less.shape == (100, 61)
    assert not torch.allclose(exact, less)
    with torch.no_grad():
        torch.testing.assert_close(exact, model(tokens[None]).logits[0, 100:], atol=1e-5, rtol=0)
    kept: dict[str, dict[str, list[Any]]] = {}
    read_more(model, [plain, pressed], tokens[None], kept, lambda arm: None)
    assert {part: len(kept[part]["pressed"]) for part in PARTS} == {"behind": 1, "needles": 1}
    behind = compared(kept, [plain, pressed], 1, len(tokens))
    assert [row["cache"] for row in behind] == ["DynamicCache", "pressed"]
    stock, own = (-out[:-1].double().log_softmax(-1)[range(99), tokens[101:]].sum() for out in (exact, less))
    assert behind[1]["delta_nll"] == pytest.approx(float(own - stock) / 99)


def test_a_size_is_bold_where_no_smaller_cache_has_as_small_a_bound() -> None:
    """Caches of one size are told apart by their bounds, of which the smallest counts."""
    bounds = {"DynamicCache": (8.0, 0.0), "AdaAttnCache int8": (4.0, 0.1), "worse": (4.0, 0.3), "small": (2.0, 0.2)}
    row = {"delta_nll": 0.0, "windows": 1, "found": 1, "needles": 2}
    section = {
        "provenance": {"driver": None, "cpu": "a", "threads": 1}, "absent": {}, "libraries": "",
        "commits": {"worse": 12 * "b", "small": f"{12 * 'b'}+dirty"},
        "asked": {"windows": 1}, "text": "a text", "read": {},
        "held": {name: size for name, (size, _) in bounds.items()},
        "rows": [{**row, "cache": name, "upper": upper} for name, (_, upper) in bounds.items()],
    }  # fmt: skip
    words = page({"loss": section})
    assert f"commit {9 * 'b'}, {9 * 'b'}+dirty; losses" in words
    lines = [line.split(" | ") for line in words.splitlines() if line.endswith("1/2 |")]
    assert [(line[0], line[2]) for line in lines] == [
        ("| small", "**25.0%**"), ("| AdaAttnCache int8", "**50.0%**"), ("| worse", "50.0%"),
        ("| DynamicCache", "**100.0%**"),
    ]  # fmt: skip
