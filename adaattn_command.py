"""The command `adaattn`, started without torch: help, version, completion and mistakes in options answer at once.

`import adaattn_hf` registers names with Transformers and loads it for that, which takes seconds. The command line needs
nothing of the package before a command runs; so the package is found here, and executed by the command.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType


def command_line() -> ModuleType:
    """`adaattn_hf.cli.main`, imported without executing the package around it.

    Raises:
        ModuleNotFoundError: The package is not installed beside this file.
    """
    package = importlib.util.find_spec("adaattn_hf")  # looks for the file; imports nothing
    if package is None:
        raise ModuleNotFoundError("adaattn_hf is not installed; reinstall adaattn-hf")
    sys.modules["adaattn_hf"] = importlib.util.module_from_spec(package)
    return importlib.import_module("adaattn_hf.cli.main")


def main() -> None:
    """Run the command line; exits the process with the command's code, 130 where Ctrl-C came before there was one."""
    try:
        command_line().main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
