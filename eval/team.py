"""Several processes share the work: process r of n takes items r, r + n, …; gathered in order, so n changes no result.

Results are gathered per item and added in the order of the items, so that the sums, and with them a plan, are
those of a single process bit for bit (with as many threads per process: torch's own sums depend on them). Objects
travel through the default process group, which must carry CPU data (gloo does).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """One process of several, by its rank."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and messages."""
        return self.rank == 0

    def device(self, named: str | None) -> str | None:
        """Returns the device of this process: that which is `named`, or of several processes on GPUs one for each."""
        each = self.size > 1 and named in (None, "cuda") and torch.cuda.is_available()
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if each else named

    def work(self, items: Sequence[S], do: Callable[[S], T]) -> Iterator[T]:
        """Yields the results for some items in their order, in every process; each works on every `size`-th.

        All come together once every `size` items, so that what is yielded can be kept.
        """
        for start in range(0, len(items), self.size):
            stop = min(start + self.size, len(items))
            results = [do(item) for item in items[start + self.rank : stop : self.size]]
            if self.size == 1:
                yield from results
                continue
            parts: list[Any] = [None] * self.size
            dist.all_gather_object(parts, results)
            yield from (parts[index % self.size][0] for index in range(start, stop))

    def broadcast(self, value: T) -> T:
        """Returns the first process's value in all processes."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def present() -> Team:
    """Returns the team of the default process group, or a team of one without a group."""
    if dist.is_available() and dist.is_initialized():
        return Team(dist.get_rank(), dist.get_world_size())
    return Team()


def join() -> Team:
    """Joins the processes of `accelerate launch` or `torchrun`, if any; returns the team."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")
    return present()


def leave() -> None:
    """Leaves the process group that `join` joined, if any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
