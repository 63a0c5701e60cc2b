r"""Four Over Six: NVFP4 whose blocks may map their largest magnitude to 4 instead of 6.

The e2m1 grid is coarse between 4 and 6. Mapping a block's largest magnitude to 4 leaves the value
6 unused and halves that gap; each block takes the better of

.. math:: s_6 = \mathrm{e4m3}\big(m / 6g\big), \qquad s_4 = \mathrm{e4m3}\big(m / 4g\big), \qquad
          g = \frac{\max |x|}{6 \cdot 256},

by its squared error (``rule='mse'``), absolute error (``'mae'``) or largest error (``'absmax'``);
a tie keeps 6. The tensor scale uses 256 in place of 448 so that :math:`s_4 \le 384` never
saturates. What is stored is plain NVFP4.

Source: Four Over Six (arXiv 2512.02010).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice
from fadex.quant.elements import round_e2m1
from fadex.quant.formats import Blocks, Format, block_sum, divide, hold, materialize, plain

__all__ = ["FourOverSix", "nvfp4_4o6"]

RULES = ("mse", "mae", "absmax")


@dataclasses.dataclass(frozen=True)
class FourOverSix(Format):
    """The format of :func:`nvfp4_4o6`."""

    rule: str = "mse"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)

    @property
    def scale_max(self) -> float:
        return 256.0

    def encode_blocks(
        self, x: jax.Array, tensor_scale: jax.Array | None, *, axis: int,
        importance: jax.Array | None = None, hold: Any = hold,
    ) -> Blocks:
        store = materialize if hold is not plain else lambda fn, *args: fn(*args)
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
        bad = ~(largest <= jnp.finfo(jnp.float32).max)
        largest = jnp.where(bad, 0.0, largest)

        def scales(largest: jax.Array, tensor_scale: jax.Array) -> Any:
            out = []
            for top in (6.0, 4.0):
                stored = self._encode_scale(divide(hold(largest), hold(top) * tensor_scale, hold))
                scale = self.scale_values(stored)
                out.append((stored, scale, hold(scale * tensor_scale)))
            return out

        def error(x: jax.Array, divisor: jax.Array, importance: Any) -> jax.Array:
            # In units of the block scale, so that squares neither overflow nor vanish.
            def misses(x: jax.Array, divisor: jax.Array, importance: Any) -> tuple[jax.Array]:
                a = jnp.abs(x / divisor)
                miss = jnp.abs(a - round_e2m1(a))
                miss = miss * miss if self.rule == "mse" else miss
                return (miss if importance is None else importance * miss,)

            return block_sum(
                misses, x, divisor, importance, axis=axis,
                reduce=jnp.maximum if self.rule == "absmax" else jnp.add,
                unroll=hold is not plain,
            )[0]

        candidates = store(scales, largest, tensor_scale)
        six, four = (
            store(error, x, divisor, importance)
            * (scale * scale if self.rule == "mse" else scale)
            for _, scale, divisor in candidates
        )
        stored, divisor = store(
            lambda better, candidates: tuple(
                jnp.where(better, b, a)
                for a, b in ((candidates[0][i], candidates[1][i]) for i in (0, 2))
            ),
            four < six, candidates,
        )
        codes = self.encode_values(divide(x, divisor, hold))
        return Blocks(codes, self.finish_scales(stored, bad))


def nvfp4_4o6(rule: str = "mse", *, block: int = 16) -> FourOverSix:
    """NVFP4 with the Four-Over-Six choice of block scales (see the module).

    Args:
      rule: ``'mse'``, ``'mae'`` or ``'absmax'``: the error by which a block chooses.
      block: values that share a scale.

    Example:
      >>> nvfp4_4o6().name, nvfp4_4o6().bits_per_weight()
      ('nvfp4_4o6', 4.5)
    """
    check_choice("rule", rule, RULES)
    name = "nvfp4_4o6" + ("" if rule == "mse" else f"_{rule}")
    name += "" if block == 16 else f"_g{block}"
    return FourOverSix(name, "e2m1", block, "e4m3fn", two_level=True, rule=rule)
