"""Defaults of the whole suite, set before JAX is imported; what a person sets wins.

``XLA_FLAGS`` is not among them: tests that need several devices start a process of their own.
"""

import contextlib
import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture
def compiles():
    """``with compiles() as count:`` then ``count()``: programs compiled inside the block."""
    from jax import monitoring  # after the defaults above

    @contextlib.contextmanager
    def watch():
        seen = []

        def listen(event, duration, **kwargs):
            del duration, kwargs
            if event.endswith("backend_compile_duration"):
                seen.append(event)

        monitoring.register_event_duration_secs_listener(listen)
        try:
            yield lambda: len(seen)
        finally:
            monitoring.unregister_event_duration_listener(listen)

    return watch
