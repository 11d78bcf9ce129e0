"""`torch.set_default_dtype` is the user's: it changes no answer, since every tensor of ours names its dtype."""

import json
from typing import Any

from ..support.source_tree import ROOT
from ..support.warm import WarmInterpreter

CALLS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.core_calls import main
main(sys.argv[1])
"""


def answers(interpreter: WarmInterpreter, dtype: str) -> Any:
    """Digests of what a process of its own computes, in which nothing was remembered under another default."""
    done = interpreter.run(CALLS, ROOT, dtype)
    assert done.returncode == 0, done.stderr[-1500:]
    return json.loads(done.stdout)


def test_no_answer_depends_on_the_default_dtype(interpreter: WarmInterpreter) -> None:
    usual, other = answers(interpreter, "float32"), answers(interpreter, "bfloat16")
    assert len(usual) > 100
    assert [name for name, digest in usual.items() if other.get(name) != digest] == []
