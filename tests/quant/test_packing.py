import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.quant import pack, packed_length, repack, unpack

LAYOUTS = ("stream", "planar")
LENGTH = 271  # two tiles and a ragged rest
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def codes_of(bits, *shape):
    rng = np.random.default_rng(bits)
    return rng.integers(0, 1 << bits, shape).astype(np.uint8 if bits <= 8 else np.uint16)


def stream_bytes(codes, bits):
    """Little-endian bit stream of one row, by NumPy's own bit packing."""
    rows = (codes.astype(np.int64)[:, None] >> np.arange(bits)) & 1
    return np.packbits(rows.astype(np.uint8).ravel(), bitorder="little")


def planar_bytes(codes, bits, tile=128):
    """The documented formula, bit by bit."""
    widths, left = [], bits
    while left:  # 8s first, then the bits of the rest, widest first
        width = 1 << (min(left, 8).bit_length() - 1)
        widths.append(width)
        left -= width
    unit = 8 // math.gcd(bits, 8)
    codes = [int(c) for c in codes] + [0] * (-len(codes) % unit)
    out = []
    for start in range(0, len(codes), tile):
        part, shift = codes[start:start + tile], 0
        for w in widths:
            rows = len(part) * w // 8
            plane = [0] * rows
            for i, code in enumerate(part):
                plane[i % rows] |= ((code >> shift) & ((1 << w) - 1)) << (w * (i // rows))
            out, shift = out + plane, shift + w
    return np.array(out, np.uint8)


@pytest.mark.parametrize(
    "bits", [pytest.param(n, marks=[pytest.mark.smoke] * (n == 4)) for n in range(1, 17)]
)
def test_layouts_are_as_documented_and_round_trips_are_exact(bits):
    codes = codes_of(bits, 2, LENGTH)

    @jit
    def run(codes):
        packed = {lay: pack(codes, bits, layout=lay) for lay in LAYOUTS}
        return packed, {
            lay: unpack(p, bits, length=LENGTH, layout=lay) for lay, p in packed.items()
        }

    packed, back = run(codes)
    for layout, rows in (("stream", stream_bytes), ("planar", planar_bytes)):
        p, b = packed[layout], back[layout]
        assert p.dtype == jnp.uint8 and b.dtype == codes.dtype
        np.testing.assert_array_equal(p, [rows(row, bits) for row in codes])
        np.testing.assert_array_equal(b, codes)
        assert p.shape[-1] == packed_length(LENGTH, bits, layout)


def test_less_than_a_byte_and_less_than_a_tile():
    cases = [(b, n) for b in (1, 3, 4, 12) for n in (1, 13)]
    run = jit(lambda codes: [
        (p := pack(c, b, layout=layout), unpack(p, b, length=n, layout=layout))
        for c, (b, n) in zip(codes, cases) for layout in LAYOUTS
    ])
    codes = [codes_of(b, n) for b, n in cases]
    results = iter(run(codes))
    for c, (b, _) in zip(codes, cases):
        for layout in (stream_bytes, planar_bytes):
            p, back = next(results)
            np.testing.assert_array_equal(p, layout(c, b))
            np.testing.assert_array_equal(back, c)


def test_bytes_are_exact():
    for bits in range(1, 17):
        for n in range(300):
            assert packed_length(n, bits) == math.ceil(n * bits / 8)
            unit = 8 // math.gcd(bits, 8)
            assert packed_length(n, bits, "planar") == math.ceil(n / unit) * unit * bits // 8
    assert packed_length(4096, 4) == 2048  # half a byte each


def test_any_axis_is_packed_like_the_last():
    bits, codes = 3, codes_of(3, 3, 141, 5)

    @jit
    def run(codes):
        out = []
        for axis in (-3, -2, 1):
            for layout in LAYOUTS:
                p = pack(codes, bits, axis=axis, layout=layout)
                last = pack(jnp.moveaxis(codes, axis, -1), bits, layout=layout)
                b = unpack(p, bits, length=codes.shape[axis], axis=axis, layout=layout)
                out.append((jnp.moveaxis(p, axis, -1), last, b))
        return out

    for got, want, back in run(codes):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(back, codes)


def test_another_tile_and_leading_axes_under_vmap():
    codes = codes_of(6, 3, 104)

    @jit
    def run(codes):
        p = pack(codes, 6, layout="planar", tile=32)
        each = jax.vmap(lambda c: pack(c, 6, layout="planar", tile=32))(codes)
        to = repack(p, 6, length=104, layout="planar", to="stream", tile=32)
        return p, each, unpack(p, 6, length=104, layout="planar", tile=32), to

    p, each, back, to = run(codes)
    np.testing.assert_array_equal(p, [planar_bytes(row, 6, 32) for row in codes])
    np.testing.assert_array_equal(each, p)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(to, [stream_bytes(row, 6) for row in codes])


def test_repacking_moves_the_same_bits():
    codes = codes_of(5, 4, 136)  # whole bytes in either layout
    there = jit(lambda p: repack(p, 5, length=136, layout="stream", to="planar"))
    back = jit(lambda p: repack(p, 5, length=136, layout="planar", to="stream"))
    p = np.stack([stream_bytes(row, 5) for row in codes])
    q = there(p)
    np.testing.assert_array_equal(q, [planar_bytes(row, 5) for row in codes])
    assert np.unpackbits(p).sum() == np.unpackbits(np.asarray(q)).sum()
    np.testing.assert_array_equal(back(q), p)


def test_nibbles_are_interleaved_in_a_stream_and_split_in_tiles():
    codes = np.arange(128, dtype=np.uint8) % 16
    np.testing.assert_array_equal(pack(codes, 4), codes[0::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(pack(codes, 4, layout="planar"), codes[:64] | codes[64:] << 4)


def test_nothing_packs_to_nothing():
    for layout in LAYOUTS:
        p = pack(np.zeros((2, 0), np.uint8), 4, layout=layout)
        assert p.shape == (2, 0) and p.dtype == jnp.uint8
        assert unpack(p, 4, length=0, layout=layout).shape == (2, 0)
        assert unpack(p, 9, length=0, layout=layout).dtype == jnp.uint16
    assert pack(np.zeros((0, 16), np.uint8), 4).shape == (0, 8)


def test_errors_name_the_argument():
    codes, packed = np.zeros((2, 8), np.uint8), np.zeros((2, 4), np.uint8)
    for call, error, message in (
        (lambda: pack(codes, 0), ValueError, r"bits: must lie in \[1, 16\], got 0"),
        (lambda: pack(codes, 17), ValueError, r"bits: must lie in \[1, 16\], got 17"),
        (lambda: pack(codes, 4.0), TypeError, "bits: expected an integer"),
        (lambda: pack(codes, 4, layout="split"), ValueError, "layout: expected one of 'stream'"),
        (lambda: pack(codes, 4, tile=12), ValueError, "tile: must be a multiple of 8, got 12"),
        (lambda: pack(codes, 4, axis=2), ValueError, "axis: 2 is out of range for 2 dimensions"),
        (lambda: pack(codes.astype(np.float32), 4), TypeError, "codes: expected integers"),
        (lambda: unpack(packed, 4, length=9), ValueError,
         "length: 9 codes of 4 bits take 5 bytes in layout 'stream', the axis has 4"),
        (lambda: unpack(packed, 4, length=-1), ValueError, "length: must be >= 0"),
        (lambda: unpack(packed.astype(np.int32), 4, length=8), TypeError,
         "packed: expected uint8, got int32"),
        (lambda: repack(packed, 4, length=8, layout="stream", to="x"), ValueError,
         "layout: expected one of"),
    ):
        with pytest.raises(error, match=message):
            call()
