"""Pallas kernels of the low-bit formats, each beside a plain ``jnp`` reference.

The functions lie in modules of the same names: :mod:`~fadex.quant.kernels.w4a16` and
:mod:`~fadex.quant.kernels.fused_quantize`.
"""

from fadex.quant.kernels import fused_quantize, w4a16

__all__ = ["fused_quantize", "w4a16"]
