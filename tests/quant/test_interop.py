"""qwix's QArray and ours, by fields: values survive, and what cannot be held is refused."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fadex.quant import (
    fp8,
    from_qwix,
    int_group,
    mxfp4,
    mxfp6,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize_array,
    razer_e4m3,
    to_qwix,
)
from fadex.quant.elements import NF4_LEVELS

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((2, 64, 6)) * 0.1).astype(np.float32)


def qwix_value(fields):
    """What a QArray stands for, by the invariant of its documentation."""
    values = np.asarray(fields.qvalue.astype(jnp.float32))
    if fields.qtype == "nf4":
        values = NF4_LEVELS[values.astype(int)]
    stretch = lambda a: np.kron(
        np.asarray(a, np.float32),
        np.ones([n // s for n, s in zip(values.shape, np.shape(a))], np.float32),
    )
    if fields.zero_point is not None:
        values = values - stretch(fields.zero_point.astype(jnp.float32))
    return values * stretch(fields.scale)


@pytest.mark.parametrize("fmt", [
    nvfp4(), nvfp4_4o6(), mxfp4(), nf4(16), int_group(4, 32), int_group(8, None),
    int_group(3, 16), int_group(4, 16, symmetric=False), int_group(8, "tensor"), fp8(),
    fp8("e5m2"),
], ids=lambda f: f.name)
def test_values_survive_both_ways(fmt):
    q = quantize_array(W, fmt)
    fields = to_qwix(q)
    want = np.asarray(q.dequantize())
    assert fields.qvalue.shape == W.shape
    np.testing.assert_allclose(qwix_value(fields), want, rtol=3e-7, atol=1e-12)
    back = from_qwix(fields)
    np.testing.assert_allclose(np.asarray(back.dequantize()), want, rtol=3e-7, atol=1e-12)
    if fmt.bits < 8:
        assert back.codes.nbytes == q.codes.nbytes  # packed again


def test_a_scale_shared_by_other_axes_is_stretched():
    codes = RNG.integers(-8, 8, (32, 6))
    array = SimpleNamespace(qvalue=jnp.asarray(codes, jnp.int4), scale=jnp.full((4, 1), 0.25),
                            zero_point=None, qtype=jnp.int4)
    q = from_qwix(array)
    assert q.axis == -2 and q.fmt.block == 8 and q.scales.shape == (4, 6)
    np.testing.assert_array_equal(q.dequantize(), codes * 0.25)


@pytest.mark.smoke
def test_the_fields_fill_any_constructor():
    made = to_qwix(quantize_array(W, int_group(8, None)), cls=lambda **kw: kw)
    assert sorted(made) == ["qtype", "qvalue", "scale", "zero_point"]


@pytest.mark.parametrize(("fmt", "rows", "message"), [
    (razer_e4m3(), 64, "special values"), (int_group(2, 32), 64, "half-integer"),
    (mxfp6(), 64, "no dtype"), (nvfp4(), 40, "whole"),
])
def test_what_a_qarray_cannot_hold_is_refused(fmt, rows, message):
    with pytest.raises(ValueError, match=message):
        to_qwix(quantize_array(W[:, :rows], fmt))


def test_foreign_arrays_that_do_not_fit_are_refused():
    make = lambda scale, qtype=jnp.int8, zero=None, shape=(32, 32): SimpleNamespace(
        qvalue=jnp.zeros(shape, jnp.int8), scale=jnp.ones(scale), zero_point=zero, qtype=qtype
    )
    with pytest.raises(ValueError, match="only one axis"):
        from_qwix(make((2, 2)))
    with pytest.raises(ValueError, match="multiple of 8"):
        from_qwix(make((8, 32)))
    with pytest.raises(ValueError, match="no format here"):
        from_qwix(make((2, 32), qtype="int16"))
    with pytest.raises(ValueError, match="outside of"):
        from_qwix(make((2, 32), zero=np.full((2, 32), 1000)))
    with pytest.raises(TypeError, match="missing"):
        from_qwix(np.zeros((4, 4)))
    with pytest.raises(TypeError, match="QuantizedArray"):
        to_qwix(W)
