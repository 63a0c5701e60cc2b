import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    FucaPlan,
    adaptive_sample,
    cached_sample,
    dmd,
    export_sampler,
    fuca_sample,
    fuca_tables,
    load_sampler,
    make_plan,
    taylorseer,
    teacache,
    uniform_schedule,
)
from fadex.core import Denoiser, checkpoint
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import ddim, guidance_breaks, timestep_indices, uniform_times

STEPS = 6
TIMES = uniform_times(STEPS)
PLAN = make_plan(uniform_schedule(STEPS, 3, warmup=2), taylorseer(1))
SHAPE = (4, 4, 2)


@pytest.fixture(scope="module")
def dit():
    config = DiTConfig(depth=2, width=32, num_heads=2, in_channels=2, num_classes=5,
                       scan_layers=True)
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype)
    return denoiser, jax.tree.map(fill, params)


def noise(batch=3, shape=SHAPE, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, *shape))


def close(a, b):
    """Another program, fused in another way: some roundings of float32, of 6e-8 each."""
    assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * np.abs(b).max()


FRESH = """
import sys
for name in ("flax", "flax.nnx", "fadex.models"):
    sys.modules[name] = None  # an import of any of them fails from here on
import json
import numpy as np
import jax
from jax import export

folder = sys.argv[1]
x, y, null = (np.load(f"{folder}/{name}.npy") for name in ("x", "y", "null"))

# With JAX alone, as the format's description says.
data = open(f"{folder}/baked.fadex", "rb").read()
start = 48 + int.from_bytes(data[8:16], "little")
header = json.loads(data[48:start])
program = header["programs"]["cpu"]
blob = data[start + program["offset"] :][: program["size"]]
alone = export.deserialize(bytearray(blob)).call([], [x], [y], [null], [np.float32(3.0)], [])
assert not [name for name in sys.modules if name.startswith(("fadex.", "flax."))
            and sys.modules[name] is not None]

# With the reader, but without Python code of any model, and with weights from a checkpoint.
del sys.modules["flax"], sys.modules["flax.nnx"]
from fadex.caching import load_sampler
from fadex.core import checkpoint
baked = load_sampler(f"{folder}/baked.fadex")
given = load_sampler(f"{folder}/given.fadex", params=checkpoint.restore(f"{folder}/weights"))
np.savez(f"{folder}/out.npz", alone=alone, baked=baked(x, y, null_cond=null),
         given=given(x, y, null_cond=null, guidance=1.5), five=baked(x[:2], y[:2],
         null_cond=null[:2], guidance=5.0))
"""


@pytest.mark.smoke
def test_an_exported_sampler_runs_in_a_process_without_the_models_code(dit, tmp_path):
    denoiser, params = dit
    x, y, null = noise(), jnp.array([0, 3, 4]), jnp.full(3, 5)
    shared = dict(timesteps=TIMES, plan=PLAN)
    exported = dict(shape=SHAPE, cond=y, guidance=3.0, **shared)
    export_sampler(denoiser, params, path=tmp_path / "baked.fadex", **exported)
    export_sampler(denoiser, params, path=tmp_path / "given.fadex", include_params=False,
                   site="module", **exported)
    checkpoint.save(tmp_path / "weights", nnx.to_pure_dict(params))
    for name, array in (("x", x), ("y", y), ("null", null)):
        np.save(tmp_path / f"{name}.npy", array)
    sizes = [(tmp_path / f"{name}.fadex").stat().st_size for name in ("baked", "given")]
    assert sizes[0] > 4 * sum(leaf.size for leaf in jax.tree.leaves(params))

    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    out = np.load(tmp_path / "out.npz")
    call = lambda g, n=3, **kwargs: cached_sample(
        denoiser, params, x[:n], y[:n], guidance=g, null_cond=null[:n], **shared, **kwargs
    )
    close(out["alone"], call(3.0))
    close(out["baked"], call(3.0))
    close(out["given"], call(1.5, site="module"))
    close(out["five"], call(5.0, 2))
    assert not list(tmp_path.glob(".*"))  # no temporary file stays behind


def small(params, x, t, cond):
    t = t.reshape((-1,) + (1,) * (x.ndim - 1))
    shift = 0.0 if cond is None else cond["shift"][:, None, None] * cond["scale"][:, None, None]
    return params["w"] * (jnp.tanh(x) * (1 + t**2) + shift)


SMALL, WEIGHTS = Denoiser(small), {"w": jnp.float32(0.7)}
COND = {"shift": jnp.array([1.0, 2.0]), "scale": jnp.array([0.5, 0.2])}


def test_dict_conditions_intervals_and_trained_samplers_are_exported(compiles):
    interval = (0.3, 0.7)
    schedule = uniform_schedule(STEPS, 3).with_breaks(guidance_breaks(TIMES, interval))
    shared = dict(timesteps=TIMES, plan=make_plan(schedule, taylorseer(1)),
                  guidance_interval=interval, cfg_channels=1)
    loaded = load_sampler(
        export_sampler(SMALL, WEIGHTS, shape=(5, 2), cond=COND, guidance=2.0, **shared)
    )
    assert loaded.header["anchors"] == list(schedule.anchors)
    assert loaded.header["nfe"] == schedule.nfe and loaded.header["guidance"] == 2.0
    null = jax.tree.map(lambda a: -a, COND)
    x = noise(2, (5, 2))
    for guidance in (2.0, 4.5):
        want = cached_sample(SMALL, WEIGHTS, x, COND, null_cond=null, guidance=guidance, **shared)
        close(loaded(x, COND, null_cond=null, guidance=guidance), want)
    close(jax.jit(lambda x: loaded(x, COND, null_cond=null, guidance=4.5))(x), want)
    with compiles() as count:
        jax.block_until_ready(loaded(x, COND, null_cond=null, guidance=7.5))
    assert count() == 0


@pytest.mark.parametrize("how", ["dmd", "fuca", "policy", "function"])
def test_every_cached_sampler_can_leave_as_a_file(how):
    schedule, options, run = uniform_schedule(STEPS, 3), {}, cached_sample
    if how == "fuca":
        plan = FucaPlan(schedule, fuca_tables(TIMES, schedule)._replace(guidance=2.0))
        keywords, run = plan._asdict(), fuca_sample
        given = dict(plan=plan)
    elif how == "policy":
        plan, options, run = teacache(0.3, signal="latent"), dict(cooldown=2), adaptive_sample
        keywords, given = dict(policy=plan, **options), dict(plan=plan, options=options)
        schedule = None
    elif how == "function":
        keywords, run = dict(schedule=schedule, revise="none"), fuca_sample
        given = dict(run=functools.partial(run, **keywords))
    else:
        keywords = given = dict(plan=dmd(schedule, rank=1))
    content = export_sampler(SMALL, WEIGHTS, shape=(5, 2), cond=COND, guidance=2.0,
                             timesteps=TIMES, **given)
    loaded = load_sampler(content)
    header = loaded.header
    assert header["num_steps"] == STEPS and header["run"] == run.__name__
    assert header["nfe"] == (None if schedule is None else schedule.nfe)
    assert header["anchors"] == (None if schedule is None else list(schedule.anchors))
    null = jax.tree.map(lambda a: -a, COND)
    x = noise(2, (5, 2))
    want = run(SMALL, WEIGHTS, x, COND, timesteps=TIMES, null_cond=null, guidance=2.0, **keywords)
    close(loaded(x, COND, null_cond=null), want)
    one = jax.tree.map(lambda a: a[1:], COND)  # the batch is open
    alone = loaded(x[1:], one, null_cond=jax.tree.map(lambda a: -a, one))
    assert alone.shape == (1, 5, 2)
    if how != "policy":  # which decides for the whole batch
        close(alone, want[1:])


def test_what_an_export_runs_is_checked_by_name():
    shared = dict(shape=(5, 2), timesteps=TIMES)
    schedule = uniform_schedule(STEPS, 3)
    fuca = FucaPlan(schedule, fuca_tables(TIMES, schedule)._replace(guidance=2.0))
    function = functools.partial(cached_sample, plan=PLAN)
    stats = functools.partial(function, return_stats=True)
    for error, given, message in (
        (ValueError, {}, "plan, run: expected exactly one"),
        (ValueError, dict(plan=PLAN, run=function), "plan, run: expected exactly one"),
        (TypeError, dict(plan=taylorseer(1)), "plan: expected a ForecastPlan, .* got WeightRule"),
        (ValueError, dict(plan=fuca, site="crf"), "site, cache_dtype: a FucaPlan serves"),
        (ValueError, dict(plan=fuca, cond=COND, guidance=4.0), "guidance: the tables were profil"),
        (ValueError, dict(run=function, site="crf"), "site, cache_dtype, options: bind them to"),
        (ValueError, dict(run=stats), "cached_sample: an export returns the samples alone"),
    ):
        with pytest.raises(error, match=message):
            export_sampler(SMALL, WEIGHTS, **shared, **given)


def test_stochastic_samplers_take_a_key():
    times, sampler = timestep_indices(STEPS), ddim(eta=1.0)
    epsilon = Denoiser(lambda p, x, t, c: 0.5 * x * jnp.cos(t / 1000)[:, None, None])
    shared = dict(timesteps=times, plan=PLAN, sampler=sampler)
    loaded = load_sampler(export_sampler(epsilon, (), shape=(5, 2), batch=2, **shared))
    x, key = noise(2, (5, 2)), jax.random.key(3)
    close(loaded(x, key=key), cached_sample(epsilon, (), x, None, key=key, **shared))
    close(loaded(x, key=jax.random.key_data(key)), loaded(x, key=key))
    with pytest.raises(ValueError, match="key: expected the arrays"):
        loaded(x)
    with pytest.raises(ValueError, match="x: exported for a batch of 2, got shape"):
        loaded(noise(3, (5, 2)), key=key)


@pytest.mark.smoke
@pytest.mark.parametrize("batch", [None, 2], ids=["any batch", "batch of 2"])
def test_one_file_holds_programs_for_every_platform(dit, batch):
    denoiser, params = dit
    content = export_sampler(
        denoiser, params, shape=SHAPE, cond=jnp.zeros(1, int), timesteps=TIMES, plan=PLAN,
        site="module", batch=batch, platforms=("cpu", "tpu", "cuda"), include_params=False,
    )
    for platform in ("cpu", "tpu", "cuda"):
        loaded = load_sampler(content, params=params, platform=platform)
        assert loaded.exported.platforms == (platform,)
        # Kernels of a fixed batch are in the program; an open batch runs plain XLA.
        text = loaded.exported.mlir_module()
        kernels = "tpu_custom_call" in text or "triton" in text
        assert kernels == (platform != "cpu" and batch is not None)
    y = jnp.array([0, 3])
    want = cached_sample(denoiser, params, noise(2), y, timesteps=TIMES, plan=PLAN, site="module")
    close(load_sampler(content, params=params)(noise(2), y), want)


def test_damage_and_misuse_are_named(tmp_path):
    shared = dict(shape=(5, 2), timesteps=TIMES, plan=PLAN)
    content = export_sampler(SMALL, WEIGHTS, include_params=False, cond=COND, **shared)
    start = 48 + int.from_bytes(content[8:16], "little")
    flipped = lambda i: content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]
    for bad, message in (
        (b"PK" + content[2:], "is not an exported sampler"),
        (b"", "is not an exported sampler"),
        (content[:30], "header's checksum does not match"),
        (flipped(60), "header's checksum does not match"),
        (flipped(20), "header's checksum does not match"),
        (flipped(start + 100), "program's checksum does not match"),
        (content[:-1], "is damaged: .* bytes expected"),
        (content + b"x", "is damaged: .* bytes expected"),
    ):
        with pytest.raises(ValueError, match=message):
            load_sampler(bad, params=WEIGHTS)
    path = tmp_path / "bad.fadex"
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"source: .*bad.fadex is damaged"):
        load_sampler(path, params=WEIGHTS)
    with pytest.raises(FileNotFoundError, match="source: no exported sampler at"):
        load_sampler(tmp_path / "none.fadex")
    with pytest.raises(ValueError, match="platform: exported for cpu, got 'tpu'"):
        load_sampler(content, params=WEIGHTS, platform="tpu")
    with pytest.raises(ValueError, match="params: required"):
        load_sampler(content)
    with pytest.raises(ValueError, match=r"params: expected the arrays \['w'\], got \['v'\]"):
        load_sampler(content, params={"v": 1.0})
    with pytest.raises(ValueError, match=r"params/w: expected float32\[\], got float32\[2\]"):
        load_sampler(content, params={"w": jnp.ones(2)})
    loaded, x = load_sampler(content, params=WEIGHTS), noise(2, (5, 2))
    for call, message in (
        (lambda: loaded(x), "cond: expected the arrays"),
        (lambda: loaded(x[..., :1], COND), r"x: expected float32\[2, 5, 2\], got"),
        (lambda: loaded(x, COND | {"scale": jnp.ones(3)}), r"cond/scale: expected float32\[2\]"),
        (lambda: loaded(x, COND, guidance=2.0), "guidance: exported without the null branch"),
        (lambda: export_sampler(SMALL, WEIGHTS, guidance=2.0, **shared), "cond: required for"),
        (lambda: export_sampler(SMALL, WEIGHTS, platforms=("gpu",), **shared), "platforms: expec"),
        (lambda: export_sampler(SMALL, WEIGHTS, cond=COND, guidance=2.0, guided=False, **shared),
         "guided: False"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    header = json.loads(content[48:start])
    assert header["operands"]["params"] == [{"path": "w", "dtype": "float32", "shape": []}]
