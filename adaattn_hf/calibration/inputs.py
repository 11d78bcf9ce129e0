"""The inputs of a calibration: the model, its text, and how long the steps take.

Text is for measuring risks, for comparing plans and for verifying them. Steps are timed on short sequences, and scaled
to the lengths.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaattn_hf.eval import needles, team, texts, windows
from adaattn_hf.eval.arms import ModelArms, compare, exact_tap
from adaattn_hf.eval.objectives import NEXT_TOKEN, Objective
from adaattn_hf.eval.progress import Progress, silent
from adaattn_hf.eval.windows import Encode, TokenSequence, TokenWindow
from adaattn_hf.patches.models.cache_keyword import cache_keyword
from adaattn_hf.patches.models.positions import longest_input
from adaattn_hf.patches.plans.attach import remove_plan
from adaattn_hf.patches.plans.layers import number_layers

from ..attention.listeners import Tap
from ..stats.paired import TokenScores, joined
from ..stats.stopwatch import in_turn
from .settings import CalibrationSettings
from .state import CalibrationState

LONGEST_WITHOUT_ESTIMATE = 256
"""Sequences of no more tokens soon tell by themselves how long a calibration takes."""
SHORTEST, PARTS, BRIEF_SECONDS = 128, 8, 1.0
"""Tokens of the first sequence that steps are timed on, at least, and as a part of the longest: it adds to the work.
Steps that take fewer seconds together are timed on longer ones, too: on short ones a GPU waits for the host."""
PLANS_TRIED, PLANS_JUDGED = 6, 6
"""Whole plans that are foretold on calibration text, and on held-out text: mostly all that there are, and a first one
that fails ends it early."""
LEAST_HELD_OUT = 6
"""Held-out sequences that a verification makes do with where the text is short."""
STATES = 1 << 30
"""Most bytes of what exact attention made of text, kept for the next plan that is compared with it."""

Pace = Mapping[str, Mapping[int, float]]
"""By step and length the seconds for one sequence: `pair`, exact attention and a plan compared; `risk`, the passes that
measure risks; `prices`, of all choices, for all sequences together."""


class OutOfTime(Exception):
    """The minutes that were allowed are over."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a calibration keeps, and whom it tells."""

    directory: Path | None = None  # where the state is saved after every sequence, until a plan is written
    resume: bool = False  # go on from the state saved there
    earlier: CalibrationState | None = None  # risks of an earlier run on the same weights and text, not measured again
    progress: Progress = silent
    say: Callable[[str], None] = silent  # a sentence that a user should know
    expect: Callable[[Mapping[str, float]], None] = silent  # the seconds that stages take, before they begin
    opened: float = field(default_factory=time.monotonic)  # from here on `settings.minutes` count


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model in evaluation mode, ready for calibration, and its text."""

    arms: ModelArms
    settings: CalibrationSettings
    scoring: Objective
    # by length, disjoint sequences: for the `risk` of choices, to try whole plans (`joint`), and to verify (`held_out`)
    samples: Mapping[int, Mapping[str, Sequence[TokenSequence]]]
    text: str = ""  # hash of the text that they were drawn from
    run: Run = field(default_factory=Run)
    other_source: bool = False  # whether the held-out text comes from another source
    team: team.Team = field(default_factory=team.present)
    pace: Pace | None = None  # None where nobody asked
    # by sequence and seed, what exact attention makes of its windows: all plans that are compared on it share that
    states: dict[tuple[TokenSequence, int | None], list[Tensor]] = field(default_factory=dict)
    # by the tokens of a haystack, which of its needles exact attention finds
    retrieved: dict[bytes, tuple[bool, ...]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the time limit, by the clock of the first process: all processes ask together."""
        minutes = self.settings.minutes
        return math.inf if minutes is None else self.team.broadcast(self.run.opened + 60.0 * minutes - time.monotonic())

    def refuse_late(self, together: bool = True, seconds: float = 0.0) -> None:
        """Ends what is under way if the time is over, or has no room for what takes so many seconds.

        A team does so only where its processes come `together`.
        """
        if (together or self.team.size == 1) and self.left <= seconds:
            over = "leave no room for more" if seconds else "are over"
            raise OutOfTime(f"{self.settings.minutes:g} minutes {over}")

    def keep(self, state: CalibrationState) -> None:
        """Saves what is measured, where there is a directory for it."""
        if self.run.directory is not None and self.team.is_main:
            state.save(self.run.directory)

    @property
    def fingerprint(self) -> str:
        """Hash of all text that was drawn from."""
        words = "".join(f"{length}:{self.text}" for length in sorted(self.samples))
        return hashlib.sha256(words.encode()).hexdigest()

    @property
    def sources(self) -> int:
        """Held-out sources that must keep the budget by themselves; their sequences take turns."""
        held_out = next(iter(self.samples.values()))["held_out"]
        return len({one.source for one in held_out}) if self.other_source else 1

    def windows(self, sequence: TokenSequence, seed: int | None = None) -> list[TokenWindow]:
        """Returns the passes over a sequence; by the settings' seed where no other is given."""
        return self.scoring.windows(sequence.tokens, self.settings.seed if seed is None else seed)

    def exact(self, sequence: TokenSequence, seed: int | None = None) -> list[tuple[TokenWindow, Tensor]]:
        """Returns the passes over a sequence, and what exact attention makes of each, kept up to `STATES` bytes."""
        passes, states = self.windows(sequence, seed), self.states.get((sequence, seed))
        if states is None:
            states = [self.arms.exact(one).cpu() for one in passes]
            if sum(one.nbytes for kept in (*self.states.values(), states) for one in kept) <= STATES:
                self.states[sequence, seed] = states
        return list(zip(passes, states, strict=True))

    def haystack(self, sequence: TokenSequence, generator: torch.Generator) -> needles.Haystack:
        """Returns a sequence with needles, as many as the settings ask for and it can hold."""
        text = torch.tensor(sequence.tokens, dtype=torch.int64, device="cpu")
        return needles.build(text, min(self.settings.needles, needles.most(len(text))), generator)

    def score(
        self,
        tap: Tap,
        sequences: Sequence[TokenSequence],
        haystacks: Sequence[needles.Haystack] = (),
        seed: int | None = None,
        step: Callable[[int], None] = silent,
    ) -> tuple[list[TokenScores], list[tuple[bool, bool]]]:
        """Returns the paired scores of sequences, and of each needle whether exact attention finds it, and the plan.

        Exact attention and the plan's `tap` read the same tokens; `seed` is that of masked positions, and `step` is
        told how many passes are done.
        """

        def scored(sequence: TokenSequence) -> TokenScores:
            self.refuse_late(together=False)
            return joined([compare(self.arms, window, tap, exact) for window, exact in self.exact(sequence, seed)])

        def found(haystack: needles.Haystack) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
            key = haystack.tokens.numpy().tobytes()
            if key not in self.retrieved:
                self.retrieved[key] = needles.retrieved(self.arms, haystack, exact_tap)
            return self.retrieved[key], needles.retrieved(self.arms, haystack, tap)

        scores, outcomes = list[TokenScores](), list[tuple[bool, bool]]()
        for score in self.team.work(sequences, scored):
            scores.append(score)
            step(len(scores))
        for number, both in enumerate(self.team.work(haystacks, found), len(scores) + 1):
            outcomes += zip(*both, strict=True)
            step(number)
        return scores, outcomes

    def with_settings(self, settings: CalibrationSettings) -> Inputs:
        """Returns the same model and text with settings, such as another budget, under which the same risks hold."""
        settings = replace(settings, windows=self.scoring.spans(settings.windows))
        if settings.measured() != self.settings.measured():
            raise ValueError(
                f"settings: got {settings.measured()}, expected those that the measurement was made with, "
                f"{self.settings.measured()}; measure again"
            )
        return replace(self, settings=settings)


def open_inputs(
    model: Any,
    encode: Encode,
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    scoring: Objective = NEXT_TOKEN,
    run: Run | None = None,
) -> Inputs:
    """Prepares a model for calibration and samples its text; a plan that it carries is removed.

    A model that cannot carry a plan is a ValueError, and text that is too short or named twice.

    Args:
        model: Loaded with `attn_implementation="adaattn"`, on the device and in the dtype it will run in.
        encode: Maps text to token ids, without special tokens.
        data: Files and directories of text.
        verify_data: Held-out text of another source; disjoint parts of `data` are used if absent.
        scoring: What the model is scored on: `MaskedTokens.of(tokenizer)` for a masked-language model.
        run: What is kept, and who is told.
    """
    implementation = model.config._attn_implementation
    if implementation != "adaattn":
        raise ValueError(
            f"attn_implementation is {implementation!r}, expected 'adaattn': "
            'load the model with from_pretrained(..., attn_implementation="adaattn")'
        )
    number_layers(model)
    # losses are relative to the exact model, and a plan for other weights, fine-tuned since, would be refused
    remove_plan(model)
    steps = scoring.generates and cache_keyword(signature(model.forward)) is not None
    if settings.aim != "prompt" and not steps:
        raise ValueError(
            f"aim is {settings.aim!r} for {type(model).__name__}, which has no decode step and keeps no cache, "
            "expected a causal model that takes one; leave --aim out, and prompts are what a plan is for"
        )
    settings = replace(settings, windows=scoring.spans(settings.windows))
    model.eval()
    refuse_longer(settings.lengths, longest_input(model), type(model).__name__)
    arms = ModelArms(model)
    texts.refuse_repeats(data, verify_data)
    parts, text = _draw(data, verify_data, encode, scoring.content(settings.lengths[-1]), settings)
    windows.refuse_copies((*parts["risk"], *parts["joint"]), parts["held_out"])
    # the same stretches at every length: text that one length is verified on was not used for another
    samples = {length: cut(parts, scoring.content(length)) for length in settings.lengths}
    return Inputs(arms, settings, scoring, samples, text, run or Run(), verify_data is not None)


def cut(parts: Mapping[str, Sequence[TokenSequence]], most: int) -> dict[str, list[TokenSequence]]:
    """Returns the same sequences with so many tokens at most."""
    return {use: [replace(one, tokens=one.tokens[:most]) for one in part] for use, part in parts.items()}


def refuse_longer(lengths: Sequence[int], positions: int | None, name: str) -> None:
    """Refuses lengths beyond the model's positions: a budget would be verified on text that it cannot read."""
    if positions is not None and lengths[-1] > positions:
        raise ValueError(
            f"lengths is {list(lengths)}, expected at most the {positions} tokens that {name} has positions for "
            f"(max_position_embeddings, rotary scaling included); give shorter lengths, such as --lengths {positions}, "
            "or a model whose rope_parameters reach further"
        )


def _draw(
    data: Sequence[str | Path],
    verify_data: Sequence[str | Path] | None,
    encode: Encode,
    length: int,
    s: CalibrationSettings,
) -> tuple[dict[str, list[TokenSequence]], str]:
    """Samples the text of the longest length; `length` counts tokens of text, without special tokens."""
    least = max(min(s.held_out, LEAST_HELD_OUT), 2 * len(verify_data or ()))
    searched, judged, spare = {"risk": s.sequences, "joint": s.joint}, {"held_out": least}, max(s.held_out - least, 0)
    if verify_data is None:
        parts, text = windows.draw(data, encode, length, {**searched, **judged}, s.seed, spare)
        return parts, f"{text}:"
    if s.held_out < 2 * len(verify_data):
        raise ValueError(
            f"held_out is {s.held_out} for {len(verify_data)} sources of verify_data, expected at least "
            f"{2 * len(verify_data)}: two of every source; raise it (--held-out)"
        )
    parts, text = windows.draw(data, encode, length, searched, s.seed)
    verifying, other = windows.draw(verify_data, encode, length, judged, s.seed, spare)
    held_out = each_source(verifying["held_out"], verify_data, length, "verify_data")
    return {**parts, "held_out": held_out}, f"{text}:{other}"


def each_source(
    held_out: Sequence[TokenSequence], paths: Sequence[str | Path], length: int, argument: str
) -> list[TokenSequence]:
    """Returns equally many held-out sequences of every source, at least two: each source is verified by its own."""
    counts = {str(path): 0 for path in paths}
    for sequence in held_out:
        counts[sequence.source] += 1
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < 2:
        raise ValueError(
            f"{argument}: {fewest} holds {counts[fewest]} sequences of {length} tokens, expected at least 2 of "
            "every source: each must keep the budget; give more of its text, shorter lengths, or leave it out"
        )
    return list(held_out[: counts[fewest] * len(counts)])


def stages(pace: Pace, s: CalibrationSettings, size: int) -> dict[str, float]:
    """Returns the seconds of each stage for so many processes; `plans` is all that follows for one budget."""
    pairs, risks, prices = (sum(pace[step].values()) for step in ("pair", "risk", "prices"))
    # exact attention reads the text once, and each candidate once
    searched = PLANS_TRIED * (s.joint + min(s.haystacks, s.joint)) / 2
    judged = s.held_out * (1 + PLANS_JUDGED) / 2 + s.haystacks * PLANS_JUDGED
    passes = ((s.rounds + 1) * s.prompts + 1) * bool(s.rounds)  # whole ones that are timed
    return {
        "moments": pairs / 2,  # the passes that find the layers
        "risk": risks * (s.sequences + 1) / size,  # the first one is asked for needles, too
        "prices": prices,
        "plans": ((searched + judged) / size + passes) * pairs,
    }


def seconds_at(
    lengths: Sequence[int], device: torch.device, steps: Callable[[int], Mapping[str, Callable[[], object]]]
) -> dict[str, dict[int, float]]:
    """Returns the seconds of each step by length; `steps` prepares them for so many tokens.

    Those of two short sequences take turns, twice: the first run compiles, finds memory, or waits for weights.
    """
    more = max(SHORTEST, lengths[-1] // PARTS)
    prepared = {more: steps(more)}
    while True:
        fewer, more = more, min(2 * more, lengths[-1])
        prepared = {fewer: prepared[fewer], more: steps(more)}
        calls = {(name, tokens): call for tokens, of in prepared.items() for name, call in of.items()}
        least = {key: min(one.wall for one in runs) for key, runs in in_turn(calls, device, 2).items()}
        longer = sum(seconds for (_, tokens), seconds in least.items() if tokens == more)
        if more == lengths[-1] or longer > BRIEF_SECONDS:
            break
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(name for name, _ in calls):
        short, long = least[name, fewer], least[name, more]
        square = (long / more - short / fewer) / (more - fewer)
        slope = max(long - short, 0.0) / (more - fewer)
        by_pairs = {length: length * (short / fewer + square * (length - fewer)) for length in lengths}
        by_tokens = {length: long + slope * (length - more) for length in lengths}
        found[name] = by_pairs if square > 0.0 else by_tokens
    return found
