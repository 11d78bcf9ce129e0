"""`accelerate launch` of the command line in two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from adaattn_cli import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["adaattn", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def launched(commands: list[list[str]], place: Path) -> subprocess.Popen[str]:
    """Commands, one behind another, in two processes of one thread each, on the CPU and in a directory of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = place / "commands.py"
    program.write_text(PROGRAM)
    launch = f"-m accelerate.commands.launch --cpu --num_processes 2 --main_process_port {port} {program}"
    return subprocess.Popen(
        [sys.executable, "-P", *launch.split(), json.dumps(commands)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
