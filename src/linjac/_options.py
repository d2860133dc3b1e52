"""Options of the public functions: checked at the call, in our own words, before any work.

This module must not know programs.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from linjac._errors import compose
from linjac._tree import short


def _integer(value: object) -> int | None:
    """The value as an int where it is a true integer (numpy's too), else None."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool | np.bool_)


def check_count(who: str, name: str, value: object, default: str) -> int | None:
    """A positive integer, or None for the default."""
    if value is None:
        return None
    count = _integer(value)
    if count is None:
        shown = value if isinstance(value, int | float | np.number) else type(value).__name__
        raise TypeError(compose(who, f"{name} must be a positive int or None ({default}), got {shown}"))
    if count < 1:
        raise ValueError(compose(who, f"{name} must be a positive int or None ({default}), got {count}"))
    return count


def check_number(who: str, name: str, value: Any, *, positive: bool = False, more: str = "") -> float:
    """A finite number that is not negative, or positive; `more` is what else the option may be."""
    what = f"{name} must be a {'positive' if positive else 'non-negative'} finite number{more}"
    if not is_number(value):
        raise TypeError(compose(who, f"{what}, got {type(value).__name__}"))
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(compose(who, f"{what}, got {number if math.isinf(number) else value}"))
    return number


def check_chunk_size(who: str, value: object) -> int | None:
    """Directions per sweep."""
    return check_count(who, "chunk_size", value, "chosen from memory_budget")


def check_memory_budget(who: str, value: object) -> int | None:
    """Bytes of scratch for sweeps."""
    return check_count(who, "memory_budget", value, "16 MiB")


def check_flag(who: str, name: str, value: object) -> bool:
    """A true bool; anything else is a misplaced argument."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(compose(who, f"{name} must be True or False, got {type(value).__name__}"))
    return bool(value)


def check_choice(who: str, name: str, value: object, choices: Iterable[str], other: str = "") -> str:
    """One of the given words."""
    choices = tuple(choices)
    allowed = ", ".join(repr(choice) for choice in choices) + (f" {other}" if other else "")
    if not isinstance(value, str):
        raise TypeError(compose(who, f"{name} must be one of {allowed}, got {type(value).__name__}"))
    if value not in choices:
        raise ValueError(compose(who, f"{name} must be one of {allowed}, got {value!r}"))
    return value


def check_callable(who: str, fun: object) -> None:
    """`fun` can be called."""
    if not callable(fun):
        raise TypeError(
            compose(who, f"fun must be callable, got {short(fun) if hasattr(fun, 'dtype') else type(fun).__name__}")
        )


def settled_argnums(argnums: Any) -> Any:
    """An int as it is, and any other iterable (a set, a generator) as a tuple, read once."""
    return tuple(cast(Any, argnums)) if _integer(argnums) is None and isinstance(argnums, Iterable) else argnums


def check_argnums(who: str, argnums: Any, count: int) -> tuple[int, ...]:
    """Positions as non-negative ints: numpy integers count as ints, negative ones from the end."""
    if argnums is None:
        return tuple(range(count))
    if isinstance(argnums, int) and not isinstance(argnums, bool) and 0 <= argnums < count:
        return (argnums,)
    single = _integer(argnums)
    if single is None and not isinstance(argnums, Iterable):
        raise TypeError(compose(who, f"argnums must be an int or a sequence of ints, got {type(argnums).__name__}"))
    items: list[Any] = [argnums] if single is not None else list(cast(Any, argnums))
    positions: list[int] = []
    for item in items:
        position = _integer(item)
        if position is None:
            raise TypeError(compose(who, f"argnums must hold ints, got {type(item).__name__}"))
        if not -count <= position < count:
            arguments = f"{count} positional argument{'' if count == 1 else 's'}"
            raise ValueError(compose(who, f"argnums={position} is out of range for {arguments}"))
        positions.append(position % count)
    if not positions:
        raise ValueError(compose(who, "argnums names no position, so there is nothing to differentiate"))
    if len(set(positions)) < len(positions):
        raise ValueError(compose(who, f"argnums names a position twice: {tuple(positions)}"))
    return tuple(positions)
