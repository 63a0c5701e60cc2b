"""Recipes: which leaf of a parameter tree is stored in which format.

A recipe is an ordered list of ``(pattern, format)``; the first pattern that matches a leaf's path
decides. Paths are those of :mod:`fadex.core.pytree`: ``layers/0/attn/qkv/kernel``, without the
``value`` step of ``nnx`` Variables.

A pattern is a glob (``*`` within one part of the path, ``**`` over any number of parts, and
``**/`` over none as well) or a compiled regular expression, which must match the whole path.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from fadex.quant.formats import Format
from fadex.quant.qarray import _called
from fadex.quant.site import Site

__all__ = ["Recipe", "Rule"]

CATCH_ALL = "**"


@functools.lru_cache(maxsize=1024)
def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob over ``/``-separated paths as a regular expression."""
    out, i = "", 0
    while i < len(glob):
        if glob.startswith("**/", i) and (i == 0 or glob[i - 1] == "/"):
            out, i = out + "(?:[^/]+/)*", i + 3
        elif glob.startswith("/**", i) and i + 3 == len(glob):
            out, i = out + "/.+", i + 3
        elif glob.startswith("**", i):
            out, i = out + ".*", i + 2
        elif glob[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif glob[i] == "?":
            out, i = out + "[^/]", i + 1
        elif glob[i] == "[" and "]" in glob[i + 2:]:
            end = glob.index("]", i + 2)
            inside = glob[i + 1:end]
            inside = "^" + inside[1:] if inside.startswith("!") else inside
            out, i = out + "(?!/)[" + inside.replace("\\", "\\\\") + "]", end + 1
        else:
            out, i = out + re.escape(glob[i]), i + 1
    try:
        return re.compile(out)
    except re.error as error:
        raise ValueError(f"recipe: pattern {glob!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a recipe.

    Attributes:
      pattern: glob or compiled regular expression.
      target: a :class:`~fadex.quant.Format`, a :class:`~fadex.quant.Site` (weights and
        activations), or ``None``: leave the leaf as it is.
      axis: block axis; ``None``: the last one for leaves called ``embedding`` (a table whose rows
        are looked up), else the contraction axis ``-2``.
    """

    pattern: str | re.Pattern[str]
    target: Format | Site | None
    axis: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, (str, re.Pattern)):
            raise TypeError(
                f"recipe: a pattern is a string or a compiled expression, got {self.pattern!r}"
            )
        if self.target is not None and not isinstance(self.target, (Format, Site)):
            raise ValueError(
                f"recipe: {self.pattern!r}: expected a Format such as nvfp4(), a Site or None, got "
                f"{self.target!r}{_called(self.target)}"
            )
        if self.axis is not None and not isinstance(self.axis, int):
            raise TypeError(f"recipe: {self.pattern!r}: axis must be an integer, got {self.axis!r}")

    @property
    def catch_all(self) -> bool:
        return self.pattern == CATCH_ALL

    def matches(self, path: str) -> bool:
        """Whether the whole of ``path`` matches."""
        pattern = self.pattern if isinstance(self.pattern, re.Pattern) else glob_pattern(
            self.pattern
        )
        # The last step of an nnx path may be its Variable's; a real key of that name matches too.
        paths = (path, path.removesuffix("/value"))
        return self.catch_all or any(pattern.fullmatch(p) is not None for p in paths)

    def axis_for(self, path: str) -> int:
        if self.axis is not None:
            return self.axis
        path = path.removesuffix("/value")
        return -1 if path.rsplit("/", 1)[-1] == "embedding" else -2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Ordered rules; hashable, so a recipe can be a static argument.

    Args:
      rules: ``(pattern, target)``, ``(pattern, target, axis)`` or :class:`Rule`; the first that
        matches a path decides. The pattern ``"**"`` matches everything that is left.
      strict: raise when a pattern matches no leaf, or none that could be quantized: a misspelt
        one as a rule (``"**"`` is exempt).

    Raises:
      ValueError, TypeError: an entry is not such a rule.

    Example:
      >>> from fadex.quant import Recipe, int_group, nvfp4
      >>> recipe = Recipe((("**/embedding", None), ("**/kernel", nvfp4()), ("**", None)))
      >>> recipe.match("layers/0/mlp/kernel").target.name
      'nvfp4'
      >>> recipe.match("embedding").target is None
      True
    """

    rules: tuple[Rule, ...]
    strict: bool = True

    def __init__(self, rules: Iterable[Any], strict: bool = True):
        if isinstance(rules, (str, Format, Site)):
            raise TypeError(f"rules: expected a sequence of (pattern, format), got {rules!r}")
        made = []
        for entry in rules:
            if isinstance(entry, Rule):
                made.append(entry)
            elif isinstance(entry, tuple) and len(entry) in (2, 3):
                made.append(Rule(*entry))
            else:
                raise TypeError(f"recipe: expected (pattern, format) or a Rule, got {entry!r}")
        object.__setattr__(self, "rules", tuple(made))
        object.__setattr__(self, "strict", bool(strict))

    def match(self, path: str) -> Rule | None:
        """The first rule that matches ``path``, or ``None``."""
        return next((rule for rule in self.rules if rule.matches(path)), None)

    def resolve(self, paths: Iterable[str]) -> dict[str, Rule]:
        """The deciding rule of each path that has one.

        Raises:
          ValueError: with ``strict``, a pattern that matches no path; it lists the paths.
        """
        paths = list(paths)
        found = {path: rule for path in paths if (rule := self.match(path)) is not None}
        if self.strict:
            for rule in self.rules:
                if rule.catch_all or any(rule.matches(path) for path in paths):
                    continue
                pattern = getattr(rule.pattern, "pattern", rule.pattern)
                shown = ", ".join(paths[:20]) + (", ..." if len(paths) > 20 else "")
                raise ValueError(
                    f"recipe: pattern {pattern!r} matches no path; patterns are globs over the "
                    f"whole path, such as '**/kernel', and the paths are {shown or '(no leaves)'} "
                    "(strict=False lets it pass)"
                )
        return found


def as_recipe(recipe: Any) -> Recipe:
    """A :class:`Recipe` as it is; a format or site alone for every leaf; a list of rules."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (Format, Site)):
        return Recipe(((CATCH_ALL, recipe),))
    if isinstance(recipe, (tuple, list)):
        return Recipe(recipe)
    raise TypeError(
        f"recipe: expected a Recipe, a Format, a Site or a list of rules such as "
        f"[('**/kernel', nvfp4())], got {recipe!r}{_called(recipe)}"
    )
