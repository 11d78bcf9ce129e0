"""The flash-attn backends of versions 2 and 3, where one is installed; of these `fa3_fwd` alone has run on a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.kind import COMPILING, DROPOUT, GRAD, LSE, OPAQUE, SOFTCAP, WINDOW, WINDOW_SINKS, CallKind
from ...attention.structure import MaskStructure
from ..base import Backend, Kernel, Supports, installed, run_refusals

if TYPE_CHECKING:
    from ...attention.heads import HeadRules
    from ...attention.packing import Packed


@torch.compiler.assume_constant_result
def _made_without(flags_module: str | None, feature: str) -> bool:
    """Whether the module of a build's flags is there, and says that it lacks a feature; constant in a traced graph."""
    if flags_module is None or not installed(flags_module):
        return False
    flags = getattr(importlib.import_module(flags_module), "CONFIG", {}).get("build_flags", {})
    return bool(flags.get(f"FLASHATTENTION_DISABLE_{feature}", False))


class FlashBackend(Backend):
    """flash-attn's dense and variable-length kernels (CUDA, half precision), of one installable build."""

    def __init__(
        self,
        name: str,
        version: int,
        module: str,
        product: str,
        devices: tuple[tuple[int, int], tuple[int, int]],
        flags_module: str | None = None,
    ) -> None:
        """Takes what differs between builds.

        Args:
            version: 2 or 3; the keywords differ.
            module: Python module that holds the functions.
            product: What a user installs.
            devices: Compute capabilities that it is built for, from the one to below the other.
            flags_module: Module whose `CONFIG["build_flags"]` says what the build left out, if there is one.
        """
        self.name, self.version, self.module, self.product = name, version, module, product
        self.devices, self.flags_module, self.package = devices, flags_module, module.partition(".")[0]
        features = SOFTCAP | LSE | GRAD | COMPILING | OPAQUE | (DROPOUT if version == 2 else 0)
        half = (torch.float16, torch.bfloat16)
        self.supports = Supports(
            "flash-attn's kernels", features, "cuda", half, widest=256, multiple=8, equal=True, dense=False
        )

    def missing(self) -> tuple[str, ...]:
        """The package is looked for without being imported."""
        return () if installed(self.module) else (f"{self.product} is not installed (no module {self.module})",)

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What flash-attn's kernels cannot compute."""
        from ..capability import capability  # of CUDA alone: registering names does not ask for devices

        reasons = list(super().refusals(kind))
        on_cuda = kind.device.type == "cuda"
        if on_cuda and (facts := capability(kind.device)) and not self.devices[0] <= facts.sm < self.devices[1]:
            reasons.append(f"{self.product} has no kernels for compute capability {facts.sm[0]}.{facts.sm[1]}")
        if kind.features & WINDOW_SINKS and kind.shape != "full":
            reasons.append("flash-attn has no sink tokens beside a window")
        for asked, feature, name in (
            (kind.needs_grad, "BACKWARD", "the backward pass"),
            (kind.features & WINDOW, "LOCAL", "windows"),
            (kind.dtype == torch.float16, "FP16", "float16"),
        ):
            if asked and _made_without(self.flags_module, feature):
                reasons.append(f"{self.product} was built without {name}")
        if kind.features & LSE and kind.shape == "ragged":
            reasons.append("the log-sum-exp of packed segments is not put back in place")
        reasons += run_refusals(kind, "flash-attn's packed kernels")
        if kind.compiling and kind.shape == "ragged":
            reasons.append("the segments of a padded batch cannot be read while a graph is traced")
        return tuple(reasons)

    def kernel(self, kind: CallKind, rules: HeadRules | None) -> Kernel:
        """One dense call, or one variable-length call over the segments."""
        kernels = importlib.import_module(self.module)
        return lambda call: attend_runs(call, kernels, self._arguments(call))

    def _arguments(self, call: AttentionCall) -> dict[str, Any]:
        structure = call.structure
        window = (-1, -1)
        if structure.windowed and structure.window is not None:
            window = (structure.window - 1, 0 if structure.causal else structure.window - 1)
        arguments: dict[str, Any] = {
            "softmax_scale": call.scaling,
            "causal": structure.causal,
            "window_size": window,
            "softcap": call.softcap or 0.0,
        }
        if self.version == 2:
            arguments["dropout_p"] = call.dropout
        else:
            arguments["num_splits"] = 0 if structure.q_len == 1 else 1  # 0: as many as fill the device
        if call.need_lse:
            arguments["return_attn_probs"] = True
        return arguments


# flash-attn 4 shares the first one's package name, but not this module
FA2 = FlashBackend("fa2", 2, "flash_attn.flash_attn_interface", "flash-attn", ((8, 0), (99, 0)))
FA3 = FlashBackend("fa3", 3, "flash_attn_interface", "flash-attn 3", ((9, 0), (10, 0)), "flash_attn_config")
FA3_FWD = FlashBackend("fa3_fwd", 3, "fa3_fwd_interface", "fa3-fwd", ((9, 0), (10, 0)), "fa3_fwd_config")


def attend_runs(call: AttentionCall, kernels: Any, arguments: dict[str, Any]) -> AttentionResult:
    """One dense call, or one variable-length call over the segments; `arguments` are keywords of both.

    Where the two functions of `kernels` answer with several tensors, these are the output and the log-sum-exp.
    """
    structure = call.structure
    if structure.kind == "ragged":
        return AttentionResult(attend_packed(call, kernels.flash_attn_varlen_func, arguments))
    kv_len = structure.kv_len
    if structure.causal:
        # the kernels align causality to the last key: cut the keys behind the last query
        kv_len = min(kv_len, structure.offset() + structure.q_len)
    answer = kernels.flash_attn_func(
        call.query.transpose(1, 2),
        call.key[:, :, :kv_len].transpose(1, 2),
        call.value[:, :, :kv_len].transpose(1, 2),
        **arguments,
    )
    out, lse = answer[:2] if isinstance(answer, tuple) else (answer, None)
    return AttentionResult(out, lse if call.need_lse else None)


def attend_packed(
    call: AttentionCall, kernel: Callable[..., Tensor | tuple[Tensor, ...]], arguments: dict[str, Any]
) -> Tensor:
    """Segments as one row of tokens; gathered unless they are the batch itself. Rows of no segment are zero.

    Where the kernel answers with several tensors, the first is the output. Padding with holes is a ValueError.
    """
    from ...attention.packing import TO_LAST, tokens_of  # of packed calls alone, as in `packings_of`

    structure = call.structure
    batch, heads, q_len, _ = call.query.shape
    segments = structure.segments()
    if segments is None:
        raise ValueError(
            "attention_mask: the padding has holes, which flash-attn cannot serve; pad on one side, or use "
            'attn_implementation="adaattn_sdpa"'
        )
    shape = (batch, q_len, heads, call.value.shape[3])
    if not segments:
        return call.query.new_zeros(shape)
    flat: Tensor | None = None
    for packed in structure.cached(packings_of, call.query.device):
        answer = kernel(
            tokens_of(call.query, packed.queries),
            tokens_of(call.key, packed.keys),
            tokens_of(call.value, packed.keys),
            cu_seqlens_q=packed.q_borders,
            cu_seqlens_k=packed.k_borders,
            max_seqlen_q=packed.q_longest,
            max_seqlen_k=packed.k_longest,
            **arguments | {"causal": packed.rule == TO_LAST},
        )
        out = answer[0] if isinstance(answer, tuple) else answer
        if packed.queries is None:
            return out.view(shape)
        flat = out.new_zeros((batch * q_len, *out.shape[1:])) if flat is None else flat
        flat = flat.index_copy(0, packed.queries, out)
    assert flat is not None, "some run holds a query"
    return flat.view(shape)


def packings_of(structure: MaskStructure, device: torch.device) -> list[Packed]:
    """The segments of a structure as packed rows, a launch for each.

    The kernels let the last query stand at the last key. Causal queries behind it, those of right padding, see all keys
    of their segment: a second launch, which is not causal, and with a window a ValueError.
    """
    from ...attention.packing import FULL, TO_LAST, pack

    segments = structure.segments() or ()
    if not structure.causal and not structure.windowed:
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
