"""Forward hooks that remove the padding of a model's inputs and restore it in its outputs.

They are registered on the model (so that token-wise heads run packed, too), on its base model (so that other heads see
padded hidden states) and on the pooler. Nothing of the model or of Transformers is replaced, but for a model whose
`forward` a library calls itself.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adaattn_hf.attention.tracing import tracing
from adaattn_hf.errors import logger

from ..models.cache_keyword import arguments_of, cache_keyword
from . import packing

UNPADDED = "unpadded"
# Suffixes of classes whose head treats every token alike; True if label t + 1 is scored at t.
_TOKEN_WISE = {"ForCausalLM": True, "LMHeadModel": True, "ForMaskedLM": False}
# Suffixes of classes whose head reads every token.
_EVERY_TOKEN = ("ForTokenClassification", "ForQuestionAnswering")


@dataclass
class _Frame:
    # a call of a hooked module that is under way, and the outputs that are padded already
    module: nn.Module
    owner: "Unpadding"
    layout: packing.PackedLayout | None = None
    blocked: str | None = None
    padded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def pad(self, value: Any) -> Any:
        layout = self.layout
        if layout is None:
            return value
        if isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == (1, layout.tokens):
            # pad each tensor once: outputs that are the same object must stay the same object
            if id(value) not in self.padded:
                self.padded[id(value)] = value, layout.pad(value)
            return self.padded[id(value)][1]
        if isinstance(value, packing.PackedPrefill) and value.layout is layout:
            return value.target
        if isinstance(value, dict):
            for name in list(value):
                value[name] = self.pad(value[name])
        elif isinstance(value, (tuple, list)):
            return type(value)(self.pad(v) for v in value)
        return value


_frames: ContextVar[tuple[_Frame, ...]] = ContextVar("adaattn_unpad_frames", default=())


class Unpadding:
    """The hooks of one model, whose base model is `trunk`; `calls` counts passes, those not packed by reason."""

    def __init__(self, top: nn.Module, trunk: nn.Module) -> None:
        """Registers nothing yet; `install` does."""
        self.top, self.trunk = top, trunk
        self.calls: Counter[str] = Counter()
        config: Any = trunk.config
        self.config = config
        self._signatures = inspect.signature(type(top).forward), inspect.signature(type(trunk).forward)
        self._numbering = packing.numbering_of(trunk, self.config)
        self.least = packing.LEAST_STATES // config.get_text_config().hidden_size
        self._handles: list[RemovableHandle] = []
        head, pooled = type(top).__name__, getattr(trunk, "pooler", None) is not None
        ending = next((end for end in _TOKEN_WISE if head.endswith(end)), None)
        self.takes_cache = cache_keyword(self._signatures[1]) is not None
        self.token_wise = ending is not None and top is not trunk and not pooled
        self._shifted = ending is not None and _TOKEN_WISE[ending]
        # a head that summarises says how; others of encoders read position 0, of decoders the last token
        summary = next((m.summary_type for m in top.modules() if hasattr(m, "summary_type")), "first")
        self.pools = "last" if packing.has_cache(self.config) else "first"
        if top is trunk or head.endswith((*_TOKEN_WISE, *_EVERY_TOKEN)):
            self.pools = ""
        if self.pools == "first" and summary != "first":
            self.pools = "all"
        elif pooled:
            self.pools = "first"

    def install(self) -> None:
        """Registers the hooks: `enter` before a module runs, `leave` behind it."""
        before, behind = [self.top, self.trunk], [self.top, self.trunk]
        pooler = getattr(self.trunk, "pooler", None)
        if isinstance(pooler, nn.Linear):
            # the model slices the first token off before it calls this pooler
            behind.append(self.trunk.get_submodule("encoder"))
        elif isinstance(pooler, nn.Module):
            before.append(pooler)
        for module in dict.fromkeys(before):
            self._handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
        for module in dict.fromkeys(behind):
            self._handles.append(module.register_forward_hook(self.leave, always_call=True))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hands the packed call to a model, and its padded form to a pooler; None leaves the call as it is."""
        frames = () if tracing() else _frames.get()
        if module is not self.top and module is not self.trunk:
            inside = bool(frames) and frames[-1].owner is self
            return (tuple(frames[-1].pad(a) for a in args), kwargs) if inside else None
        if tracing():
            return None
        if any(frame.owner is self and frame.module is module for frame in frames):
            # a model does not call itself: KeyboardInterrupt, for which torch calls no hooks, left these open
            frames = tuple(frame for frame in frames if frame.owner is not self)
        outer = next((frame for frame in reversed(frames) if frame.owner is self), None)
        frame = _Frame(module, self)
        _frames.set((*frames, frame))
        if outer is None or outer.layout is None:
            return self._packed(frame, None if outer is None else outer.blocked, args, kwargs)
        return None

    def _packed(self, frame: _Frame, blocked: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at_trunk = frame.module is self.trunk
        signature = self._signatures[at_trunk]
        arguments = arguments_of(signature, args, kwargs)
        if not at_trunk:
            blocked = packing.scored_padding(arguments, shifted=self._shifted)
            keep = arguments.get("logits_to_keep")
            whole = keep is None or (isinstance(keep, int) and keep == 0)
            frame.blocked = blocked
            if blocked or not self.token_wise or not whole:
                return None
        found = packing.read_layout(arguments, self.config, self.pools, self.least)
        layout = found if isinstance(found, str) else blocked or found
        if isinstance(layout, str):
            if not at_trunk:
                return None
            self.calls[layout] += 1
            if layout not in packing.FREE and self.calls[layout] == 1:
                logger.info("adaattn: %s runs with its padding: %s", type(self.top).__name__, layout)
            return None
        self.calls[UNPADDED] += 1
        frame.layout = layout
        shifted, cache = self._shifted and not at_trunk, cache_keyword(signature)
        return (), packing.pack_call(
            frame.module, arguments, layout, self._numbering, self.config, cache=cache, shifted_labels=shifted
        )

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Pads what a module returns; None where it failed, or leaves it as it is."""
        frames = () if tracing() else _frames.get()
        inside = module is not self.top and module is not self.trunk  # the encoder, in the call of its model
        if not frames or not (frames[-1].owner is self if inside else frames[-1].module is module):
            return None
        if not inside:
            _frames.set(frames[:-1])
        return None if output is None else frames[-1].pad(output)


class DirectForward:
    """Makes hooks run where a library calls `model.forward(...)` instead of `model(...)`, which torch runs none for.

    Replaces the `forward` of one model, not of its class: it calls the model, hooks included, and inside of that call
    the model's own forward.
    """

    def __init__(self, module: nn.Module) -> None:
        """Replaces `module.forward` at once; `remove` undoes it."""
        self.module, self.inner = module, module.forward
        functools.update_wrapper(self, self.inner)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _frames.get()
        if tracing() or any(frame.module is self.module for frame in before):
            return self.inner(*args, **kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            _frames.set(before)

    def remove(self) -> None:
        """Gives the model back the `forward` that it had before."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if getattr(self.inner, "__func__", None) is not type(self.module).forward:
                self.module.__dict__["forward"] = self.inner


def called_directly(holder: nn.Module) -> Iterator[nn.Module]:
    """Modules inside `holder` whose parent calls their `forward` directly, as those of sentence-transformers do."""
    for module in holder.modules():
        if type(module).__module__.startswith("sentence_transformers."):
            yield from module.children()
