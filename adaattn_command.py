"""The command `adaattn`, started without torch: help, version, completion and mistakes in options answer at once.

`import adaattn_hf` registers names with Transformers and loads it for that, which takes seconds. The module of the
command line needs nothing of the package before a command runs; so it is loaded by its file, and the package by the
command.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def command_line() -> ModuleType:
    """`adaattn_hf/cli/main.py` as a module by itself, without importing the package around it.

    Raises:
        ModuleNotFoundError: The package is not installed beside this file.
    """
    package = importlib.util.find_spec("adaattn_hf")  # looks for the file; imports nothing
    if package is None or package.origin is None:
        raise ModuleNotFoundError("adaattn_hf is not installed; reinstall adaattn-hf")
    place = Path(package.origin).parent / "cli" / "main.py"
    spec = importlib.util.spec_from_file_location("adaattn_command_line", place)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{place} cannot be loaded; reinstall adaattn-hf")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the command line; exits the process with the command's code, 130 where Ctrl-C came before there was one."""
    try:
        command_line().main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
