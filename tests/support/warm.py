"""Programs in copies of one interpreter that has imported torch and Transformers, which costs each new one seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Self

SECONDS = 600
"""After which a program is killed."""

# Nothing of ours is imported, and nothing is computed: a copy of a process with threads of its own could hang.
SERVER = """
import json, os, signal, sys, types
import torch, transformers, transformers.masking_utils, transformers.modeling_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

for line in sys.stdin:
    code, place, written, arguments = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm({seconds})
    os.chdir(place)
    for number, path in ((0, os.devnull), (1, written + ".out"), (2, written + ".err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["-c", *arguments]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(program))
    raise SystemExit
"""


class WarmInterpreter:
    """Runs programs one after the other, each in a copy of a process that has run none; leave it to end the process."""

    def __init__(self, scratch: Path) -> None:
        self._written = scratch / "program"
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER.format(seconds=SECONDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)

    def run(self, code: str, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        asked = [code, str(place), str(self._written), arguments]
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        out, err = (Path(f"{self._written}.{end}").read_text(encoding="utf-8") for end in ("out", "err"))
        return subprocess.CompletedProcess(code, status, out, err)
