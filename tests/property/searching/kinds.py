"""What is searched: kinds of cases, how many of each, how they are drawn and who judges them."""

import collections
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis.errors import UnsatisfiedAssumption

from tests.support.kernels import kernel

from .drawing import Drawing


class Kind(NamedTuple):
    """One kind of cases."""

    share: float  # how many there are to each case that is asked for
    chunk: int  # how many run in one process, after which what was found is kept
    words: str  # for the page


KINDS = {
    "valid": Kind(0.9, 10_000, "valid calls, forward or with gradients, against double precision"),
    "plans": Kind(0.1, 10_000, "valid calls under random plans, as they are and as a traced graph holds them"),
    "malformed": Kind(0.7, 10_000, "malformed calls of the attention function"),
    "rules": Kind(0.2, 10_000, "malformed rules of the native kernels"),
    "stored": Kind(0.1, 10_000, "malformed tokens on their way into a cache"),
    "hub": Kind(0.05, 10_000, "the same valid calls of the Hub's kernel `adaattn`"),
    "hub malformed": Kind(0.05, 10_000, "malformed calls of that kernel"),
    "ways": Kind(
        0.1, 10_000, "calls by every door, traced, batched, in forward mode, with keywords that mean something"
    ),
    "again": Kind(0.05, 10_000, "calls that follow one like them, with tensors of another device or kind"),
    "changed": Kind(0.01, 500, "models that change in weights, buffers, settings, dtype after a plan was made"),
    "files": Kind(0.02, 1_000, "saved caches with flipped bits, cut short, with other metadata and a new checksum"),
    "models": Kind(
        0.09, 1_000, "tiny models of all families: positions, masks, rows, caches; against stock eager and sdpa"
    ),
    "graphs": Kind(0.01, 100, "the same, compiled, traced or exported, each graph called twice"),
    "kept": Kind(0.02, 1_000, "the same, of which `logits_to_keep` asks for some rows; shared keys, too"),
    "kept in graphs": Kind(0.002, 100, "the same in graphs"),
    "documents": Kind(0.02, 10_000, "documents that lengths tell behind a filled cache, by every door"),
    "blind": Kind(0.05, 10_000, "masks of every form, dtype and fill whose rows see nothing, by every door"),
    "beyond": Kind(0.02, 500, "plans past their lengths where layers slide: pieces, chunks, generation, batching"),
    "edited": Kind(0.02, 500, "plan files with another value in any field, by `load_plan` and `adaattn verify`"),
    "moved": Kind(0.01, 500, "models whose layers or settings of attention change behind the first call of a plan"),
    "crowds": Kind(0.005, 500, "calls by four threads at once, of more kinds than are remembered"),
    "families": Kind(0.002, 20, "families of the installed Transformers, by check, explain, prepare and generate"),
}
VERDICTS = ("served", "refused", "refused as by stock", "stock differs", "wrong", "crashed")


def searched(kind: str) -> tuple[Any, Callable[[Any], str]]:
    """The strategy and the judge of a kind; what they need is imported here, for a chunk needs one of them alone."""
    from tests.support import malformed, malformed_rules, planned, valid
    from tests.support.doors import HUB

    from . import again, beyond, changed, files, graphs, oracle, twins, ways, whole

    made: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "valid": (valid.calls(), valid.judge), "plans": (planned.planned(), planned.judge),
        "malformed": (malformed.malformed(), malformed.judge),
        "rules": (malformed_rules.native_calls(), malformed_rules.judge_native),
        "stored": (malformed_rules.stored_calls(), malformed_rules.judge_stored),
        "hub": (valid.calls((HUB,)), valid.judge), "hub malformed": (malformed.malformed((HUB,)), malformed.judge),
        "ways": (ways.ways(), ways.judge), "again": (again.repeated(), again.judge),
        "changed": (changed.changed(), changed.judge), "files": (files.saved(), files.judge),
        "models": (whole.wholes(), oracle.judge), "graphs": (graphs.graphed(), graphs.judge),
        "kept": (whole.wholes(keeps=True), oracle.judge), "kept in graphs": (graphs.graphed(keeps=True), graphs.judge),
        "documents": (ways.beside_a_cache(), ways.judge), "blind": (ways.blind(), ways.judge),
        "beyond": (beyond.beyond(), beyond.judge), "edited": (files.edited(), files.judge_edited),
        "moved": (changed.changed(changed.MOVES), changed.judge), "crowds": (again.crowds(), again.judge_crowd),
        "families": (twins.any_family(), twins.judge_family),
    }  # fmt: skip
    return made[kind]


def chunk(kind: str, seed: int, cases: int, library: Path | None = None) -> dict[str, Any]:
    """Runs a chunk in this process; returns the number of each verdict and what failed."""
    from transformers import logging

    from adaattn_hf.backends.native import library as native

    if library is not None:
        native._opened = native.load(library)
    if native.missing():
        raise SystemExit("; ".join(native.missing()))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kernel("adaattn")  # built before anything is judged: what its build raises is nobody's refusal
    strategy, judge = searched(kind)
    verdicts: collections.Counter[str] = collections.Counter()
    failed: list[str] = []
    draw = Drawing(f"{kind} {seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while verdicts.total() < cases:
            try:
                call = draw(strategy)
            except UnsatisfiedAssumption:
                continue
            try:
                verdicts[judge(call)] += 1
            except AssertionError as error:
                verdicts["wrong"] += 1
                failed.append(f"{call!r}: {error}"[:1000])
    return {"verdicts": dict(verdicts), "failed": failed[:5]}
