"""`transformers serve`, the real server on this machine: a checkpoint with a plan answers as `generate` does."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

import adaattn_hf
from adaattn_hf.eval.demo import demo_model_path
from adaattn_hf.plans.choices import Choice, Window

from ..support.plans import give

pytest.importorskip("kernels", reason="the package kernels is not installed; `make hub-test` has it")
tf = pytest.importorskip("transformers")
if not is_serve_available():
    pytest.skip("the packages of transformers[serving] are not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
PLANNED, FLASH, RUN = "adaattn/adaattn", "adaattn/flash-adaattn", "adaattn run"
PROMPT = "It was a dark and stormy night, and the rain fell in torrents upon the town"
PAGE = Path(__file__).parents[2] / "docs" / "hub_kernel.md"


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    url, headers = f"http://localhost:{port}{path}", {"content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        raise
    except OSError:
        return None


def transcript(command: list[str], log: str, body: dict[str, Any], answer: dict[str, Any]) -> str:
    """What a server said of one request, and the answer, without what differs between runs."""
    told = [line for line in log.splitlines() if any(one in line for one in ("startup complete", "received]", "POST"))]
    told = [re.sub(r"127\.0\.0\.1:\d+ - ", "", line) for line in told]
    kept = {name: answer[name] for name in ("object", "model", "choices", "usage")}
    ask = "$ curl localhost:8000/v1/completions -H 'content-type: application/json' \\\n    "
    said = [
        f"$ transformers {' '.join(command)}", told[0], f"{ask}-d '{json.dumps(body)}'", *told[1:], json.dumps(kept)
    ]  # fmt: skip
    return "\n".join(said).replace(body["model"], "MODEL")


def written(path: Path, prompt: dict[str, Any], planned: bool) -> Any:
    model = tf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="adaattn").eval()
    if planned:
        adaattn_hf.load_plan(model)
    found = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return found[0, prompt["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", [PLANNED, FLASH, RUN])
def test_the_server_answers(name: str, repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run plans request by request, and requests together exact; `adaattn run` does both at once."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{name}={repositories / name.partition('/')[2]}")
    tokenizer = tf.AutoTokenizer.from_pretrained(demo_model_path("llama"))
    model = tf.AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    give(model, Choice.of(Window(4, sinks=1)), layers=tuple(range(model.config.num_hidden_layers)))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    planned, exact = (written(tmp_path, prompt, choice) for choice in (True, False))
    assert planned != exact, "the plan changed nothing"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    engine = ["--continuous-batching", "--cb-num-blocks", "16", "--cb-max-batch-tokens", "64"]
    attention = [] if name == RUN else ["--attn-implementation", name]
    command = ["serve", str(tmp_path), *attention, "--device", "cpu"]
    where = ["--port", str(port), *([] if name == PLANNED else engine)]
    body = {"model": str(tmp_path), "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0}
    log = tmp_path / "server.log"
    program = ["adaattn_hf", "run", "--attention", "adaattn", "-m"] if name == RUN else []
    started = [sys.executable, "-m", *program, "transformers.cli.transformers", *command, *where]
    with log.open("w") as lines, subprocess.Popen(started, stdout=lines, stderr=lines) as server:
        try:
            waited = time.monotonic() + 120
            while ask(port, "/health") is None and server.poll() is None and time.monotonic() < waited:
                time.sleep(0.2)
            answer = ask(port, "/v1/completions", body)
        finally:
            server.terminate()
    right = tokenizer.decode(exact if name == FLASH else planned, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == right
    assert ("CB: True" in log.read_text()) == (name != PLANNED)
    if name == PLANNED:
        assert transcript(command, log.read_text(), body, answer) in PAGE.read_text(encoding="utf-8")
