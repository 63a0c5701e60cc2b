"""Argument checks: every message names the argument, the value and what was expected.

They run at trace time, on static values only; nothing here looks at traced data.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any

import jax
import numpy as np


def is_concrete(value: Any) -> bool:
    """Whether ``value`` is a plain number or array that can be inspected while tracing."""
    return not isinstance(value, jax.core.Tracer)


def check_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """Return ``value`` as an int, or raise when it is not one or lies below ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: must be >= {minimum}, got {value}")
    return int(value)


def check_real(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
) -> float:
    """Return ``value`` as a finite float within ``[minimum, maximum]`` (open if ``exclusive``)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a real number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be finite, got {value!r}")
    low = minimum is not None and (number <= minimum if exclusive else number < minimum)
    high = maximum is not None and (number >= maximum if exclusive else number > maximum)
    if low or high:
        left, right = ("(", ")") if exclusive else ("[", "]")
        interval = f"{left}{'-inf' if minimum is None else minimum}, " \
                   f"{'inf' if maximum is None else maximum}{right}"
        raise ValueError(f"{name}: must lie in {interval}, got {value!r}")
    return number


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Return ``value`` when it is one of ``allowed``."""
    if value not in allowed:
        options = ", ".join(repr(option) for option in allowed)
        raise ValueError(f"{name}: expected one of {options}, got {value!r}")
    return value


def check_finite(name: str, value: Any) -> None:
    """Raise when a concrete array holds a NaN or an infinity. Traced values pass."""
    if is_concrete(value) and not np.all(np.isfinite(np.asarray(value, np.float64))):
        raise ValueError(f"{name}: holds values that are not finite")


def check_shape(name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    """Raise unless ``value.shape`` equals ``shape``; ``None`` matches any length."""
    actual = tuple(np.shape(value))
    if len(actual) != len(shape) or any(
        want is not None and have != want for have, want in zip(actual, shape)
    ):
        want = "(" + ", ".join("*" if n is None else str(n) for n in shape) + ")"
        raise ValueError(f"{name}: expected shape {want}, got {actual}")


def check_leading_axis(name: str, tree: Any, size: int) -> None:
    """Raise unless every leaf of ``tree`` with an axis has a first axis of length ``size``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = np.shape(leaf)
        if not shape or shape[0] != size:
            where = name + jax.tree_util.keystr(path)
            raise ValueError(
                f"{where}: expected a leading axis of length {size} (the batch of x), "
                f"got shape {tuple(shape)}"
            )
