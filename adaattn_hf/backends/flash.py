"""The flash-attn backends: of versions 2 and 3 `fa3_fwd` alone has run on a device; 4 compiles at the first call."""

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention.call import AttentionCall, AttentionResult
from ..attention.kind import (
    BEHIND,
    COMPILING,
    DROPOUT,
    GRAD,
    LSE,
    OPAQUE,
    SINKS,
    SOFTCAP,
    WINDOW,
    WINDOW_SINKS,
    CallKind,
)
from ..attention.packing import FULL, TO_LAST, Packed, pack, tokens_of
from ..attention.structure import MaskStructure
from . import capability
from .base import Backend, Kernel, PerHead, Supports, installed

_HALF = (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def _made_without(flags_module: str | None, feature: str) -> bool:
    """Whether the module of a build's flags is there, and says that it lacks a feature; constant in a traced graph."""
    if flags_module is None or not installed(flags_module):
        return False
    flags = getattr(importlib.import_module(flags_module), "CONFIG", {}).get("build_flags", {})
    return bool(flags.get(f"FLASHATTENTION_DISABLE_{feature}", False))


@dataclass(eq=False)
class FlashBackend(Backend):
    """flash-attn's dense and variable-length kernels (CUDA, half precision), of one installable build.

    Attributes:
        version: 2 or 3; the keywords differ.
        module: Python module that holds the functions.
        product: What a user installs.
        devices: Compute capabilities that it is built for, from the one to below the other.
        flags_module: Module whose `CONFIG["build_flags"]` says what the build left out, if there is one.
    """

    name: str
    version: int
    module: str
    product: str
    devices: tuple[tuple[int, int], tuple[int, int]]
    flags_module: str | None = None

    def __post_init__(self) -> None:
        """Says what it serves."""
        self.package = self.module.partition(".")[0]
        features = SOFTCAP | LSE | GRAD | COMPILING | OPAQUE | (DROPOUT if self.version == 2 else 0)
        self.supports = Supports(
            "flash-attn's kernels", features, "cuda", _HALF, widest=256, multiple=8, equal=True, dense=False
        )

    def missing(self) -> tuple[str, ...]:
        """The package is looked for without being imported."""
        return () if installed(self.module) else (f"{self.product} is not installed (no module {self.module})",)

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What flash-attn's kernels cannot compute."""
        reasons = list(super().refusals(kind))
        facts = capability.capability(kind.device) if kind.device.type == "cuda" else None
        if facts and not self.devices[0] <= facts.sm < self.devices[1]:
            reasons.append(f"{self.product} has no kernels for compute capability {facts.sm[0]}.{facts.sm[1]}")
        for needed, feature, name in (
            (kind.needs_grad, "BACKWARD", "the backward pass"),
            (kind.features & WINDOW, "LOCAL", "windows"),
            (kind.dtype == torch.float16, "FP16", "float16"),
        ):
            if needed and _made_without(self.flags_module, feature):
                reasons.append(f"{self.product} was built without {name}")
        if kind.features & WINDOW and kind.features & WINDOW_SINKS:
            reasons.append("flash-attn has no sink tokens beside a window")
        if kind.shape == "ragged":  # packed kernels count windows from the last key of a run
            kernels = "flash-attn's packed kernels"
            if kind.features & LSE:
                reasons.append(f"the log-sum-exp of {kernels} is not put back in place")
            if kind.compiling:
                reasons.append("the segments of a padded batch cannot be read while a graph is traced")
            elif kind.features & BEHIND and kind.features & WINDOW:
                reasons.append(f"{kernels} have no window for queries behind the last key of their run")
            elif kind.decode and kind.holes is None:
                reasons.append(f"{kernels} take no padding with holes, and nobody has looked whether it has any")
        return tuple(reasons)

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """One dense call, or one variable-length call over the segments."""
        kernels = importlib.import_module(self.module)

        def attend(call: AttentionCall) -> AttentionResult:
            arguments = _arguments(call, -1)
            if self.version == 2:
                arguments["dropout_p"] = call.dropout
            else:
                arguments["num_splits"] = 0 if call.structure.q_len == 1 else 1  # 0: as many as fill the device
            if call.need_lse:
                arguments["return_attn_probs"] = True
            return attend_runs(call, kernels, arguments)

        return attend


# flash-attn 4 shares the first one's package name, but not this module
FA2 = FlashBackend("fa2", 2, "flash_attn.flash_attn_interface", "flash-attn", ((8, 0), (99, 0)))
FA3 = FlashBackend("fa3", 3, "flash_attn_interface", "flash-attn 3", ((9, 0), (10, 0)), "flash_attn_config")
FA3_FWD = FlashBackend("fa3_fwd", 3, "fa3_fwd_interface", "fa3-fwd", ((9, 0), (10, 0)), "fa3_fwd_config")


class Flash4Backend(FlashBackend):
    """flash-attn 4's dense and packed kernels, which are compiled when they are first called."""

    def __init__(self) -> None:
        """For Hopper and datacentre Blackwell: what it offers other devices nobody has run here."""
        super().__init__("fa4", 4, "flash_attn.cute", "flash-attn 4", ((9, 0), (12, 0)))

    def __post_init__(self) -> None:
        """Says what it serves."""
        super().__post_init__()
        self.supports = replace(
            self.supports,
            kernels="flash-attn 4's kernels",
            features=self.supports.features | SINKS,
            unless=(
                (SOFTCAP | GRAD, "flash-attn 4 has no gradient through a softcap"),
                (COMPILING, "flash-attn 4 is compiled as it is called, which a traced graph cannot hold"),
                (LSE | GRAD, "flash-attn 4's log-sum-exp is not differentiated"),
            ),
        )

    def missing(self) -> tuple[str, ...]:
        """Looks for the package and its imports without importing them; flash-attn 2 has the same package name."""
        # its own modules, parents first, and its compiler's, which an interrupted installation may lack: of the wheels
        # of cutlass one that holds libraries may have left a directory alone
        for module in ("flash_attn", "flash_attn.cute", "cutlass", "quack"):
            if not installed(module, whole=module == "cutlass"):
                what = "is not installed" if module.startswith("flash_attn") else "is not installed whole"
                return (f"flash-attn-4 {what} (no module {module}); pip install 'flash-attn-4>=4.0.0b1'",)
        return ()

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What flash-attn 4's kernels cannot compute."""
        reasons = super().refusals(kind)
        if kind.needs_grad and kind.head_dim > 128:
            reasons += (f"flash-attn 4 has gradients of heads of up to 128 channels, got {kind.head_dim}",)
        return reasons

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """One dense call, or one over packed segments."""
        return partial(_attend_by_4, importlib.import_module(self.module))


def _attend_by_4(kernels: Any, call: AttentionCall) -> AttentionResult:
    # its kernels are launched on the current device; see `triton.launch.Launcher`
    device = call.query.get_device()
    # `torch.cuda.current_device()` would first ask whether CUDA is set up, which a tensor there has answered
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _attend_by_4(kernels, call)
    arguments = _arguments(call, None) | {"learnable_sink": call.sink_logits, "return_lse": call.need_lse}
    return attend_runs(call, kernels, arguments)


# ---------------- dense calls and packed runs, of every version
def _arguments(call: AttentionCall, endless: int | None) -> dict[str, Any]:
    """Keywords of every version's dense and packed kernel; `endless` stands for a side of a window without an end."""
    structure, cap = call.structure, call.softcap or 0.0
    causal, window = structure.causal, structure.window if structure.windowed else None
    sides = (endless, endless) if window is None else (window - 1, 0 if causal else window - 1)
    return {"softmax_scale": call.scaling, "causal": causal, "window_size": sides, "softcap": cap}


def attend_runs(call: AttentionCall, kernels: Any, arguments: dict[str, Any]) -> AttentionResult:
    """One dense call, or segments as one row of tokens; `arguments` are keywords of both.

    Where the two functions of `kernels` answer with several tensors, these are the output and the log-sum-exp. Tokens
    are gathered unless they are the batch itself. Rows of no segment are zero.
    """
    structure = call.structure
    if structure.shape != "ragged":
        kv_len = structure.kv_len
        if structure.causal:
            # the kernels align causality to the last key: cut the keys behind the last query
            kv_len = min(kv_len, structure.offset() + structure.q_len)
        key, value = call.key[:, :, :kv_len].transpose(1, 2), call.value[:, :, :kv_len].transpose(1, 2)
        answer = kernels.flash_attn_func(call.query.transpose(1, 2), key, value, **arguments)
        out, lse = answer[:2] if isinstance(answer, tuple) else (answer, None)
        return AttentionResult(out, lse if call.need_lse else None)
    batch, heads, q_len, _ = call.query.shape
    shape = (batch, q_len, heads, call.value.shape[3])
    flat: Tensor | None = None
    for packed in structure.cached(packings_of, call.query.device):
        query = tokens_of(call.query, packed.queries)
        key, value = (tokens_of(tensor, packed.keys) for tensor in (call.key, call.value))
        answer = kernels.flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=packed.q_borders, cu_seqlens_k=packed.k_borders,
            max_seqlen_q=packed.q_longest, max_seqlen_k=packed.k_longest,
            **arguments | {"causal": packed.rule == TO_LAST},
        )  # fmt: skip
        out = answer[0] if isinstance(answer, tuple) else answer
        if packed.queries is None:
            return AttentionResult(out.view(shape))
        flat = out.new_zeros((batch * q_len, *out.shape[1:])) if flat is None else flat
        flat = flat.index_copy(0, packed.queries, out)
    return AttentionResult(call.query.new_zeros(shape) if flat is None else flat.view(shape))


def packings_of(structure: MaskStructure, device: torch.device) -> list[Packed]:
    """The segments of a structure as packed rows, a launch for each.

    The kernels let the last query stand at the last key. Causal queries behind it, those of right padding, see all keys
    of their segment: a second launch, which is not causal.
    """
    segments = structure.segments()
    if segments is None:  # under torch.jit.trace nobody looks at the padding before
        raise ValueError(
            "attention_mask: the padding has holes, which flash-attn cannot serve; pad on one side, or use "
            'attn_implementation="adaattn_sdpa"'
        )
    if segments and not structure.causal and not structure.windowed:
        return [pack(structure, segments, FULL, device)]
    upto, behind = [], []
    for s in segments:
        count = min(s.q_len, s.k_len - s.offset)
        if structure.windowed and count < s.q_len:
            raise ValueError(
                f"attention_mask: queries {s.q_start}…{s.q_start + s.q_len} of row {s.row} do not end with their "
                'last key, which flash-attn cannot serve under a window; use attn_implementation="adaattn_sdpa"'
            )
        if count > 0:
            upto.append(s._replace(q_len=count))
        if count < s.q_len:
            skipped = max(count, 0)
            behind.append(s._replace(q_start=s.q_start + skipped, q_len=s.q_len - skipped))
    launches = (upto, TO_LAST if structure.causal else FULL), (behind, FULL)
    return [pack(structure, runs, rule, device) for runs, rule in launches if runs]
