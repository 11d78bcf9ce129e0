"""What versions of torch before the newest lack must not stop an import."""

from pathlib import Path

from ..support.warm import WarmInterpreter

WITHOUT_THE_TAG = """
import torch, transformers.modeling_utils
names = [name for name in dir(torch.Tag) if not name.startswith("_") and name != "cudagraph_unsafe"]
torch.Tag = type("Tag", (), {name: getattr(torch.Tag, name) for name in names})
import adaattn_hf.plans.execute
print(torch.ops.adaattn_hf.planned.default)
"""


def test_plans_need_no_tag_of_torch_2_9(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    """Before, operators cannot be told to stay out of CUDA graphs; before 2.7 they take no tags at all."""
    done = interpreter.run(WITHOUT_THE_TAG, tmp_path)
    assert done.stdout == "adaattn_hf.planned.default\n", done.stderr[-1500:]
