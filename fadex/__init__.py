"""FADEx: research methods for JAX, from diffusion feature caching to solvers.

Each field of methods is a subpackage with its own ``__all__``; take them by name:

>>> from fadex import caching, optim, quant, solvers

``import fadex`` alone imports neither JAX nor any of them; they load when first touched.
"""

import importlib
from typing import Any

from fadex._version import __version__

__all__ = [
    "__version__",
    "accel",
    "audit",
    "caching",
    "core",
    "data",
    "distill",
    "lm",
    "models",
    "optim",
    "quant",
    "sampling",
    "solvers",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
