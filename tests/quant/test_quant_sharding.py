"""Quantized arrays over eight simulated devices, in one process of its own."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from fadex.quant import int_group, nvfp4, quantize_array, shardings_for

PROGRAM = r"""
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from fadex.quant import (int_group, mxfp4, nvfp4, quantize_array, qmatmul, razer_e3m3,
                         shardings_for)

assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("k", "n"))
rng = np.random.default_rng(0)
w = jnp.asarray(rng.standard_t(4, (2, 512, 16)), jnp.float32)
x = jnp.asarray(rng.standard_normal((2, 3, 512)), jnp.float32)
found = {}
for fmt in (nvfp4(), razer_e3m3(), mxfp4(), int_group(4, 32)):
    alone = jax.jit(quantize_array, static_argnums=1)(w, fmt)
    placed = jax.device_put(w, NamedSharding(mesh, P(None, "k", "n")))
    spread = jax.jit(quantize_array, static_argnums=1)(placed, fmt)
    places = shardings_for(alone, mesh, P(None, "k", "n"))
    moved = jax.device_put(alone, places)
    same = all(np.array_equal(a, b) for other in (spread, moved)
               for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(other)))
    cut = moved.codes.addressable_shards[0].data.shape == (2, 64, 8)
    values = np.array_equal(jax.jit(lambda q: q.dequantize())(moved), alone.dequantize())
    product = jax.jit(qmatmul)(x, moved)
    gap = float(jnp.abs(product - qmatmul(x, alone)).max() / jnp.abs(product).max())
    found[fmt.name] = [bool(same), bool(cut), bool(values), gap]

# One shard of the matrix a device: the tensor scale is that of the whole.
shard = jax.shard_map(
    lambda w: quantize_array(w, nvfp4(), axis_name=("k", "n")), mesh=mesh,
    in_specs=P("k", "n"), out_specs=jax.tree.map(
        lambda s: s.spec, shardings_for(quantize_array(w[0], nvfp4()), mesh, P("k", "n"))),
)
a, b = quantize_array(w[0], nvfp4()), jax.jit(shard)(w[0])
found["shard_map"] = [bool(np.array_equal(p, q))
                      for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b))]
print("RESULT" + json.dumps(found))
"""


def test_eight_devices_quantize_to_the_codes_of_one():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_"
           "device_count=8 --xla_backend_optimization_level=0"}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=600
    )
    assert out.returncode == 0, out.stderr[-2000:]
    found = json.loads(out.stdout.split("RESULT")[1])
    assert found.pop("shard_map") == [True] * 3
    for name, (same, cut, values, gap) in found.items():
        assert same and cut and values, name
        assert gap < 2e-6, name


def test_a_cut_through_a_block_or_tile_is_refused():
    mesh = AbstractMesh((4, 2), ("k", "n"))
    shape = lambda *s, fmt=nvfp4(), **kw: jax.eval_shape(
        lambda: quantize_array(jnp.zeros(s), fmt, **kw)
    )
    with pytest.raises(ValueError, match="axis -2 of length 256 over 4 shards .* 128"):
        shardings_for(shape(256, 8), mesh, PartitionSpec("k"))
    shardings_for(shape(256, 8, layout="stream"), mesh, PartitionSpec("k"))
    with pytest.raises(ValueError, match="units of 32"):
        shardings_for(shape(96, 8, fmt=int_group(8, 32)), mesh, PartitionSpec("k"))
    with pytest.raises(ValueError, match="axis -2 of length 500"):
        shardings_for(shape(500, 8), mesh, PartitionSpec("k"))
    with pytest.raises(ValueError, match="more entries"):
        shardings_for(shape(256, 8), mesh, PartitionSpec(None, None, "k"))


@pytest.mark.smoke
def test_experts_are_cut_with_their_tensor_scales():
    mesh = AbstractMesh((4, 2), ("k", "n"))
    q = jax.eval_shape(lambda: quantize_array(jnp.zeros((8, 64, 16)), nvfp4()))
    places = shardings_for(q, mesh, PartitionSpec(("k", "n")))
    assert places.tensor_scale.spec == PartitionSpec(("k", "n"))
    assert places.codes.spec == places.scales.spec == PartitionSpec(("k", "n"), None, None)
    assert places.zero_point is None
