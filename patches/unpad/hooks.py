"""Forward hooks that remove the padding of a model's inputs and restore it in its outputs.

They are registered on the model (so that token-wise heads run packed, too), on its base model (so that other heads see
padded hidden states) and on the pooler. Nothing of the model or of Transformers is replaced.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adaattn_hf.attention.tracing import tracing

from ..models.cache_keyword import cache_keyword
from .call import Pass, arguments_of, has_cache, pack_call, position_rule, read_layout, scored_padding
from .layout import PackedLayout, PackedPrefill

logger = logging.getLogger("adaattn_hf")

UNPADDED = "unpadded"
# Suffixes of classes whose head treats every token alike; True if label t + 1 is scored at t.
_TOKEN_WISE = {"ForCausalLM": True, "LMHeadModel": True, "ForMaskedLM": False}
# Suffixes of classes whose head reads every token.
_EVERY_TOKEN = ("ForTokenClassification", "ForQuestionAnswering")


class PaddedCallError(RuntimeError):
    """A padded call cannot be packed, and the model was prepared with `on_padded="raise"`."""


@dataclass
class _Frame:
    module: nn.Module
    owner: Unpadding
    layout: PackedLayout | None = None
    blocked: Pass | None = None
    padded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


_frames: ContextVar[tuple[_Frame, ...]] = ContextVar("adaattn_unpad_frames", default=())


@contextmanager
def frames_closed() -> Iterator[None]:
    """Leaves no frame open behind the block, not even after KeyboardInterrupt, when torch calls no hooks."""
    before = _frames.get()
    try:
        yield
    finally:
        _frames.set(before)


class Unpadding:
    """The hooks of one model, whose base model is `trunk`; `calls` counts passes, those not packed by reason."""

    def __init__(self, top: nn.Module, trunk: nn.Module, on_padded: str = "run") -> None:
        """Registers nothing yet; `install` does."""
        self.top, self.trunk, self.on_padded = top, trunk, on_padded
        self.calls: Counter[str] = Counter()
        self.config: Any = trunk.config
        self._top_signature = inspect.signature(type(top).forward)
        self._trunk_signature = inspect.signature(type(trunk).forward)
        self.takes_cache = cache_keyword(self._trunk_signature) is not None
        self._rule = position_rule(trunk, self.config)
        ending = next((end for end in _TOKEN_WISE if type(top).__name__.endswith(end)), None)
        pooled = getattr(trunk, "pooler", None) is not None
        self.token_wise = ending is not None and top is not trunk and not pooled
        reads_all = type(top).__name__.endswith((*_TOKEN_WISE, *_EVERY_TOKEN))
        # a head that summarises says how; others of encoders read position 0, of decoders the last token
        summary = next((m.summary_type for m in top.modules() if hasattr(m, "summary_type")), "first")
        self.pools = "" if top is trunk or reads_all else "last" if has_cache(self.config) else "first"
        self.pools = "all" if self.pools == "first" and summary != "first" else "first" if pooled else self.pools
        self._shifted = ending is not None and _TOKEN_WISE[ending]
        self._handles: list[RemovableHandle] = []
        self._said: set[str] = set()

    def install(self) -> None:
        """Registers the hooks."""
        for module in dict.fromkeys((self.top, self.trunk)):
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        pooler = getattr(self.trunk, "pooler", None)
        if isinstance(pooler, nn.Linear):
            # the model slices the first token off before it calls this pooler
            encoder = self.trunk.get_submodule("encoder")
            self._handles.append(encoder.register_forward_hook(self._leave_encoder))
        elif isinstance(pooler, nn.Module):
            self._handles.append(pooler.register_forward_pre_hook(self._enter_pooler))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def runs(self, module: nn.Module) -> bool:
        """Whether `module` should just run now: it is inside of a hooked call already, or a graph is traced."""
        return tracing() or any(frame.module is module for frame in _frames.get())

    # ------------------------------------------------------------------ pre-hooks
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tracing():
            return None
        frames = self._open(module)
        outer = next((f for f in reversed(frames) if f.owner is self), None)
        frame = _Frame(module, self)
        _frames.set((*frames, frame))
        if outer is not None and outer.layout is not None:
            return None
        at_trunk = module is self.trunk
        signature = self._trunk_signature if at_trunk else self._top_signature
        arguments = arguments_of(signature, args, kwargs)
        if at_trunk:
            frame.blocked = None if outer is None else outer.blocked
        else:
            frame.blocked = scored_padding(arguments, shifted=self._shifted)
            keep = arguments.get("logits_to_keep", 0)
            if frame.blocked or not self.token_wise or not (keep is None or (isinstance(keep, int) and keep == 0)):
                return None
        layout = read_layout(arguments, self.config, pools=self.pools)
        if not isinstance(layout, Pass) and frame.blocked is not None:
            layout = frame.blocked
        if isinstance(layout, Pass):
            if at_trunk:
                self._count(layout)
            return None
        self.calls[UNPADDED] += 1
        packed = pack_call(
            module,
            arguments,
            layout,
            self._rule,
            self.config,
            cache=cache_keyword(signature),
            shifted_labels=self._shifted and not at_trunk,
        )
        frame.layout = layout
        return (), packed

    def _open(self, module: nn.Module) -> tuple[_Frame, ...]:
        """The open frames where a module is entered, without those that KeyboardInterrupt has left open.

        A model does not call itself, so that a frame of its own can only be such a one.
        """
        frames = _frames.get()
        if any(frame.owner is self and frame.module is module for frame in frames):
            return tuple(frame for frame in frames if frame.owner is not self)
        return frames

    def _count(self, passed: Pass) -> None:
        self.calls[passed.reason] += 1
        if not passed.costs:
            return
        if self.on_padded == "raise":
            raise PaddedCallError(
                f"{type(self.top).__name__}: this call cannot run without its padding: {passed.reason}. "
                "Change the call, or prepare the model with on_padded='run'"
            )
        if passed.reason not in self._said:
            self._said.add(passed.reason)
            logger.info("adaattn: %s runs with its padding: %s", type(self.top).__name__, passed.reason)

    # ------------------------------------------------------------------ hooks
    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        frames = () if tracing() else _frames.get()
        if not frames or frames[-1].module is not module:
            return None
        _frames.set(frames[:-1])
        return None if output is None else _padded(output, frames[-1])

    def _enter_pooler(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        frame = self._current()
        return None if frame is None else tuple(_padded(a, frame) for a in args)

    def _leave_encoder(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        frame = self._current()
        return None if frame is None else _padded(output, frame)

    def _current(self) -> _Frame | None:
        frames = () if tracing() else _frames.get()
        return frames[-1] if frames and frames[-1].owner is self else None


def _padded(value: Any, frame: _Frame) -> Any:
    layout = frame.layout
    if layout is None:
        return value
    if isinstance(value, Tensor) and layout.is_packed(value):
        # pad each tensor once: outputs that are the same object must stay the same object
        if id(value) not in frame.padded:
            frame.padded[id(value)] = (value, layout.pad(value))
        return frame.padded[id(value)][1]
    if isinstance(value, PackedPrefill) and value.layout is layout:
        return value.target
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _padded(value[name], frame)
    elif isinstance(value, (tuple, list)):
        return type(value)(_padded(v, frame) for v in value)
    return value
