import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from fadex.quant import (
    QuantizedArray,
    fp8,
    int_group,
    mxfp4,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize_array,
    razer_e3m3,
)

f32 = np.float32
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
values_of = jit(lambda q: q.dequantize())
run = jit(
    lambda x, fmt, axis=-2, layout="planar", **kw: (
        q := quantize_array(x, fmt, axis=axis, layout=layout, **kw), q.dequantize()
    ),
    static_argnums=1, static_argnames=("axis", "layout", "on_nonfinite"),
)
FORMATS = {
    f.name: f for f in (
        nvfp4(), razer_e3m3(), mxfp4(), fp8(per="tensor"), nf4(double_quant=True),
        int_group(3, None), int_group(4, 16, symmetric=False),
    )
}  # fmt: skip


@functools.cache
def weights():
    """Three stacked matrices whose block axis fills neither blocks nor bytes."""
    x = np.random.default_rng(0).standard_t(4, (3, 41, 6)).astype(f32)
    x[1] *= 1e3
    x[2, :16] = 0.0
    return x


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] * (n == next(iter(FORMATS)))) for n in FORMATS],
)
def test_stacks_equal_the_loop_bit_for_bit_under_vmap_scan_and_eagerly(name):
    fmt, x = FORMATS[name], weights()
    one = lambda x: quantize_array(x, fmt)

    back = lambda q: q.dequantize()
    loop = lambda x: jax.lax.scan(lambda c, x: (c, (q := one(x), back(q))), 0, x)[1]

    @jit
    def every(x):
        q = one(x)
        return (q, loop(x)[0], jax.vmap(one)(x)), (back(q), loop(x)[1], jax.vmap(back)(q))

    quantized, values = every(x)
    for i in (1, 2):
        same(quantized[0], quantized[i])
        same(values[0], values[i])
    if name in ("nvfp4", "int4_g16_asym"):
        same(quantized[0], one(x))
        same(values[0], back(quantized[0]))
    q = quantized[0]
    assert q.shape == x.shape and q.ndim == 3 and q.size == x.size and len(q.shape) == 3
    assert q.dtype == jnp.float32 and values[0].shape == x.shape
    # Each buffer has the bytes that the format says.
    block = fmt.block if isinstance(fmt.block, int) else None
    padded = q.padded
    assert q.codes.nbytes == 3 * 6 * padded * fmt.bits // 8
    wanted = q.codes.nbytes + 3 * 4 * fmt.has_tensor_scale
    if fmt.block != "tensor":
        wanted += 3 * 6 * (padded // block if block else 1) * fmt.scale_bits // 8
    assert q.nbytes == wanted


def test_leaves_are_arrays_and_the_rest_is_static():
    q = run(weights(), nvfp4())[0]
    leaves, structure = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8, jnp.uint8, jnp.float32]
    assert [leaf.shape for leaf in leaves] == [(3, 24, 6), (3, 3, 6), (3,)]
    assert jax.tree.unflatten(structure, leaves).shape == (3, 41, 6) and hash(structure)
    # An abstract one has a shape as well, and one that a tree map passes through prints.
    abstract = jax.eval_shape(lambda x: quantize_array(x, nvfp4()), weights())
    assert abstract.shape == (3, 41, 6)
    assert "codes=None" in repr(jax.tree.map(lambda _: None, q))
    assert repr(q) == ("QuantizedArray(nvfp4, shape=(3, 41, 6), axis=-2, layout='planar', "
                       "dtype=float32)")
    assert q.astype(jnp.bfloat16).dequantize().dtype == jnp.bfloat16
    assert q.dequantize(jnp.float16).dtype == jnp.float16


def test_any_axis_equals_the_transposed_matrix():
    x = weights()
    for fmt in (int_group(3, 8), fp8(per="tensor")):
        down = run(x, fmt)
        across = run(x.swapaxes(1, 2), fmt, axis=-1)
        np.testing.assert_array_equal(across[1].swapaxes(1, 2), down[1])
        # Axis -3: that axis and the two behind it share one tensor scale.
        outer = run(x.transpose(1, 0, 2)[None], fmt, axis=-3)
        flat = run(x.transpose(1, 0, 2).reshape(1, 41, 18), fmt)
        np.testing.assert_array_equal(outer[1].reshape(1, 41, 18), flat[1])
        # A positive axis is the same axis; a vector is one column.
        assert run(x, fmt, axis=1)[0].axis == -2
        vector, column = run(x[0, :, 0], fmt, axis=-1), run(x[0, :, :1], fmt)
        np.testing.assert_array_equal(vector[1], column[1][:, 0])
        assert vector[0].shape == (41,)


def test_low_precision_inputs_are_quantized_by_value_and_come_back_in_their_dtype():
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.asarray(weights()[0], dtype)
        q, values = run(x, nvfp4())
        wide, exact = run(x.astype(jnp.float32), nvfp4())
        same(jax.tree.leaves(q), jax.tree.leaves(wide))
        assert values.dtype == q.dtype == dtype
        same(values, exact.astype(dtype))  # rounded once


def test_nothing_is_quantized_to_nothing():
    for shape in ((0, 4), (4, 0), (2, 0, 3)):
        for fmt in (nvfp4(), int_group(4, None), fp8(per="tensor")):
            q, values = run(np.zeros(shape, f32), fmt)
            assert q.shape == values.shape == shape and q.size == 0


def test_layouts_hold_the_same_codes():
    x = weights()
    for fmt in (nvfp4(), int_group(3, 8)):
        planar, values = run(x, fmt)
        stream, again = run(x, fmt, layout="stream")
        assert planar.nbytes == stream.nbytes
        assert not np.array_equal(planar.codes, stream.codes)
        same(values, again)
        moved = jit(lambda p, s: (p.to_layout("stream"), s.to_layout("planar"), p.unpacked(),
                                  s.unpacked()))(planar, stream)
        same(moved[0], stream)
        same(moved[1], planar)
        same(moved[2], moved[3])
    assert planar.to_layout("planar") is planar


def test_layers_columns_and_rows_are_cut_without_decoding():
    x = weights()
    for fmt in (nvfp4(), int_group(4, 16, symmetric=False)):
        q, values = run(x, fmt)
        same(values_of(q[1]), values[1])
        same(values_of(q[1:]), values[1:])
        assert q[...] is q
        same(values_of(q.columns(2, 5)), values[..., 2:5])
        with pytest.raises(IndexError, match="takes at most 1 leading indices"):
            q[0, 0]
        with pytest.raises(IndexError, match="are those of the matrix"):
            q[1][0]
    for index, message in ((None, "leading indices"), (3, "index: 3 is out of range for an axis")):
        with pytest.raises(IndexError, match=message):
            q[index]
    assert len(q) == 3 and [part.shape for part in q] == [(41, 6)] * 3
    index = np.array([[0, 5], [40, 5]])
    for axis in (-1, -2):
        q, values = run(x[0], nvfp4(), axis=axis)
        take = jit(lambda q, i: q.take(i))
        same(take(q, index), values[index])
        # As jnp.take: negative rows count from the end, missing ones are NaN.
        odd = np.array([[-1, 41], [-41, -42]])
        np.testing.assert_array_equal(take(q, odd), jnp.take(values, odd, axis=0))
    with pytest.raises(ValueError, match="columns: the last axis is the block axis"):
        run(x[0], nvfp4(), axis=-1)[0].columns(0, 2)
    with pytest.raises(ValueError, match="take: expected a matrix"):
        run(x, nvfp4())[0].take(index)


def test_it_never_turns_into_an_array_by_itself():
    q = run(weights(), nvfp4())[0]
    for call in (lambda: jnp.asarray(q), lambda: np.asarray(q), lambda: jnp.sum(q),
                 lambda: q @ jnp.ones((6, 2)), lambda: jnp.ones((2, 41)) @ q, lambda: q + 1):
        with pytest.raises(TypeError):
            call()
    for call in (lambda: np.asarray(q), lambda: jnp.asarray(q)):
        with pytest.raises(TypeError, match=r"call dequantize\(\) for its values"):
            call()


# --- tensor scales


def test_a_stale_tensor_scale_saturates_without_nan():
    x = weights()[0]
    for name in ("nvfp4", "razer_e3m3", "fp8_e4m3fn_tensor"):
        fmt = FORMATS[name]
        q = run(x, fmt)[0]
        again = run(x, fmt, tensor_scale=q.tensor_scale)[0]
        same(again, q)
        small = np.asarray(run(x, fmt, tensor_scale=q.tensor_scale / 100)[1])
        assert np.isfinite(small).all()
        assert np.abs(small).max() < np.abs(x).max() / 10  # saturated
        large = np.asarray(run(x, fmt, tensor_scale=q.tensor_scale * 1e6)[1])
        assert np.isfinite(large).all()


def test_shards_share_the_tensor_scale_of_the_whole():
    x = weights()[0, :32]
    for fmt in (nvfp4(), fp8(per="tensor")):
        whole, values = run(x, fmt)
        shards = jit(lambda x: jax.vmap(
            lambda x: quantize_array(x, fmt, axis_name="i", layout="stream"), axis_name="i")(x)
        )(x.reshape(2, 16, 6))
        same(shards.tensor_scale, jnp.broadcast_to(whole.tensor_scale, 2))
        np.testing.assert_array_equal(
            np.asarray(values_of(shards)).reshape(32, 6), values)


# --- numbers that are not finite


@pytest.mark.parametrize("name", ["nvfp4", "razer_e3m3", "mxfp4", "int4_g16_asym",
                                  "fp8_e4m3fn_tensor"])
def test_what_is_not_finite_stays_visible_or_saturates(name):
    fmt, x = FORMATS[name], weights().copy()
    clean = np.asarray(run(x, fmt)[1])
    x[0, 20, 3], x[1, 2, 1] = np.nan, np.inf
    values = np.asarray(run(x, fmt)[1])
    block = fmt.block if isinstance(fmt.block, int) and fmt.nan_in_scale else None
    rows = lambda k: slice(k - k % block, k - k % block + block) if block else slice(None)
    columns = (lambda n: n) if block else (lambda n: slice(None))
    bad = np.zeros(x.shape, bool)
    bad[0, rows(20), columns(3)] = bad[1, rows(2), columns(1)] = True
    assert np.isnan(values[bad]).all()
    assert np.isfinite(values[~bad]).all()
    same(values[2], clean[2])
    # Saturating: NaN counts as zero, infinity as the largest finite magnitude of its matrix.
    plain = x.copy()
    plain[0, 20, 3], plain[1, 2, 1] = 0, np.abs(np.where(np.isfinite(x[1]), x[1], 0)).max()
    same(run(x, fmt, on_nonfinite="saturate")[1], run(plain, fmt)[1])


def test_a_checked_program_reports_what_is_not_finite():
    checked = jit(checkify.checkify(
        lambda x: quantize_array(x, nvfp4(), on_nonfinite="check").dequantize()))
    x = weights()[0]
    checked(x)[0].throw()
    error = checked(np.where(x == x.max(), np.nan, x))[0]
    with pytest.raises(checkify.JaxRuntimeError, match="x: holds values that are not finite"):
        error.throw()


def test_a_matrix_of_infinities_and_a_nan_with_a_static_scale():
    x = np.full((32, 2), np.inf, f32)
    for name in ("nvfp4", "fp8_e4m3fn_tensor"):
        for scale in (None, f32(1.0)):
            assert np.isnan(run(x, FORMATS[name], tensor_scale=scale)[1]).all()
        assert (np.asarray(run(x, FORMATS[name], on_nonfinite="saturate")[1]) == 0).all()


def test_errors_name_the_argument():
    x = jnp.ones((32, 4))
    q = run(weights()[0], nvfp4())[0]
    for call, error, message in (
        (lambda: quantize_array(q, nvfp4()), ValueError, "x: is quantized already"),
        (lambda: quantize_array(x, "nvfp4"), TypeError, r"fmt: expected a Format such as nvfp4"),
        (lambda: quantize_array(x, nvfp4), TypeError, r"did you mean nvfp4\(\)\?"),
        (lambda: quantize_array(x.astype(int), nvfp4()), ValueError, "x: expected a floating-p"),
        (lambda: quantize_array(x + 1j, nvfp4()), ValueError, "x: expected a floating-point"),
        (lambda: quantize_array(jnp.float32(1), nvfp4()), ValueError, "x: expected at least one"),
        (lambda: quantize_array(x, nvfp4(), axis=2), ValueError, r"axis: 2 is out of range for"),
        (lambda: quantize_array(x, nvfp4(), axis=-3), ValueError, "axis: -3 is out of range"),
        (lambda: quantize_array(x[0], nvfp4()), ValueError, "axis: -2 is out of range"),
        (lambda: quantize_array(x, nvfp4(), layout="split"), ValueError, "layout: expected one"),
        (lambda: quantize_array(x, nvfp4(), on_nonfinite="raise"), ValueError, "on_nonfinite: ex"),
        (lambda: quantize_array(x, mxfp4(), tensor_scale=1.0), ValueError,
         "tensor_scale: format 'mxfp4' has none"),
        (lambda: quantize_array(x, nvfp4(), tensor_scale=jnp.ones(3)), ValueError,
         r"tensor_scale: shape \(3,\) does not broadcast to the leading axes \(\)"),
        (lambda: quantize_array(x, nvfp4(), tensor_scale=0.0), ValueError,
         "tensor_scale: must be positive, got 0.0"),
        (lambda: quantize_array(x, nvfp4_4o6(), importance=jnp.ones((3, 4))), ValueError,
         r"importance: shape \(3, 4\) does not broadcast"),
        (lambda: q.to_layout("split"), ValueError, "layout: expected one of"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert isinstance(q, QuantizedArray)
