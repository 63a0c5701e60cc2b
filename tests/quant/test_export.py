"""Files of quantized trees: restored bit for bit, readable by NumPy, refused when damaged."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from fadex.core import checkpoint
from fadex.models.layers import Linear
from fadex.quant import (
    Format,
    Site,
    dequantize,
    format_from_json,
    fp8,
    from_state,
    int_group,
    load_quantized,
    mxfp4,
    mxfp6,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize,
    quantize_array,
    razer_e3m3,
    razer_e4m3,
    save_quantized,
    to_state,
)
from fadex.quant.qat import fixed_scale

FORMATS = [
    nvfp4(), nvfp4_4o6(), nvfp4(scale="e3m3"), mxfp4(), mxfp6(), mxfp6("e2m3"), nf4(),
    nf4(double_quant=True), int_group(2, 32), int_group(3, 32), int_group(4, 32, symmetric=False),
    int_group(8, None), int_group(5, 16, scale="bfloat16"), int_group(8, "tensor"), fp8(),
    fp8("e5m2", per="tensor"), razer_e4m3(), razer_e3m3(7),
]
RNG = np.random.default_rng(0)


def weight(*shape):
    return (RNG.standard_t(4, shape) * 0.05).astype(np.float32)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def documented_reader():
    text = (Path(__file__).parents[2] / "docs/quantized_checkpoints.md").read_text()
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, scope)
    return scope


def test_a_reader_of_numpy_alone_reproduces_every_value_from_the_files(tmp_path):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def make(w, rows, broken):  # one program for all of them
        tree = {f.name: quantize_array(w, f) for f in FORMATS}
        tree |= {f"{f.name} rows": quantize_array(rows, f, axis=-1) for f in FORMATS[::5]}
        return tree | {f"{f.name} nan": quantize_array(broken, f)
                       for f in (mxfp4(), nvfp4(), int_group(4))}

    broken = weight(64, 3)
    broken[5, 1] = np.nan
    tree = make(weight(2, 72, 6), weight(5, 40), broken)
    values = jax.jit(dequantize, compiler_options={"xla_backend_optimization_level": 0})(tree)
    save_quantized(tmp_path / "q", tree)
    stored = ocp.StandardCheckpointer().restore((tmp_path / "q" / "arrays").absolute())
    manifest = json.loads((tmp_path / "q" / "manifest.json").read_text())
    abouts = manifest["metadata"]["fadex_quantized"]["arrays"]
    assert set(abouts) == set(tree)
    documented = documented_reader()
    read, whole = documented["read"], documented["load"](tmp_path / "q")
    assert set(whole) == set(tree)
    for path, about in abouts.items():
        leaf = {
            name: np.asarray(stored[f"{path}/{name}"])
            for name in ("codes", "scales", "tensor_scale", "zero_point")
            if f"{path}/{name}" in stored
        }
        assert leaf["codes"].dtype == np.uint8
        np.testing.assert_array_equal(
            read(leaf, about), np.asarray(values[path]), err_msg=path
        )
        np.testing.assert_array_equal(whole[path], np.asarray(values[path]), err_msg=path)


def test_restored_trees_equal_the_saved_ones_bit_for_bit(tmp_path):
    model = nnx.Sequential(Linear(64, 32, rngs=nnx.Rngs(0)), Linear(32, 64, rngs=nnx.Rngs(1)))
    state = nnx.state(model)
    q = quantize(state, [("layers/0/kernel", Site(razer_e3m3(), razer_e4m3())), ("**", nvfp4())])
    save_quantized(tmp_path / "q", q, metadata={"step": 3})
    same(load_quantized(tmp_path / "q", like=state), q)
    same(load_quantized(tmp_path / "q", like=q), q)
    assert checkpoint.read_manifest(tmp_path / "q")["metadata"]["user"] == {"step": 3}
    plain = load_quantized(tmp_path / "q", layout="stream")
    assert plain["layers"][0]["kernel"].weight.layout == "stream"


def test_four_bits_take_half_a_byte_in_memory_and_on_disk(tmp_path):
    q = quantize_array(weight(2048, 1024), nvfp4())
    assert q.codes.nbytes == 2048 * 1024 // 2 and q.scales.nbytes == 2048 * 1024 // 16
    assert q.nbytes == q.codes.nbytes + q.scales.nbytes + 4
    save_quantized(tmp_path / "q", {"w": q})
    disk = sum(f.stat().st_size for f in (tmp_path / "q").rglob("*") if f.is_file())
    assert disk <= 1.1 * q.nbytes


def test_a_restored_tree_can_go_to_another_sharding(tmp_path):
    q = quantize_array(weight(64, 8), nvfp4())
    save_quantized(tmp_path / "q", {"w": q})
    mesh = jax.make_mesh((1,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    back = load_quantized(tmp_path / "q", sharding=place)["w"]
    same(back, q)
    assert back.scales.sharding.is_equivalent_to(place, 2)


@pytest.mark.smoke
def test_formats_survive_their_description():
    for fmt in (*FORMATS, fixed_scale(2, 0.1)):
        assert format_from_json(json.loads(json.dumps(fmt.to_json()))) == fmt
    assert isinstance(format_from_json(nvfp4().to_json()), Format)


def test_wrong_descriptions_are_named(tmp_path):
    good = nvfp4().to_json()
    for change, message in (
        ({"version": 2}, "version 2"), ({"kind": "Ternary"}, "Ternary"), ({"extra": 1}, "extra"),
        ({"element": "e9m9"}, "element"),
    ):
        with pytest.raises(ValueError, match=message):
            format_from_json(good | change)
    arrays, meta = to_state({"w": quantize_array(weight(32, 4), nvfp4())})
    with pytest.raises(ValueError, match="version 9"):
        from_state(arrays, meta | {"version": 9})
    with pytest.raises(ValueError, match="no codes"):
        from_state({"w": {"scales": arrays["w"]["scales"]}}, meta)
    with pytest.raises(ValueError, match="described as"):
        from_state({"w": arrays["w"] | {"codes": arrays["w"]["codes"][:, :3]}}, meta)
    with pytest.raises(ValueError, match=r"\['v'\] not in the state; \['w'\] of the state"):
        from_state(arrays, meta, like={"v": jnp.zeros((32, 4))})
    with pytest.raises(ValueError, match=r"'w' has shape \(7, 7\), the state's has \(32, 4\)"):
        from_state(arrays, meta, like={"w": jnp.zeros((7, 7))})
    with pytest.raises(ValueError, match="ambiguous"):
        to_state({"": quantize_array(weight(32, 4), nvfp4())})
    with pytest.raises(ValueError, match="share a path"):
        to_state({"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})
    checkpoint.save(tmp_path / "dense", {"w": np.zeros(3)})
    with pytest.raises(checkpoint.CheckpointError, match="no quantized checkpoint"):
        load_quantized(tmp_path / "dense")


def test_a_flipped_bit_on_disk_is_noticed(tmp_path):
    save_quantized(tmp_path / "q", {"w": quantize_array(weight(256, 64), nvfp4())})
    largest = max((f for f in (tmp_path / "q").rglob("*") if f.is_file()),
                  key=lambda f: f.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    with pytest.raises(checkpoint.CheckpointError):
        load_quantized(tmp_path / "q")
