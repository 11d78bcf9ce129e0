"""What a small attention call costs in this checkout and in another one, in processor time.

    git worktree add ../before COMMIT       # with an environment of its own in ../before/.venv
    python studies/tiny_call.py ../before

A process of each checkout's own interpreter measures the same cases, one sample of one after one of the other, so that
whatever else the machine does falls on both. Both see only what Transformers sees: the two registries. Exits with 1
where this checkout needs more than `--most` microseconds more a call, or more than `--most-model` times as long for the
whole model.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "GPT-2 of 12 layers, 32 tokens"
SAMPLE_SECONDS = 0.02


def cases() -> dict[str, tuple[Callable[[], Any], int]]:
    """By name: something to do, and how many attention calls it makes."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import adaattn_hf  # noqa: F401  (registers the name)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    attend: Any = ALL_ATTENTION_FUNCTIONS["adaattn"]
    make_mask: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["adaattn"]
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, num_hidden_layers=1)
    config._attn_implementation = "adaattn"
    layer = torch.nn.Module()
    vars(layer).update(is_causal=True, config=config)

    def passes(batch: int, q_len: int, kv_len: int, layers: int, padded: bool = False) -> Callable[[], Any]:
        q, k, v = (torch.randn(batch, n, 4, 32).transpose(1, 2) for n in (q_len, kv_len, kv_len))
        padding = torch.ones(batch, kv_len, dtype=torch.bool)
        for row in range(1, batch):
            padding[row, : 5 * row] = False

        def work() -> Any:
            mask = make_mask(
                batch_size=batch, q_length=q_len, kv_length=kv_len, q_offset=kv_len - q_len, kv_offset=0,
                mask_function=masking_utils.causal_mask_function, attention_mask=padding if padded else None,
                allow_is_causal_skip=True, dtype=torch.float32, config=config, device=q.device,
            )  # fmt: skip
            for _ in range(layers):
                out = attend(layer, q, k, v, mask, scaling=0.2, dropout=0.0)[0]
            return out

        return work

    tensors = [torch.randn(1, 8, 4, 32).transpose(1, 2) for _ in range(3)]
    model = AutoModelForCausalLM.from_config(GPT2Config(), attn_implementation="adaattn").eval()
    tokens = torch.randint(0, 50_000, (1, 32))
    return {
        "a call on 8 tokens": (lambda: attend(layer, *tensors, None, scaling=0.2, dropout=0.0), 1),
        "8 layers on 8 tokens": (passes(1, 8, 8, 8), 8),
        "8 layers on 4 padded rows of 32": (passes(4, 32, 32, 8, padded=True), 8),
        "8 layers on one query behind 64 keys": (passes(1, 1, 64, 8), 8),
        MODEL: (lambda: model(tokens), 12),
    }


def serve() -> None:
    """Answer lines `NAME` with seconds of processor time per call."""
    works = cases()
    repeats = {}
    for name, (work, _) in works.items():
        for _ in range(3):
            work()
        start = time.process_time()
        work()
        repeats[name] = max(1, round(SAMPLE_SECONDS / max(time.process_time() - start, 1e-6)))
    print("\n".join(works), "", sep="\n", flush=True)
    for line in sys.stdin:
        name = line.rstrip("\n")
        work, calls = works[name]
        start = time.process_time()
        for _ in range(repeats[name]):
            work()
        print((time.process_time() - start) / repeats[name] / calls, flush=True)


class Checkout:
    """A process that measures in a checkout."""

    def __init__(self, root: Path) -> None:
        """Start it; `names` are the cases that it knows."""
        python = root / ".venv" / "bin" / "python"
        if not python.is_file():
            raise SystemExit(f"{python}: not there; make the checkout an environment first (`make venv`)")
        command = [str(python), str(Path(__file__).resolve()), "--serve"]  # by the interpreter that was named
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert self._process.stdout is not None
        self.names = list(iter(lambda: self._line(), ""))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process that measures ended with {self._process.wait()}")
        return line.rstrip("\n")

    def ask(self, name: str) -> float:
        """Seconds of a case."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._line())


def main() -> int:
    """Compare two checkouts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=60, help="samples per case and checkout (60)")
    parser.add_argument("--most", type=float, default=2.0, help="microseconds more a call that are allowed (2)")
    parser.add_argument("--most-model", type=float, default=1.0, help="times as long for the model (1.0)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.before is None:
        parser.error("name the checkout to compare with")
    before, now = Checkout(options.before.resolve()), Checkout(Path(__file__).resolve().parents[1])
    failed = False
    print("microseconds of processor time per attention call (of the model: per layer), median and least of samples")
    for name in now.names:
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(options.rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                samples[side].append(1e6 * (before, now)[side].ask(name))
        old, new = map(statistics.median, samples)
        kept = new <= options.most_model * old if name == MODEL else new - old <= options.most
        failed |= not kept
        print(
            f"{name}: before {old:.2f} ({min(samples[0]):.2f}), now {new:.2f} ({min(samples[1]):.2f}), "
            f"{new - old:+.2f}, ratio {new / old:.3f}{'' if kept else '  TOO MUCH'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
