"""The fast path for layers under a plan: what the first layer of a pass found out holds for those that follow."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.request import AttentionRequest, CallSpec
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.base import Backend, FastCall, facts_of, spec_of
from adaattn_hf.backends.select import serving
from adaattn_hf.config import raw_settings, settings_in
from adaattn_hf.plans import execute
from adaattn_hf.plans.choices import PRECISE_ROWS
from adaattn_hf.plans.fit import resolved
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.store import program_of

from .families import loses_borders
from .fast_path import ExactCall, Ready, undisturbed

_MOST = 1024
"""Most fast calls that are remembered; a layer whose weights are moved in every pass has a new one in each."""


class PlannedCall:
    """Attention by the plan of whichever layer calls; all calls share structure, shapes, dtypes and settings.

    Whoever keeps one compares all these. The layers' rules differ: the backend is remembered for each kind of rules,
    its fast call for each layer.
    """

    def __init__(self, raw: Any, forced: str | None) -> None:
        """From what lies in the model's configuration and the backend that its user named."""
        self._raw, self._settings, self._forced = raw, dict(raw), forced
        self._backends: dict[tuple[bool, bool, str], tuple[Backend | None, CallSpec]] = {}
        self._exact: ExactCall | None = None
        # by the handle of a layer's program, whose tensors are not to live as long as the structure that keeps this
        self._fast: dict[int, FastCall | None] = {}

    def attend(
        self,
        module: nn.Module,
        structure: CallStructure,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor | None:
        """Returns the output `[batch, q_len, heads, head_dim_v]`, or None if the settings have changed since.

        Raises:
            PlanError: The plan does not belong to the module.
        """
        if self._raw != self._settings:  # a value was set in place
            return None
        known = None if module.training else resolved(module.__dict__, self._raw)
        program = program_of(module) if known is None else known.program
        if program is None or program.is_exact_for(structure.q_len):
            if self._exact is None:
                request = AttentionRequest(query, key, value, structure.settled(), scaling)
                self._exact = ExactCall.of(request, self._forced)
            return self._exact.attend(module, structure, query, key, value, scaling)
        fast = self._fast.get(program.handle)
        if fast is not None:
            return fast(query, key, value, scaling)
        structure = structure.settled()
        rules = _rules_of_all_heads(program, structure, key)
        if rules is not None:
            request = AttentionRequest(query, key, value, structure, scaling, per_head=rules)
            backend, spec = self._backend_for(rules, request)
            if backend is not None:
                if program.handle not in self._fast:
                    if len(self._fast) >= _MOST:
                        self._fast.clear()
                    fast = self._fast[program.handle] = backend.fast_call(spec, request)
                return backend.attend(request).out if fast is None else fast(query, key, value, scaling)
        request = AttentionRequest(query, key, value, structure, scaling)
        return execute.attend(program, request, self._forced).out

    def _backend_for(self, rules: HeadRules, request: AttentionRequest) -> tuple[Backend | None, CallSpec]:
        """Returns the backend that computes heads with rules of this kind in one request, if any, and its spec."""
        # sinks, too: chunks, and documents with padding, need not hold the key that they count from
        kind = rules.windowed, rules.has_sinks, rules.precision
        if kind not in self._backends:
            spec = spec_of(request, self._forced)
            self._backends[kind] = serving(spec, self._forced), spec
        return self._backends[kind]


def _rules_of_all_heads(program: Program, structure: CallStructure, key: Tensor) -> HeadRules | None:
    """Returns the rules of a layer if they say all that its plan does in this call, else None."""
    asked = program.requests(structure.q_len < PRECISE_ROWS)
    whole = not asked.apart and len(asked.heads) == len(program.plan.choices) == key.shape[1]
    within = whole and execute.rows_within(structure, program.max_length, key.device) is True
    return asked.rules if within else None


def keep(
    request: AttentionRequest,
    forced: str | None,
    backend: str | None,
    module: nn.Module,
    config: Any,
    kwargs: dict[str, Any],
    structure: CallStructure,
) -> None:
    """Lets the other layers with a structure go by a `PlannedCall`, where only their tensors can change the call."""
    settings = settings_in(config)
    facts = facts_of(backend, request.query, request.key, request.value, request.stored is not None)
    ordinary = request.stored is None and request.structure.mask is None and not facts[-1]
    if not ordinary or settings.monitor or settings.shadow or loses_borders(config):
        return
    if undisturbed(module, kwargs) and request.structure is structure.settled():
        fields = object.__getattribute__(config, "__dict__")
        raw = raw_settings(config)
        structure.ready = Ready(config, fields, facts, raw, PlannedCall(raw, forced).attend, bare=False)
