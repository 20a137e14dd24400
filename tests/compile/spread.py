"""Which checks a gate puts to which chip."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any


def spread(
    checks: Callable[[Any], Iterator[Any]], chips: Mapping[str, Any], named: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """(chip's name, check), chip by chip: every check for the named chips.

    If none is named, every check for one chip, in turn, and for all chips those that have `everywhere`. Between the
    chips little differs but sizes, and every check for every chip takes five times as long.
    """
    if named:
        yield from ((name, check) for name in named for check in checks(chips[name]))
        return
    for place, name in enumerate(chips):
        turns = cycle(range(len(chips)))
        for check in checks(chips[name]):
            if check.everywhere or next(turns) == place:
                yield name, check
