"""Held-out and training sets drawn from seeded streams of generated items.

A *stream* is an endless, reproducible sequence of items for a seed. The *held-out set* is the beginning of the stream
of a reserved seed, without repetitions. A *training set* comes from the stream of any other seed and leaves out every
item of the held-out set. Two items are the same if their *identity* is equal, e.g. the text of a question.

Pitfall: an identity that is too narrow, such as a prompt that can be reworded, lets held-out items into training.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from sinklens.errors import TaskError, require
from sinklens.utils.arguments import Seed, read_as

Item = TypeVar("Item")


def distinct(items: Iterable[Item], identity: Callable[[Item], Hashable]) -> Iterator[Item]:
    """Yield `items` in order, without those whose identity occurred before."""
    seen = set()
    for item in items:
        if (key := identity(item)) not in seen:
            seen.add(key)
            yield item


def first_distinct(items: Iterable[Item], identity: Callable[[Item], Hashable], size: int) -> list[Item]:
    """The first `size` distinct items, in order."""
    return list(islice(distinct(items, identity), size))


def training_set(
    stream: Callable[[int], Iterator[Item]],
    identity: Callable[[Item], Hashable],
    held_out: Collection[Item],
    *,
    seed: int,
    held_out_seed: int,
    size: int,
) -> list[Item]:
    """The first `size` items of the stream of `seed` that are not in `held_out`; items may repeat.

    Raises:
        TaskError: `seed` is the held-out seed.
        SettingError: `seed` is not a seed.
    """
    seed = read_as(Seed, "seed", seed)
    require(seed != held_out_seed, f"seed {seed} is the held-out seed; train on any other seed.", TaskError)
    excluded = {identity(item) for item in held_out}
    return list(islice((item for item in stream(seed) if identity(item) not in excluded), size))
