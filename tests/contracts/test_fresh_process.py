"""What `import adaattn_hf` does in a process that has done nothing else: register names."""

import sys
import textwrap
from pathlib import Path

from ..support.versions import needs_tracing
from ..support.warm import WarmInterpreter

OPTIONAL = ("triton", "flash_attn", "flash_attn_interface", "flash_attn_3", "datasets", "evaluate", "lm_eval", "peft")
"""Packages that the core does without."""
LATE = (
    "matplotlib", "typer", "scipy.optimize", "adaattn_hf.eval", "adaattn_cli", "adaattn_hf.calibration",
    "adaattn_hf.policy", "adaattn_hf.stats", "adaattn_hf.plans", "adaattn_hf.backends.native.build",
    "adaattn_hf.backends.native.library", "torch._dynamo",
)  # fmt: skip
"""What only commands, calibration, plans, plots, the first call on a processor or a tracer needs."""
MOST = 41
"""Modules of ours that registering names may load."""

GUARD = """
import logging, os, sys
from unittest import mock

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

import ctypes
import torch
import transformers, transformers.modeling_utils, transformers.masking_utils
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in {blocked!r}:
    sys.modules.pop(name, None)
before = set(sys.modules)
threads, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
environment = dict(os.environ)
records = []
class Listener(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.getLogger().addHandler(Listener())
def refuse(*args, **kwargs):
    raise AssertionError("a device was queried")
queries = ["is_available", "device_count", "get_device_capability", "get_device_properties", "current_device", "init"]
patches = [mock.patch.object(torch.cuda, query, refuse) for query in queries]
patches += [mock.patch.object(torch.accelerator, query, refuse) for query in ("is_available", "device_count")]
opened = []
patches.append(mock.patch.object(ctypes.CDLL, "__init__", lambda self, name, *a, **k: opened.append(str(name))))
for patch in patches:
    patch.start()
import {module}
for patch in patches:
    patch.stop()
new = set(sys.modules) - before
loaded = sorted(name for name in {late!r} if name in new)
assert not loaded, f"imported: {{loaded}}"
ours = sorted(name for name in new if name.split(".")[0] == "adaattn_hf")
assert len(ours) <= {most}, f"{{len(ours)}} modules of ours: {{ours}}"
assert not [name for name in opened if "adaattn" in name or "torch" in name], f"opened: {{opened}}"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
loud = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
assert not loud, f"logged: {{loud}}"
after = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
assert (threads, grad, dtype) == after, "torch was set"
assert environment == dict(os.environ), "the environment was changed"
"""


STRICT = "import warnings; warnings.filterwarnings('error', category=FutureWarning, module='adaattn_hf$')\n"


def run(
    interpreter: WarmInterpreter,
    code: str,
    *,
    blocked: tuple[str, ...] = (),
    module: str = "adaattn_hf",
    path: Path | None = None,
) -> str:
    guard = GUARD.format(blocked=set(blocked), late=LATE + OPTIONAL, module=module, most=MOST)
    prefix = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    done = interpreter.run(STRICT + prefix + guard + textwrap.dedent(code), Path(sys.prefix))
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr[-1500:]}"


def test_import_registers_the_names_and_does_nothing_else(interpreter: WarmInterpreter) -> None:
    """No device is looked at, nothing optional imported, nothing logged or set; optional packages may be missing."""
    code = """
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
        names = sorted(n for n in AttentionInterface().valid_keys() if n.startswith("adaattn") and "|" not in n)
        from adaattn_hf.backends.select import may_run_here
        assert names == sorted(n for n, b in adaattn_hf.NAMES.items() if b is None or may_run_here(b)), names
        assert all(name in AttentionMaskInterface().valid_keys() for name in names)
        for stock in ("sdpa", "flash_attention_2", "flex_attention"):
            assert AttentionInterface()[stock].__module__.startswith("transformers."), stock

        config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                          num_attention_heads=2, num_key_value_heads=1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
        out = model(input_ids=torch.arange(6)[None]).logits
        assert torch.isfinite(out).all()
        assert "adaattn_hf.plans" not in sys.modules, "a call without a plan loaded what plans need"
        missing = str(adaattn_hf.explain(model, verbose=True))
        print(missing)
    """
    printed = run(interpreter, code, blocked=OPTIONAL)
    assert "flash-attn is not installed" in printed, printed


@needs_tracing
def test_a_first_call_that_is_traced_registers_nothing(interpreter: WarmInterpreter) -> None:
    """The operators are there before any tracing; the library opens with the first call that needs it."""
    code = """
        import sys
        ours = torch.ops.adaattn_hf
        operators = [ours.native_attend.default, ours.native_attend_backward.default, ours.triton_step.default]
        config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                          num_attention_heads=2, num_key_value_heads=1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn").eval()
        ids = torch.arange(6)[None]
        with torch.no_grad():
            traced = torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids).logits
            plain = model(input_ids=ids).logits
        assert torch.allclose(traced, plain, atol=1e-5), (traced - plain).abs().max()
        again = [ours.native_attend.default, ours.native_attend_backward.default, ours.triton_step.default]
        assert operators == again
        print("right")
    """
    assert run(interpreter, code) == "right\n"


PLANTED = {
    "a device was queried": "import torch\ntorch.cuda.is_available()\n",
    "imported: ['typer']": "import typer\n",
    f"{MOST + 1} modules of ours": (
        f"import sys\nsys.modules.update(dict.fromkeys([f'adaattn_hf.planted{{n}}' for n in range({MOST + 1})], sys))\n"
    ),
    "opened: ['libadaattn.so']": "import ctypes\nctypes.CDLL('libadaattn.so')\n",
    "logged: ['hello']": "import logging\nlogging.getLogger('planted').warning('hello')\n",
    "torch was set": "import torch\ntorch.set_num_threads(torch.get_num_threads() + 1)\n",
    "the environment was changed": "import os\nos.environ['PLANTED'] = '1'\n",
    "No module named 'peft'": "import peft\n",
}


def test_the_guard_finds_planted_violations(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    """One process for all: every planted module is guarded by the same statements as the package."""
    for number, text in enumerate(PLANTED.values()):
        (tmp_path / f"planted{number}.py").write_text(text)
    statements = GUARD.format(blocked=set(OPTIONAL), late=LATE + OPTIONAL, module="{module}", most=MOST)
    code = f"""
        statements = {statements!r}
        for number in range({len(PLANTED)}):
            sys.modules.pop("typer", None)
            try:
                exec(statements.replace("{{module}}", f"planted{{number}}"), dict(globals()))
            except (AssertionError, ModuleNotFoundError) as error:
                print(number, error)
                mock.patch.stopall()
            else:
                print(number, "nothing was found")
    """
    printed = run(interpreter, code, module="sys", path=tmp_path)
    for number, complaint in enumerate(PLANTED):
        assert f"{number} {complaint}" in printed, printed
