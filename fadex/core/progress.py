"""Progress bars for long work: on a terminal through ``rich``, silent everywhere else.

Only stderr is written, so a command's output can be piped while its bar is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def _wanted(enabled: bool | None) -> bool:
    if enabled is None:
        enabled = sys.stderr is not None and sys.stderr.isatty()
    if enabled:
        try:
            import rich.progress  # noqa: F401
        except ImportError:
            return False
    return enabled


@contextmanager
def progress_bar(
    total: int | None, description: str = "", *, enabled: bool | None = None
) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs; the block calls ``advance(n=1)`` as it goes.

    Args:
      total: number of steps, or ``None`` when it is not known.
      description: text to the left of the bar.
      enabled: ``None`` shows the bar when stderr is a terminal; ``True`` and ``False`` decide.
        Without ``rich`` nothing is shown.

    >>> with progress_bar(2, "train") as advance:
    ...     advance(); advance()
    """
    if not _wanted(enabled):
        yield lambda n=1: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), redirect_stdout=False) as bar:
        task = bar.add_task(description, total=total)
        yield lambda n=1: bar.advance(task, n)


def track(iterable: Iterable[Any], description: str = "", *,
          enabled: bool | None = None) -> Iterator[Any]:
    """Iterate over ``iterable`` under a bar; see ``progress_bar``."""
    total = len(iterable) if hasattr(iterable, "__len__") else None
    with progress_bar(total, description, enabled=enabled) as advance:
        for item in iterable:
            yield item
            advance(1)
