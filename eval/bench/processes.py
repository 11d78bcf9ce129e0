"""Arms of a cell that run in processes of their own (`arm.py`): stock, ours, and engines of another environment."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from adaattn_hf.errors import UsageError
from adaattn_hf.stats.stopwatch import Elapsed

from .grid import ENGINES, Cell, Grid

SCRIPT = Path(__file__).with_name("arm.py")
ROOM = 128  # tokens behind the prompt, which the steps of a run append
REFERENCE = "sdpa, float32"  # whose answer is the truth of a cell


class Process:
    """An arm with its versions in `runs` and its most bytes in `peak`; RuntimeError with its last words if it ends."""

    def __init__(self, python: Path, task: dict[str, Any]) -> None:
        """Starts `arm.py` in the environment of a Python: isolated, as ours may have what that one lacks."""
        self.task, self.peak, self.log = task, 0, Path(task["answer"] + ".log")
        words, pipe = [str(python), "-I", str(SCRIPT)], subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": str(task["threads"])}
        with self.log.open("wb") as log:
            self.child: Any = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)  # noqa: S603
        weakref.finalize(self, lambda child: [end() for end in (child.kill, child.communicate)], self.child)
        self.runs = self.ask(json.dumps(task))

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to a line."""
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self.child.stdin, flush=True)
        if answer := self.child.stdout.readline():
            return dict(json.loads(answer))
        raise RuntimeError((self.log.read_text("utf-8", "replace").strip() or "it ended silently").splitlines()[-1])

    def seconds(self, repeats: int) -> Elapsed:
        """The time of a call, by the clocks of its process."""
        answer = self.ask(str(repeats))
        self.peak = answer["peak_bytes"]
        return Elapsed(answer["wall"], answer["process"])

    def __call__(self) -> Tensor:
        """What its first call gave, a row for each text: mean hidden states or logits."""
        outputs: dict[int, Any] = {}
        with np.load(self.task["answer"]) as arrays:
            for rows, inputs, out in zip(self.task["rows"], self.task["batches"], arrays.values(), strict=True):
                real = np.array(inputs["attention_mask"])[..., None]
                outputs |= dict(zip(rows, out if out.ndim == 2 else (out * real).sum(1) / real.sum(1), strict=True))
        return torch.from_numpy(np.stack([outputs[row] for row in sorted(outputs)]))


def texts_of(cell: Cell, recipe: Mapping[str, Any], files: Path) -> list[list[int]]:
    """Tokens of each text: of the model's own `text` between its marks, or random."""
    lengths = cell.lengths or [cell.keys] * cell.batch
    if "text" not in recipe:
        random = torch.Generator().manual_seed(0)
        most = recipe.get("ids", 1000)
        return [torch.randint(5, most, (n,), device="cpu", generator=random).tolist() for n in lengths]
    tokenizer = transformers.AutoTokenizer.from_pretrained(files)
    text = Path(os.path.expandvars(recipe["text"])).read_text(encoding="utf-8")[: 16 * sum(lengths)]
    ids = iter(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    first, last = ([], []) if recipe["causal"] else ([tokenizer.cls_token_id], [tokenizer.sep_token_id])
    return [[*first, *(next(ids) for _ in range(n - len(first + last))), *last] for n in lengths]


def cut(texts: Sequence[Sequence[int]], how: Sequence[str]) -> list[list[int]]:
    """Rows of each batch: one of all, or the longest first, four or one text each."""
    if not {"each text alone", "sorted into four"} & set(how):
        return [list(range(len(texts)))]
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    size = -(-len(order) // 4) if "sorted into four" in how else 1
    return [order[at : at + size] for at in range(0, len(order), size)]


def batch(texts: Sequence[list[int]]) -> dict[str, list[list[int]]]:
    """Padded to the longest."""
    missing = [max(map(len, texts)) - len(ids) for ids in texts]
    return {
        "input_ids": [ids + [0] * more for ids, more in zip(texts, missing, strict=True)],
        "attention_mask": [[1] * len(ids) + [0] * more for ids, more in zip(texts, missing, strict=True)],
    }


def process_works(cell: Cell, grid: Grid) -> Callable[[str], Process]:
    """Makes of an arm's name its process; docs/howto/benchmark.md has the names."""
    recipe, place = grid.models[str(cell.model)], Path(tempfile.mkdtemp())
    files = Path(os.path.expandvars(recipe.get("directory", place / "model")))
    if "directory" in recipe and not files.is_dir():
        raise UsageError(f"{cell.title}: got the model {recipe['directory']}, expected a directory; set the variable")
    if "config" in recipe:
        torch.manual_seed(0)
        config = getattr(transformers, recipe["config"])(**recipe["arguments"])
        getattr(transformers, recipe["class"])._from_config(config, dtype=torch.float32).save_pretrained(files)
    texts = texts_of(cell, recipe, files)
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]

    def make(name: str) -> Process:
        first, *how = name.split(", ")
        engine, _, variant = first.partition(":")
        python = grid.rivals if engine in ENGINES else Path(sys.executable)
        if python is None:
            raise RuntimeError("no --rivals PYTHON names an environment that has it; `make rivals` sets one up")
        rows, exported = cut(texts, how), python.parent.parent / f"exported/{cell.model}-{key}-{engine}-{variant}"
        task = {
            "engine": engine, "variant": variant, "how": how, "threads": torch.get_num_threads(), "room": ROOM,
            "dtype": next((one for one in how if hasattr(torch, one)), cell.dtype), "prepared": cell.prepared,
            "rows": rows, "batches": [batch([texts[row] for row in numbers]) for numbers in rows], "texts": texts,
            "class": recipe["class"], "causal": recipe["causal"], "scores": "Classification" in recipe["class"],
            "step": cell.kv_len is not None, "loading": {"gguf_file": recipe["gguf"]} if "gguf" in recipe else {},
            "directory": str(files), "gguf": str(files / recipe.get("gguf", "")), "exported": str(exported),
            "answer": str(place / f"{name}.npz"), "export": False,
        }  # fmt: skip
        if engine in ENGINES[:2] and not exported.exists():  # before, as the peak of that does not count
            partial = exported.with_suffix(".partial")
            Process(python, task | {"export": True, "exported": str(partial)})
            partial.rename(exported)
        return Process(python, task)

    works = functools.cache(make)
    weakref.finalize(works, shutil.rmtree, place)
    return works


def error_of_processes(make: Callable[[str], Callable[[], Tensor]]) -> Callable[[Tensor], float]:
    """Gives an error: one minus the least cosine of a text to stock's in float32, or the correlation of scores."""
    truth = make(REFERENCE)()

    def error(out: Tensor) -> float:
        ours, theirs = (one.double() if one.shape[1] > 1 else (one - one.mean()).double().T for one in (out, truth))
        return max(0.0, 1 - float(torch.nn.functional.cosine_similarity(ours, theirs).min()))

    return error
