"""`adaattn run`: runs a Python program with AdaAttn's names registered, for tools with `--attn_implementation`."""

from __future__ import annotations

import importlib.metadata
import runpy
import sys
from pathlib import Path
from typing import Any

import adaattn_hf  # noqa: F401 - registers the names
from adaattn_hf.errors import UsageError
from adaattn_hf.patches.plans.everywhere import bind_when_loaded
from adaattn_hf.plans.plan import Plan, PlanError

from .ending import leave
from .options import Done, Options


def run(options: Options) -> Done:
    """Runs the program in this process; its arguments are those behind it."""
    words = list(options.command)
    try:
        end = bind_when_loaded(None if options.plan is None else Plan.from_pretrained(options.plan))
    except (PlanError, OSError) as error:
        leave(UsageError(f"plan: {error}"))
    try:
        if words[0] == "-m" and len(words) > 1:
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif Path(words[0]).is_file():
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))  # as `python FILE.py` does
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv = words
            raise SystemExit(_console_script(words[0])())
    finally:
        end()
    return Done()


def _console_script(name: str) -> Any:
    scripts = importlib.metadata.entry_points(group="console_scripts", name=name)
    if not scripts:
        leave(
            UsageError(
                f"command: got {name!r}, expected a file, -m MODULE or a Python program installed in {sys.prefix}; "
                "Python itself is not named: adaattn run train.py"
            )
        )
    return next(iter(scripts)).load()
