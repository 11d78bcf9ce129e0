"""Folds a plan's score ranks into the query and key projections of models without rotary embeddings (GPT-2, BERT).

A score rank r keeps r columns of `query @ query_basis` and `key @ key_basis`. If queries and keys come straight from
linear projections, the bases can be multiplied into the weights: both are completed to square matrices with
`query_basis @ key_basis^T = 1`, so that all scores stay the same and the first r columns are those of the rank. At run
time the rank is then a view. Exact rows beyond the plan's length read all columns; other heads are unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.tap import tapping
from adaattn_hf.backends.select import attend
from adaattn_hf.plans.choices import rank_of
from adaattn_hf.plans.program import Program

from . import attach, fit
from .layers import attention_modules
from .weights import Weights

_PAIRS = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"))
_TOLERANCE = 1e-3
"""Largest change of a score by folding, relative to the largest score of the head."""


class FoldError(ValueError):
    """Ranks cannot be folded into the weights of this model; the message says why."""


@dataclass(frozen=True)
class _Slice:
    """Locates the rows of one projection: `weight` is `[out, in]`, or `[in, out]` if `transposed`."""

    module: nn.Module
    transposed: bool
    start: int

    def rows(self, head: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Views of the weight `[width, in]` and of the bias `[width]` of one head."""
        at = slice(self.start + head * width, self.start + (head + 1) * width)
        projection: Any = self.module
        weight, bias = projection.weight.detach(), projection.bias
        rows = weight[:, at].T if self.transposed else weight[at]
        return rows, None if bias is None else bias.detach()[at]


def complete(query_basis: Tensor, key_basis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns square bases in fp64 whose first columns are the given ones and whose product with each other is 1.

    Args:
        query_basis: `[head_dim, rank]`.
        key_basis: `[head_dim, rank]`, `query_basis^T @ key_basis` the identity.
    """
    query, key = query_basis.double().cpu(), key_basis.double().cpu()
    rank = query.shape[1]
    left, _, _ = torch.linalg.svd(query, full_matrices=True)
    whole = torch.cat([key, left[:, rank:]], dim=1)
    return torch.linalg.inv(whole).T.contiguous(), whole


class Folding:
    """The ranks of one model's plan, folded; `remove` puts the weights back as they were, bit for bit.

    Args:
        model: A model that carries a plan.

    Raises:
        FoldError: The plan has no rank, or queries and keys do not come straight from the projections. Nothing is
            changed then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._programs: list[tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]] = []
        plan = attach.plan_of(model)
        if plan is None:
            raise FoldError("the model carries no plan; make one with `adaattn calibrate`")
        ranked = [
            (module, program)
            for _, module in attention_modules(model, plan.model_type)
            if (program := attach.program_of(module)) is not None
            and any(rank_of(choice) for choice in program.plan.choices)
        ]
        if not ranked:
            raise FoldError("the plan takes no score rank, so there is nothing to fold")
        before = _scores(model, plan.model_type)
        try:
            for module, program in ranked:
                self._fold(module, program)
            self._compare(before, _scores(model, plan.model_type))
        except FoldError:
            self.remove()
            raise

    def remove(self) -> None:
        """Restores weights and programs."""
        for parameter, original in reversed(self._kept):
            parameter.data.copy_(original)
        for module, own, folded in self._programs:
            if module.__dict__.get(fit.PROGRAM_SLOT) is folded:
                module.__dict__[fit.PROGRAM_SLOT] = own
        self._kept, self._programs = [], []

    def _fold(self, module: nn.Module, program: Program) -> None:
        query, key = _projections(module)
        groups = _groups(module, len(program.plan.choices))
        for parameter in {
            id(p): p for one in (query, key) for p in one.module.parameters(recurse=False)
        }.values():
            self._kept.append((parameter, parameter.detach().clone()))
        for head, choice in enumerate(program.plan.choices):
            if not rank_of(choice):
                continue
            bases = complete(program.tensors.query_basis[head], program.tensors.key_basis[head])
            members = range(head * groups, (head + 1) * groups)
            for where, basis, heads in ((query, bases[0], members), (key, bases[1], (head,))):
                for one in heads:
                    for rows in where.rows(one, basis.shape[0]):
                        if rows is not None:
                            rows.copy_((basis.T.to(rows.device) @ rows.double()).to(rows.dtype))
        own = module.__dict__[fit.PROGRAM_SLOT]
        changed = replace(program, tensors=replace(program.tensors, folded=True))
        folded = own._replace(program=changed, weights=Weights.of(module))
        module.__dict__[fit.PROGRAM_SLOT] = folded
        self._programs.append((module, own, folded))

    def _compare(self, before: dict[int, Tensor], after: dict[int, Tensor]) -> None:
        for module, _, _ in self._programs:
            index = int(module.layer_idx)  # type: ignore[arg-type]
            error = float(
                (after[index] - before[index]).abs().max() / before[index].abs().max().clamp(min=1e-12)
            )
            if not error <= _TOLERANCE:
                raise FoldError(
                    f"layer {index}: folding changes the scores by {error:.1e} of the largest, expected at most "
                    f"{_TOLERANCE:.0e}: a rotary embedding or a norm stands between the projections and attention, "
                    "or the bases are too ill-conditioned for the model's dtype; leave the ranks unfolded"
                )


def _groups(module: nn.Module, kv_heads: int) -> int:
    """Query heads per key/value head."""
    config: Any = module.config
    return int(config.num_attention_heads) // kv_heads


def _projections(module: nn.Module) -> tuple[_Slice, _Slice]:
    """Returns the query and key projections of an attention module.

    Raises:
        FoldError: They are not found under the names that GPT-2, BERT and related models use.
    """
    fused = getattr(module, "c_attn", None)
    if isinstance(fused, nn.Module) and isinstance(getattr(module, "split_size", None), int):
        return _Slice(fused, True, 0), _Slice(fused, True, module.split_size)  # type: ignore[arg-type]
    for names in _PAIRS:
        found = [getattr(module, name, None) for name in names]
        if all(type(one) is nn.Linear for one in found):
            return _Slice(found[0], False, 0), _Slice(found[1], False, 0)  # type: ignore[arg-type]
    raise FoldError(
        f"{type(module).__name__} has no plain query and key projections where they are looked for "
        f"(c_attn, {', '.join('/'.join(names) for names in _PAIRS)}); leave the ranks unfolded"
    )


@torch.no_grad()
def _scores(model: nn.Module, model_type: str) -> dict[int, Tensor]:
    """Scores `[heads, n, n]` of every layer on a few tokens, in fp64."""
    modules = {id(module): index for index, module in attention_modules(model, model_type)}
    found: dict[int, Tensor] = {}

    def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
        if id(module) in modules:
            query, key = request.query[0].double(), request.key[0].double()
            found[modules[id(module)]] = query @ key.repeat_interleave(len(query) // len(key), dim=0).mT
        return attend(request).out

    training = model.training
    model.eval()
    try:
        with tapping(tap):
            model(input_ids=torch.arange(1, 17, device=next(model.parameters()).device)[None])
    finally:
        model.train(training)
    return found
