"""What torch does with a call beside computing it: graphs, transforms, modes, autocast, tensors without memory.

This is the only place that names private functions of torch. Those here are of torch 2.6 to 2.13; each has a fallback
for a torch without it. Functions that every small call asks are torch's own, without a Python function around them.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _python_dispatch

jit_trace = getattr(torch._C, "_get_tracing_state", lambda: torch._C._is_tracing() or None)
"""The state of `torch.jit.trace`, None where it is not at work."""
func_transform = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
"""The innermost transform of `torch.func`, None where there is none, or where our kernels have to refuse it."""
dispatch_modes = getattr(
    torch._C, "_len_torch_dispatch_stack", lambda: len(_python_dispatch._get_current_dispatch_mode_stack())
)
"""How many modes, such as FakeTensorMode, see every operation of this thread."""
any_autocast = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
)
"""Whether autocast is on for any kind of device."""
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpointing computes calls again."""
    return _graph_task() != -1


def transient() -> bool:
    """Whether tensors that are made now are of no use later: in a traced graph, or in a mode such as FakeTensorMode.

    Nor are tensors that were made before of use there.
    """
    return torch.compiler.is_compiling() or bool(dispatch_modes())


def tracing() -> bool:
    """Whether torch.compile or torch.jit.trace records a graph, into which nothing read from data may go."""
    return torch.compiler.is_compiling() or jit_trace() is not None


def autocast_device(tensor: Tensor) -> str:
    """The device type to name where autocast is to be off; the meta device, which computes nothing, knows none."""
    return "cpu" if tensor.is_meta else tensor.device.type


def transform_at_work() -> str | None:
    """Name of the transform that is to see every operation of this thread, None where none is.

    Graphs of `torch.compile` and `torch.export` are not meant: for them the kernels are operators.
    """
    if jit_trace() is not None:
        return "torch.jit.trace"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "forward-mode automatic differentiation"
    if func_transform() is not None:
        return "torch.func (grad, vmap, jvp)"
    return "make_fx" if dispatch_modes() and get_proxy_mode() is not None else None


def holds_no_memory(*tensors: Tensor) -> bool:
    """Whether a tensor is of a subclass that traces, wraps or shards: it has a shape, and nothing that can be read."""
    for tensor in tensors:
        if type(tensor) is Tensor:
            continue
        if hasattr(torch._C, "_dispatch_keys"):
            traced = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
        else:
            traced = not isinstance(tensor, torch.nn.Parameter)
        if traced:
            return True
    return False
