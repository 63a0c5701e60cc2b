"""The peers of ``benchmarks/formats.py``: what is installed of qwix, torchao, ml_dtypes, gfloat.

Every peer gets the same float32 matrix ``[K, N]`` and cuts the same axis into blocks; torchao,
which only cuts the last one, gets the transposed copy where blocks run along the first.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.quant import Format, mxfp4, mxfp8

VERSIONS = ("qwix", "torchao", "torch", "ml_dtypes", "gfloat", "jax", "numpy")


class Peer(NamedTuple):
    """One peer's version of a format.

    Attributes:
      name: for the table.
      prepare: the float32 NumPy matrix in the peer's own array type; not timed.
      encode: of what ``prepare`` returned; waits for its result.
      decode: of what ``encode`` returned; waits.
      codes: uint8 ``[K, N]``, numbered as ours, or ``None`` where they can't be compared.
      values: what ``decode`` returned as float64 ``[K, N]``.
      nbytes: of the buffers that ``encode`` returned.
      matched: our format (and tensor scale) whose rule for scales is the peer's.
      note: what is different.
    """

    name: str
    prepare: Callable[[np.ndarray], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    codes: Callable[[Any], np.ndarray]
    values: Callable[[Any], np.ndarray]
    nbytes: Callable[[Any], int]
    matched: tuple[Format, Any]
    note: str


def versions() -> dict[str, str | None]:
    found = {}
    for package in VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def missing(package: str) -> str | None:
    """Why a peer can't run here, or ``None``."""
    try:
        if package == "torchao":
            os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
            # Refusals are recorded in the rows; their traces are not wanted between these.
            for module in ("torch._inductor.scheduler", "torch.utils._pytree"):
                logging.getLogger(module).setLevel(logging.CRITICAL + 1)
            import torchao.prototype.mx_formats  # noqa: F401
        else:
            __import__(package)
    except Exception as error:  # whatever a foreign package raises on import
        return f"{package}: {type(error).__name__}"
    return None


# --- qwix

# Our name -> (qwix's type, rule of its scales where it is not ours).
_QWIX = {
    "nvfp4": ("nvfp4", "block scales in float32, no tensor scale"),
    "mxfp4": ("mxfp4", "scale rule 'ceil'"),
    "mxfp8_e4m3fn": ("mxfp8", "scale rule 'ceil'"),
    "nf4_g64": ("nf4", ""),
    "nf4_g32": ("nf4", ""),
    "int4_g32": ("int4", "scale m / 7.5"),
    "int8_channel": ("int8", "scale m / 127.5"),
    "fp8_e4m3fn_channel": ("float8_e4m3fn", ""),
}


def qwix_peer(fmt: Format, axis: int) -> Peer | None:
    """qwix, compiled; blocks along ``axis`` and a scale for each index of the other."""
    if fmt.name not in _QWIX or missing("qwix"):
        return None
    import qwix

    qtype, note = _QWIX[fmt.name]
    if qtype in ("int4", "int8", "float8_e4m3fn"):
        qtype = jnp.dtype(qtype)
    other = (1 + axis) % 2
    tiles = {axis % 2: fmt.block} if isinstance(fmt.block, int) else {}

    @jax.jit
    def encode(x):
        return qwix.quantize(x, qtype, channelwise_axes=(other,), tiled_axes=tiles)

    decode = jax.jit(qwix.dequantize)

    def codes(q):
        raw = np.asarray(q.qvalue)
        if raw.dtype.name.startswith(("int", "uint")):
            return raw.astype(np.int8).view(np.uint8) & ((1 << fmt.bits) - 1)
        return raw.view(np.uint8)

    matched = {
        "nvfp4": (fmt, 1.0), "mxfp4": (mxfp4(scale_rule="ceil"), None),
        "mxfp8_e4m3fn": (mxfp8(scale_rule="ceil"), None),
    }  # fmt: skip
    return Peer(
        "qwix", jnp.asarray, lambda x: jax.block_until_ready(encode(x)),
        lambda q: jax.block_until_ready(decode(q)), codes,
        lambda y: np.asarray(y, np.float64),
        lambda q: sum(leaf.nbytes for leaf in jax.tree.leaves(q)),
        matched.get(fmt.name, (fmt, None)), note,
    )  # fmt: skip


# --- torchao


def torchao_peers(fmt: Format, axis: int, with_compiled: bool) -> list[Peer]:
    """torchao, eager and compiled (which takes a while)."""
    if fmt.name not in ("nvfp4", "mxfp4", "mxfp8_e4m3fn") or missing("torchao"):
        return []
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    if fmt.name == "nvfp4":
        note = "multiplies by the reciprocal scale"

        def encode(x):
            g = x.abs().max() / (6 * 448)
            return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g)
    else:
        note = ""
        element = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8_e4m3fn": torch.float8_e4m3fn}[fmt.name]

        def encode(x):
            return MXTensor.to_mx(x, element, 32)

    def decode(q):
        return q.dequantize(torch.float32)

    def prepare(x):
        return torch.from_numpy(np.ascontiguousarray(x.T if axis == -2 else x))

    def codes(q):
        raw = q.qdata.view(torch.uint8).numpy()
        if fmt.bits == 4:
            raw = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
        return raw.T if axis == -2 else raw

    def values(y):
        y = y.numpy().astype(np.float64)
        return y.T if axis == -2 else y

    def nbytes(q):
        leaves = [q.qdata, q.scale, getattr(q, "per_tensor_scale", None)]
        return sum(t.numel() * t.element_size() for t in leaves if t is not None)

    def without_gradients(call):
        def program(*args):
            with torch.no_grad():
                return call(*args)

        return program

    peers = []
    wraps = {"torchao, eager": lambda f: f}
    if with_compiled:
        wraps["torchao, compiled"] = functools.partial(torch.compile, dynamic=False)
    for name, wrap in wraps.items():
        peers.append(Peer(
            name, prepare, without_gradients(wrap(encode)), without_gradients(wrap(decode)), codes,
            values, nbytes, (fmt, None), note,
        ))  # fmt: skip
    return peers


def peers_of(fmt: Format, axis: int, *, with_compiled: bool) -> list[Peer]:
    """All that have the format, qwix first."""
    found = [qwix_peer(fmt, axis), *torchao_peers(fmt, axis, with_compiled)]
    return [peer for peer in found if peer is not None]


# --- elements

ML_DTYPES = {
    "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn",
    "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip
GFLOAT = {
    "e2m1": "format_info_ocp_e2m1", "e2m3": "format_info_ocp_e2m3", "e3m2": "format_info_ocp_e3m2",
    "e4m3fn": "format_info_ocp_e4m3", "e5m2": "format_info_ocp_e5m2",
}  # fmt: skip


def ml_dtypes_cast(name: str) -> tuple[Callable, Callable]:
    """``(encode, decode)`` by NumPy casts. They do not saturate, so the input must be clipped."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, ML_DTYPES[name])
    return (
        lambda x: x.astype(dtype).view(np.uint8),
        lambda codes: codes.view(dtype).astype(np.float32),
    )


def gfloat_cast(name: str) -> tuple[Callable, Callable]:
    """``(encode, decode)`` of gfloat: a reference in NumPy that rounds in float64, saturating."""
    import gfloat
    from gfloat import formats

    if name == "e3m3":  # unsigned; the reserved code 63 is a NaN in gfloat's terms
        from gfloat.types import Domain, FormatInfo

        info = FormatInfo(
            "e3m3", k=6, precision=4, bias=3, has_nz=False, domain=Domain.Finite, num_high_nans=1,
            has_subnormals=True, is_signed=False, is_twos_complement=False,
        )  # fmt: skip
    else:
        info = getattr(formats, GFLOAT[name])

    def encode(x):
        rounded = gfloat.round_ndarray(info, x.astype(np.float64), sat=True)
        return gfloat.encode_ndarray(info, rounded).astype(np.uint8)

    def decode(codes):
        return gfloat.decode_ndarray(info, codes.astype(np.uint64)).astype(np.float32)

    return encode, decode
