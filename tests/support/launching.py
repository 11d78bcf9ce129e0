"""`accelerate launch` of the command line in two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def launched(words: list[str], place: Path) -> subprocess.Popen[str]:
    """The command in two processes of one thread each, on the CPU and in a directory of their own, as they begin."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = f"-m accelerate.commands.launch --cpu --num_processes 2 --main_process_port {port}"
    return subprocess.Popen(
        [sys.executable, "-P", *launch.split(), "-m", "adaattn_hf", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
