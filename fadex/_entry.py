"""Entry point of the ``fadex`` command; says what to install when the ``demo`` extra is missing."""

from __future__ import annotations

import importlib.util
import sys

# Modules that the command needs beyond the library, and what brings them.
_EXTRA = ("typer", "rich", "matplotlib", "sklearn")


def main() -> int:
    """Run the command line; 2 when its extra is missing."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fadex: the command line needs {', '.join(missing)}: pip install 'fadex-jax[demo]'",
            file=sys.stderr,
        )
        return 2
    from fadex.cli import app

    app()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
