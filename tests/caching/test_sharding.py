"""Sampling over eight simulated devices, in one process of its own."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import dataclasses, functools, json, re
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from fadex.caching import (adaptive_sample, cached_sample, fuca_sample, make_plan, taylorseer,
                           teacache, uniform_schedule)
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import ab2, uniform_times

assert jax.device_count() == 8
config = DiTConfig(depth=2, width=32, num_heads=2, in_channels=2, num_classes=5, scan_layers=True)

def build(config):
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype)
    return denoiser, jax.tree.map(fill, params)

def gap(a, b):
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())

def collectives(text):
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return len(re.findall(rf"\b({names})(?:-start)?\(", text))

times = uniform_times(6)
plan = make_plan(uniform_schedule(6, 2, warmup=1, cooldown=0), taylorseer(1))  # one scan
denoiser, params = build(config)
key = jax.random.key(0)
found = {"batch": {}, "tokens": {}, "refused": {}}
others = {}

# Samples over the devices; a 1-D mesh, parameters on every device.
mesh = Mesh(np.array(jax.devices()), ("data",))
rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
x, y, null = jax.random.normal(key, (8, 8, 4, 2)), jnp.arange(8) % 5, jnp.full(8, 5)
placed = jax.device_put(params, everywhere)
xs, ys, nulls = jax.device_put((x, y, null), rows)
run = functools.partial(cached_sample, denoiser, timesteps=times, plan=plan, sampler=ab2())
for site, guidance in (("output", 1.0), ("crf", 1.0), ("module", 3.0)):
    call = jax.jit(functools.partial(run, site=site, guidance=guidance))
    alone = call(params, x, y, null_cond=null)
    spread = call.lower(placed, xs, ys, null_cond=nulls).compile()
    out = spread(placed, xs, ys, null_cond=nulls)
    found["batch"][f"{site} {guidance:g}"] = dict(
        gap=gap(out, alone), kept=out.sharding.is_equivalent_to(rows, 4),
        collectives=collectives(spread.as_text()),
    )
# The other samplers, on a model of a few operations: theirs is the loop.
from fadex.core import Denoiser
small = Denoiser(lambda p, x, t, c: p * jnp.tanh(x) * (1 + t + c)[:, None, None, None])
for name, call in (
    ("fuca", functools.partial(fuca_sample, schedule=plan.schedule)),
    ("adaptive", functools.partial(adaptive_sample, policy=teacache(0.3, signal="latent"))),
):
    others[name] = call = jax.jit(functools.partial(call, small, jnp.float32(0.7), timesteps=times))
    spread = call.lower(xs, scales := jax.device_put(0.1 * y, rows)).compile()
    out = spread(xs, scales)
    found["batch"][name] = dict(
        gap=gap(out, call(x, 0.1 * y)), kept=out.sharding.is_equivalent_to(rows, 4),
        collectives=collectives(spread.as_text()),
    )
grids = jnp.asarray(np.stack([times**p for p in np.linspace(1, 2, 8)]))
own = functools.partial(run, site="output")
explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
xe, ye = jax.device_put((x, y), NamedSharding(explicit, P("data")))
for name, call in dict(cached=functools.partial(run, params), **others).items():
    try:
        call(xe, ye)
    except Exception as error:
        found["refused"][name] = str(error)
out_sharding = jax.typeof(xe).sharding
out = jax.jit(jax.sharding.auto_axes(functools.partial(run, params), out_sharding=out_sharding))
found["explicit"] = gap(out(xe, ye), run(params, x, y))
found["batch"]["grids"] = dict(
    gap=gap(own(placed, xs, ys, timesteps=jax.device_put(grids, rows)),
            own(params, x, y, timesteps=grids)),
    kept=True, collectives=0,
)

# Tokens over the devices: rows of the latents, and the hidden states of every block.
mesh = Mesh(np.array(jax.devices()), ("seq",))
tokens = NamedSharding(mesh, P(None, "seq"))
split, _ = build(dataclasses.replace(config, token_sharding=tokens))
x = jax.random.normal(key, (2, 32, 8, 2))
y, null = y[:2], null[:2]
placed, xs = jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(x, tokens)
for site, guidance in (("output", 3.0), ("module", 1.0)):
    settings = dict(timesteps=times, plan=plan, site=site, guidance=guidance)
    whole = jax.jit(functools.partial(cached_sample, denoiser, **settings))
    parts = jax.jit(functools.partial(cached_sample, split, **settings))
    alone = whole.lower(params, x, y, null_cond=null).compile()
    spread = parts.lower(placed, xs, y, null_cond=null).compile()
    out = spread(placed, xs, y, null_cond=null)
    memory = [c.memory_analysis().temp_size_in_bytes for c in (alone, spread)]
    found["tokens"][f"{site} {guidance:g}"] = dict(
        gap=gap(out, alone(params, x, y, null_cond=null)), memory=memory,
        kept=out.sharding.is_equivalent_to(tokens, 4),
    )
out, feats = jax.jit(
    lambda p, x: split.with_features(p, x, jnp.full(2, 0.5), y, ("crf", "module"))
)(placed, xs)
found["features"] = {
    name: [list(f.shape), list(f.addressable_shards[0].data.shape)] for name, f in feats.items()
}
# A PartitionSpec goes by the mesh around the call.
named, _ = build(dataclasses.replace(config, token_sharding=P(None, "seq")))
with jax.set_mesh(mesh):
    again = jax.jit(named.apply)(placed, xs, jnp.full(2, 0.5), y)
found["spec"] = gap(again, denoiser.apply(params, x, jnp.full(2, 0.5), y))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "default::DeprecationWarning", "-c", PROGRAM],
        capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.smoke
def test_samples_spread_over_devices_equal_those_of_one_device(found):
    print(found["batch"])
    for row in found["batch"].values():
        assert row["gap"] <= 1e-6 and row["kept"]
    # Samples are independent: without the doubled batch of guidance nothing is exchanged.
    assert found["batch"]["output 1"]["collectives"] == 0
    assert found["batch"]["crf 1"]["collectives"] == 0
    assert found["batch"]["fuca"]["collectives"] == 0
    assert found["batch"]["adaptive"]["collectives"] > 0  # which decides for the whole batch
    for name in ("cached", "fuca", "adaptive"):
        assert "x: lies on a mesh with Explicit axes" in found["refused"][name]
    assert found["explicit"] <= 1e-6


@pytest.mark.smoke
def test_tokens_spread_over_devices_equal_those_of_one_device_in_less_memory(found):
    print(found["tokens"])
    for row in found["tokens"].values():
        assert row["gap"] <= 1e-5 and row["kept"]
        alone, spread = row["memory"]
        assert spread <= 0.5 * alone
    assert found["spec"] <= 1e-5


def test_features_and_thus_caches_lie_spread_over_devices(found):
    # 64 tokens of width 32 in two samples, an eighth of them on each device.
    assert found["features"] == {
        "crf": [[2, 64, 32], [2, 8, 32]], "module": [[4, 2, 64, 32], [4, 2, 8, 32]],
    }
