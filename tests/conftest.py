"""Defaults of the whole suite, set before JAX is imported; what a person sets wins.

``XLA_FLAGS`` is not among them: tests that need several devices start a process of their own.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
