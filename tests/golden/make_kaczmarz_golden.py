"""Golden iterates of the package kaczmarz-algorithms, against which ``kaczmarz`` is tested.

Run with numpy 2.4.6, scipy 1.17.1 and kaczmarz-algorithms 0.8.1
(``pip install kaczmarz-algorithms==0.8.1``)::

    python tests/golden/make_kaczmarz_golden.py

writes ``kaczmarz.npz`` beside this file: a consistent system ``A`` [40, 12], ``b``; the rows
``order`` [300] that the package was made to visit, drawn with probabilities proportional to the
squared row norms; and its iterates ``x`` [301, 12] from zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

STEPS = 300


def main() -> None:
    import kaczmarz

    rng = np.random.default_rng(0)
    A = rng.standard_normal((40, 12)) * 10 ** rng.uniform(-1, 1, (40, 1))
    b = A @ rng.standard_normal(12)
    norms = (A**2).sum(1)
    order = rng.choice(40, size=STEPS, p=norms / norms.sum())

    class Ordered(kaczmarz.Base):
        """The rows of ``order``, one after the other."""

        visited = 0

        def _select_row_index(self, xk):
            self.visited += 1
            return order[self.visited - 1]

    x = np.stack(list(Ordered.iterates(A, b, tol=None, maxiter=STEPS)))
    np.savez_compressed(Path(__file__).with_name("kaczmarz.npz"), A=A, b=b, order=order, x=x)


if __name__ == "__main__":
    main()
