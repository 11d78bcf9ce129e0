"""The inputs of a calibration: the model, and the text for measuring risks, comparing plans and verifying them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from . import corpus, needles, team, texts
from .arms import ModelArms, Progress, silent
from .corpus import TokenSequence
from .pace import Pace
from .scoring import NEXT_TOKEN, Reading, Scoring
from .settings import CalibrationSettings
from .subject import Subject


class OutOfTime(Exception):
    """The minutes that were allowed are over."""


@dataclass(frozen=True)
class LengthSample:
    """Disjoint sequences of one length: to measure risks, to compare whole plans in the search, and for verification.

    Each plan is verified on held-out sequences that no earlier plan has seen; there are as many as the text holds and
    the settings can use. `fingerprint` is a hash of the text that they were drawn from.
    """

    risk: tuple[TokenSequence, ...]
    joint: tuple[TokenSequence, ...]
    held_out: tuple[TokenSequence, ...]
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model in evaluation mode, ready for calibration, and its text.

    Attributes:
        samples: Text by length.
        other_source: Whether the held-out text comes from another source.
        team: The processes that share the work.
        opened: When the calibration began, by `time.monotonic`.
        expect: Told of the seconds that stages will take.
        pace: What steps take, None where nobody asked.
        states: By length and place, what exact attention makes of the readings of a sequence that plans are compared
            on, in the host's memory: the searches for several budgets share it.
        haystacks: Likewise a haystack of the sequence, and which needles exact attention finds.
    """

    subject: Subject
    arms: ModelArms
    settings: CalibrationSettings
    scoring: Scoring
    samples: Mapping[int, LengthSample]
    progress: Progress = silent
    say: Callable[..., None] = silent
    other_source: bool = False
    team: team.Team = field(default_factory=team.present)
    opened: float = field(default_factory=time.monotonic)
    expect: Callable[[Mapping[str, float]], None] = silent
    pace: Pace | None = None
    states: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    haystacks: dict[tuple[int, int], tuple[needles.Haystack, tuple[bool, ...]]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the time limit, by the clock of the first process: all processes ask together."""
        minutes = self.settings.minutes
        return math.inf if minutes is None else self.team.tell(self.opened + 60.0 * minutes - time.monotonic())

    def refuse_late(self, together: bool = True) -> None:
        """Ends what is under way if the time is over; a team does so only where its processes come `together`."""
        if (together or self.team.size == 1) and self.left <= 0.0:
            raise OutOfTime(f"{self.settings.minutes:g} minutes are over")

    @property
    def fingerprint(self) -> str:
        """Hash of all text that was drawn from."""
        words = "".join(f"{length}:{sample.fingerprint}" for length, sample in sorted(self.samples.items()))
        return hashlib.sha256(words.encode()).hexdigest()

    @property
    def sources(self) -> int:
        """Held-out sources that must keep the budget by themselves; their sequences take turns."""
        held_out = next(iter(self.samples.values())).held_out
        return len({one.source for one in held_out}) if self.other_source else 1

    def readings(self, sequence: TokenSequence) -> list[Reading]:
        """Returns the passes over a sequence."""
        return self.scoring.readings(sequence.tokens, self.settings.seed, self.arms.device)

    def haystack(self, sequence: TokenSequence, generator: torch.Generator) -> needles.Haystack:
        """Returns a sequence with needles, as many as the settings ask for and it can hold."""
        text = torch.tensor(sequence.tokens, dtype=torch.int64, device="cpu")
        return needles.build(text, min(self.settings.needles, needles.most(len(text))), generator)

    def with_settings(self, settings: CalibrationSettings) -> Inputs:
        """Returns the same model and text with settings, such as another budget, under which the same risks hold."""
        settings = replace(settings, windows=self.scoring.windows(settings.windows))
        if settings.measured() != self.settings.measured():
            raise ValueError(
                f"settings: got {settings.measured()}, expected those that the measurement was made with, "
                f"{self.settings.measured()}; measure again"
            )
        return replace(self, settings=settings)


def open_inputs(
    subject: Subject,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    scoring: Scoring = NEXT_TOKEN,
    progress: Progress = silent,
    say: Callable[..., None] = silent,
) -> Inputs:
    """Prepares a model for calibration and samples its text; the arguments are those of `calibrate.measured`.

    A model that cannot carry a plan is refused, and text that is too short or named twice.
    """
    settings = replace(settings, windows=scoring.windows(settings.windows))
    model = subject.model
    model.eval()
    refuse_longer(settings.lengths, subject.positions, type(model).__name__)
    arms = ModelArms(model)
    texts.refuse_repeats(data, verify_data)
    sample = _draw(data, verify_data, encode, scoring.content(settings.lengths[-1]), settings)
    parts = sample.parts
    corpus.refuse_copies((*parts["risk"], *parts["joint"]), parts["held_out"])
    # the same stretches at every length: text that one length is verified on was not used for another
    samples = {length: _cut(sample, scoring.content(length)) for length in settings.lengths}
    return Inputs(subject, arms, settings, scoring, samples, progress, say, verify_data is not None)


def refuse_longer(lengths: Sequence[int], positions: int | None, name: str) -> None:
    """Refuses lengths beyond the model's positions: a budget would be verified on text that it cannot read."""
    if positions is not None and lengths[-1] > positions:
        raise ValueError(
            f"lengths is {list(lengths)}, expected at most the {positions} tokens that {name} has positions for "
            f"(max_position_embeddings, rotary scaling included); give shorter lengths, such as --lengths {positions}, "
            "or a model whose rope_parameters reach further"
        )


def _cut(sample: corpus.Sample, length: int) -> LengthSample:
    risk, joint, held_out = (
        tuple(replace(one, tokens=one.tokens[:length]) for one in sample.parts[use])
        for use in ("risk", "joint", "held_out")
    )
    return LengthSample(risk, joint, held_out, sample.fingerprint)


def _draw(
    data: Sequence[str | Path],
    verify_data: Sequence[str | Path] | None,
    encode: Callable[[str], Sequence[int]],
    length: int,
    s: CalibrationSettings,
) -> corpus.Sample:
    """Samples the text of the longest length; `length` counts tokens of text, without special tokens."""
    own, held = {"risk": s.sequences, "joint": s.joint}, {"held_out": s.held_out}
    spare = s.most_held_out * (s.tries + s.bolder) - s.held_out
    if verify_data is None:
        sample = corpus.draw(data, encode, length, {**own, **held}, s.seed, spare)
        return corpus.Sample(sample.parts, f"{sample.fingerprint}:")
    if s.held_out < 2 * len(verify_data):
        raise ValueError(
            f"held_out is {s.held_out} for {len(verify_data)} sources of verify_data, expected at least "
            f"{2 * len(verify_data)}: two of every source at the first look; raise it (--held-out)"
        )
    first = corpus.draw(data, encode, length, own, s.seed)
    second = corpus.draw(verify_data, encode, length, held, s.seed, spare)
    parts = {**first.parts, "held_out": _each(second.parts["held_out"], verify_data, length)}
    return corpus.Sample(parts, f"{first.fingerprint}:{second.fingerprint}")


def _each(held_out: list[TokenSequence], paths: Sequence[str | Path], length: int) -> list[TokenSequence]:
    """Returns equally many held-out sequences of every source, at least two: each source is verified by its own."""
    counts = {str(path): 0 for path in paths}
    for sequence in held_out:
        counts[sequence.source] += 1
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < 2:
        raise ValueError(
            f"verify_data: {fewest} holds {counts[fewest]} sequences of {length} tokens, expected at least 2 of every "
            "source: each must keep the budget; give more of its text, shorter lengths, or leave it out"
        )
    return held_out[: counts[fewest] * len(counts)]
