"""Nothing behind the user's back: no connection is opened, no file written, and no module of the network imported."""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.source_tree import ROOT, read_modules

NETWORK = frozenset(
    {
        "aiohttp", "asyncio", "datasets", "evaluate", "fsspec", "ftplib", "http", "httpx", "huggingface_hub", "imaplib",
        "kernels", "lm_eval", "mlflow", "poplib", "requests", "sentry_sdk", "smtplib", "socket", "socketserver", "ssl",
        "urllib", "urllib3", "wandb", "webbrowser", "websockets", "xmlrpc",
    }
)  # fmt: skip
"""Packages that talk to others, or that fetch what they are given by name."""
DOCUMENTED = {
    "adaattn_hf/plans/store.py": {
        "huggingface_hub.HfApi", "huggingface_hub.hf_hub_download", "huggingface_hub.errors.EntryNotFoundError",
    },
    "eval/bench/arm.py": {"datasets"},
    "eval/corpora.py": {"datasets"},
    "eval/lm_eval_model.py": {"lm_eval.api.registry.register_model", "lm_eval.models.huggingface.HFLM"},
    "eval/metric/adaattn_perplexity/adaattn_perplexity.py": {"datasets", "evaluate"},
    "patches/checkpoint.py": {"huggingface_hub.errors.StrictDataclassError"},
}  # fmt: skip
"""The places of the table in docs/support.md, and all that they may name of those packages."""

GUARD = """
import sys
asked = []

def watch(event, arguments):
    if event.startswith("socket.") and event.rpartition(".")[2] in (
        "bind", "connect", "getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto", "sendmsg"
    ):
        asked.append(f"{event} {arguments[1:]}")
        raise PermissionError("connections are forbidden")

sys.addaudithook(watch)
"""
ORDINARY = """
from transformers import AutoModelForCausalLM, AutoTokenizer
import adaattn_hf
from adaattn_hf.eval.demo import demo_model_path

name = demo_model_path("llama")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="adaattn")
inputs = tokenizer("It was a dark and", return_tensors="pt")
assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
adaattn_hf.check(model)
str(adaattn_hf.explain(model))
adaattn_hf.restore(adaattn_hf.prepare(model))
model(**inputs, labels=inputs["input_ids"]).loss.backward()
"""


def behind_the_back(code: str, place: Path) -> list[str]:
    """What a fresh program, to which the Hub is not offline, asked of the network, and the files that it left."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in offline and name != "HF_HOME"}
    environment = {**kept, "HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{GUARD}\n{textwrap.dedent(code)}\nprint(*asked, sep=chr(10))"], cwd=place,
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    files = (path for path in place.rglob("*") if path.is_file())
    return [*filter(None, done.stdout.splitlines()), *(f"wrote {path.relative_to(place)}" for path in files)]


def state_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }  # fmt: skip


def test_loading_and_running_a_model_asks_nobody_and_writes_nothing(tmp_path: Path) -> None:
    packaged = ROOT / "eval" / "demo"
    before = state_of(packaged)
    assert behind_the_back(ORDINARY, tmp_path) == []
    assert state_of(packaged) == before


@pytest.mark.parametrize(("planted", "complaint"), [
    ("urllib.request.urlopen('https://example.org', timeout=1)", "socket.getaddrinfo"),
    ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', ('127.0.0.1', 9))", "socket.sendto"),
    ("open('statistics.json', 'w').close()", "wrote statistics.json"),
])  # fmt: skip
def test_what_is_done_behind_the_back_is_found(planted: str, complaint: str, tmp_path: Path) -> None:
    """Also where the program goes on as if nothing had been."""
    code = f"import socket, urllib.request\ntry:\n    {planted}\nexcept OSError:\n    pass"
    (found,) = behind_the_back(code, tmp_path)
    assert found.startswith(complaint)


def named(source: str) -> Iterator[str]:
    """What a module imports of packages that talk to others, by its whole name."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        # urllib.parse takes addresses apart
        yield from (n for n in names if n.partition(".")[0] in NETWORK and not n.startswith("urllib.parse"))


def test_the_source_names_the_network_in_the_documented_places_alone() -> None:
    found = {
        str(module.path.relative_to(ROOT)): names for module in read_modules().values()
        if (names := set(named(module.path.read_text(encoding="utf-8"))))
    }  # fmt: skip
    assert found == DOCUMENTED
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert [place for place in DOCUMENTED if f"`{place}`" not in page] == []
    native = (ROOT / "adaattn_hf" / "backends" / "native" / "src").iterdir()
    assert [path.name for path in native if "socket" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(("line", "name"), [
    ("import socket", "socket"), ("from urllib.request import urlopen", "urllib.request.urlopen"),
    ("def f():\n    import requests as r", "requests"),
    ("importlib.import_module('huggingface_hub')", "huggingface_hub"),
    ("from huggingface_hub import snapshot_download", "huggingface_hub.snapshot_download"),
])  # fmt: skip
def test_a_module_of_the_network_is_found(line: str, name: str) -> None:
    assert list(named(line)) == [name]
    assert list(named("from urllib.parse import urlsplit\nfrom .http import page\nimport json")) == []
