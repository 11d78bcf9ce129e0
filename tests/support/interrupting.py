"""Interruptions: a command that is stopped as soon as it has kept something, and a call that fails at its turn."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

COMMAND = (sys.executable, "-P", "-c", "from adaattn_cli import main; main()")


def interrupted(
    arguments: list[str], appears: Path, stop: signal.Signals = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    """Runs `adaattn` until a file appears, sends it a signal (that of Ctrl-C), and returns how it ended."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell runs in the background ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 600
        while process.poll() is None and not appears.is_file() and time.monotonic() < end:
            time.sleep(0.005)
        process.send_signal(stop)
        said, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, said, errors)


def failing(real: Callable[..., Any], at: int, error: BaseException | Callable[[], Any]) -> Mock:
    """Does as the function does, but for one call, by number, which raises the error or calls what is given first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if calls.call_count == at:
            if isinstance(error, BaseException):
                raise error
            error()
        return real(*args, **kwargs)

    calls = Mock(side_effect=call)
    return calls
