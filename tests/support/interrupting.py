"""A command that is interrupted by Ctrl-C as soon as it has kept something."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, "-P", "-c", "from adaattn_hf.cli.main import main; main()")


def interrupted(
    arguments: list[str], appears: Path, command: tuple[str, ...] = COMMAND
) -> subprocess.CompletedProcess[str]:
    """Runs a command until a file appears, sends SIGINT, and returns how it ended."""
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell runs in the background ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 180
        while process.poll() is None and not appears.is_file() and time.monotonic() < end:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, said, errors)
