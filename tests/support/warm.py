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


HERE = "import os, runpy, sys; sys.path.insert(0, os.getcwd())\n"
AS_A_MODULE = HERE + "runpy.run_module('adaattn_hf', run_name='__main__')"
"""What `python -m adaattn_hf` does."""
SERVING = """
import json, os, socket

def serve(place):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen()
    asking = os.getpid()
    if os.fork():
        return listening.close()
    listening.settimeout(1)
    while os.getppid() == asking:
        try:
            caller = listening.accept()[0]
        except TimeoutError:
            continue
        told, standard, *_ = socket.recv_fds(caller, 1 << 20, 3)
        child = os.fork()
        if child:
            for one in standard:
                os.close(one)
            caller.send(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
            caller.close()
            continue
        words, where, environment = json.loads(told)
        for number, one in enumerate(standard):
            os.dup2(one, number)
        os.chdir(where)
        os.environ.clear()
        os.environ.update(environment)
        import sys, adaattn_cli
        sys.argv, sys.stdout, sys.stderr = ["adaattn", *words], open(1, "w"), open(2, "w", buffering=1)
        raise SystemExit(adaattn_cli.main())
    os._exit(0)
"""
"""A program that calls `serve` first has `adaattn` run for `CALLER` in copies of its process, as long as it lives."""
CALLER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    told = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [told.encode()], [0, 1, 2])
    sys.exit(server.recv(1)[0])
"""
"""A command that takes a socket's place and the words behind `adaattn`."""


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
        self._server.communicate(timeout=600)

    def run(self, code: str, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        asked = [code, str(place), str(self._written), arguments]
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        out, err = (Path(f"{self._written}.{end}").read_text(encoding="utf-8") for end in ("out", "err"))
        return subprocess.CompletedProcess(code, status, out, err)
