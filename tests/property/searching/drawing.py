"""Draws from strategies without hypothesis' engine, which costs more than most calls and repeats what it drew."""

import random
from typing import Any

from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies._internal.core import CompositeStrategy
from hypothesis.strategies._internal.lazy import unwrap_strategies
from hypothesis.strategies._internal.misc import BooleansStrategy
from hypothesis.strategies._internal.numbers import IntegersStrategy
from hypothesis.strategies._internal.strategies import SampledFromStrategy


class Drawing:
    """A source of values of any strategy."""

    def __init__(self, seed: str) -> None:
        """The same seed draws the same."""
        self.source = random.Random(seed)

    def __call__(self, strategy: Any, label: object = None) -> Any:
        """A value of the strategy; the few kinds that nearly all calls are made of have a way of their own."""
        strategy = unwrap_strategies(strategy)
        if isinstance(strategy, CompositeStrategy):
            return strategy.definition(self, *strategy.args, **strategy.kwargs)
        if isinstance(strategy, SampledFromStrategy):
            return self.source.choice(strategy.elements)
        if isinstance(strategy, IntegersStrategy):
            return self.source.randint(strategy.start, strategy.end)
        if isinstance(strategy, BooleansStrategy):
            return self.source.random() < 0.5
        return ConjectureData(random=self.source).draw(strategy)
