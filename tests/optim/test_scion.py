"""Scion against NumPy and against a peer's recorded steps; the constraint; clipping."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import NormSpec, norm, scale_by_lmo, scion, scion_init

# Programs that run for a moment on a few numbers: nearly all of the time would be LLVM's.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
GOLDEN = Path(__file__).parents[1] / "golden"
SPECS = {
    "w": NormSpec("spectral", radius=2.0, method="svd"),
    "h": NormSpec("linf", radius=5.0, scale="fan_in"),
    "e": NormSpec("per_input", radius=0.5), "o": NormSpec("per_output"), "b": NormSpec("rms"),
}
SHAPES = {"w": (4, 6), "h": (6, 3), "e": (5, 4), "o": (4, 3), "b": (6,)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s) for k, s in SHAPES.items()}


def numpy_direction(name, g):
    """-lmo on the unit ball and the dual norm, written out for each norm."""
    if name == "w":
        u, s, vt = np.linalg.svd(g, full_matrices=False)
        return np.sqrt(6 / 4) * u @ vt, np.sqrt(6 / 4) * s.sum()
    if name == "h":
        return np.sign(g) / 6, np.abs(g).sum() / 6
    if name == "e":
        size = np.linalg.norm(g, axis=1, keepdims=True)
        return 2 * g / size, 2 * size.sum()
    if name == "o":
        size = np.linalg.norm(g, axis=0, keepdims=True)
        return g / size / 2, size.sum() / 2
    return g / np.sqrt(np.mean(g**2)), np.sqrt(g.size) * np.linalg.norm(g)


NUMBERS = {"learning_rate": 0.1, "momentum": 0.3}
# No hyperparameter may freeze at its first value.
SCHEDULES = {
    "learning_rate": lambda t: 0.1 / (1 + 0.3 * t), "momentum": lambda t: 0.3 + 0.05 * t,
    "clip": lambda t: 0.02 * (1 + t), "weight_decay": lambda t: 0.2 / (1 + 0.5 * t),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [NUMBERS | {"clip": 0.1, "weight_decay": 0.1},
     SCHEDULES | {"mask": {k: k != "b" for k in SHAPES}},
     SCHEDULES | {"constrained": True, "clip_scope": "global"}],
    ids=["clipped", "schedules", "constrained schedules"],
)
def test_steps_are_the_formulas(options):
    at = lambda name, t, default: (
        (lambda v: v(t) if callable(v) else v)(options.get(name, default)))
    steps = 6
    grads = [draw(t + 1) for t in range(steps)]
    with jax.enable_x64(True):
        opt = scion(norm=SPECS, **options)

        def step(carry, g):
            x, state = carry
            updates, state = opt.update(g, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), x

        stacked = {k: np.stack([g[k] for g in grads]) for k in SHAPES}
        run = jit(lambda x, g: jax.lax.scan(step, (x, opt.init(x)), g)[1])
        points = run(draw(0), stacked)
    want, d = draw(0), {k: np.zeros(s) for k, s in SHAPES.items()}
    for t, g in enumerate(grads):
        m, rate, clip = at("momentum", t, 0), at("learning_rate", t, 0), at("clip", t, None)
        d = {k: (1 - m) * d[k] + m * g[k] for k in g}
        found = {k: numpy_direction(k, d[k]) for k in d}
        total = sum(SPECS[k].radius * found[k][1] for k in d)
        for k, (direction, dual) in found.items():
            share = 1.0 if clip is None else min(
                1.0, clip * (total if "clip_scope" in options else dual))
            decay = at("weight_decay", t, 0.0) * options.get("mask", {}).get(k, True)
            pull = rate * share * options.get("constrained", False) + rate * decay
            want[k] = (1 - pull) * want[k] - rate * share * SPECS[k].radius * direction
            np.testing.assert_allclose(points[k][t], want[k], rtol=0, atol=1e-12)


def test_constrained_weights_never_leave_their_balls():
    params = {k: v.astype(np.float32) for k, v in draw(0).items()}
    rng = np.random.default_rng(1)
    grads = {k: rng.standard_normal((50, *s)).astype(np.float32) for k, s in SHAPES.items()}

    def run(params, grads, clip):
        opt = scion(0.3, 0.5, SPECS, constrained=True, clip=clip)
        size = lambda x: {k: norm(SPECS[k], x[k]) / SPECS[k].radius for k in x}
        params = jax.tree.map(jnp.divide, params, size(params))  # on the spheres

        def step(carry, g):
            x, state = carry
            updates, state = opt.update(g, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), jnp.stack(jax.tree.leaves(size(x)))

        return jax.lax.scan(step, (params, opt.init(params)), grads)[1]

    # A huge s never clips.
    sizes = jit(jax.vmap(run, (None, None, 0)))(params, grads, jnp.array([1e9, 0.5]))
    assert np.all(sizes.max((1, 2)) <= 1 + 1e-5) and np.all(sizes.max((1, 2)) > 0.5)


@pytest.mark.parametrize("constrained", [False, True])
def test_fifty_steps_equal_a_peers(constrained):
    # Recorded from pytorch-optimizer 4.1.0 (tests/golden/make_scion_golden.py); its layout has
    # the outputs first.
    with np.load(GOLDEN / "scion.npz") as file:
        data = {k: file[k] for k in file.files}
    specs = {
        "input": NormSpec("spectral", 2.0, scale="max", method="svd"),
        "hidden": NormSpec("spectral", 2.0, method="svd"),
        "conv": NormSpec("spectral_conv", 2.0, method="svd"), "embed": NormSpec("per_input", 2.0),
        "rows": NormSpec("per_output", 2.0), "head": NormSpec("linf", 2.0, scale="fan_in"),
        "bias": NormSpec("rms", 2.0),
    }
    axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    ours = lambda a, lead=0: a.transpose(
        *range(lead), *(lead + i for i in axes[a.ndim - lead]))
    with jax.enable_x64(True):
        x = {k: ours(data[f"start/{k}"]) for k in specs}
        grads = {k: ours(data[f"grads/{k}"], 1) for k in specs}
        opt = scion(0.05, 0.1, specs, constrained=constrained)

        def step(carry, g):
            x, state = carry
            updates, state = opt.update(g, state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jit(lambda x, g: jax.lax.scan(step, (x, opt.init(x)), g)[0][0])(x, grads)
        name = "constrained" if constrained else "unconstrained"
        for k in specs:
            np.testing.assert_allclose(x[k], ours(data[f"{name}/{k}"]), rtol=0, atol=1e-6)


def test_initial_weights_lie_on_their_spheres():
    params = {k: jnp.ones(s, jnp.bfloat16 if k == "h" else jnp.float32)
              for k, s in SHAPES.items()}
    layers = {"stacked": jnp.zeros((3, 4, 6)), "alike": jnp.zeros((4, 6))}
    build = jit(lambda key, p, layers: (
        scion_init(key, p, SPECS), scion_init(key, layers, SPECS["w"])))
    start, layers = build(jax.random.key(0), params, layers)
    for k in SHAPES:
        assert start[k].dtype == params[k].dtype
    ones = {"h": np.abs(np.asarray(start["h"], np.float32)) * 6 / 5,
            "e": np.linalg.norm(start["e"], axis=1) / 2 / 0.5,
            "o": np.linalg.norm(start["o"], axis=0) * 2,
            "w": np.linalg.svd(start["w"], compute_uv=False) / (2 * np.sqrt(6 / 4)),
            "b": start["b"]}  # vectors stay as they are
    for k, size in ones.items():
        np.testing.assert_allclose(size, 1.0, rtol=0.01 if k == "h" else 1e-5)
    # Layers of one shape do not start alike, whether stacked or apart.
    matrices = [*layers["stacked"], layers["alike"]]
    for i, a in enumerate(matrices):
        np.testing.assert_allclose(np.linalg.svd(a)[1], 2 * np.sqrt(6 / 4), rtol=1e-5)
        assert all(np.abs(a - b).max() > 0.1 for b in matrices[:i])


def test_lmo_piece_in_a_chain_is_unconstrained_scion():
    params = {k: jnp.asarray(v, jnp.float32) for k, v in draw(0).items()}
    chain = optax.chain(optax.ema(0.7, debias=False), scale_by_lmo(SPECS, clip=0.1),
                        optax.scale_by_learning_rate(0.1))
    whole = scion(0.1, 0.3, SPECS, clip=0.1)
    a, b = chain.init(params), whole.init(params)
    update = jit(lambda g, a, b: (*chain.update(g, a), *whole.update(g, b, params)))
    for t in range(3):
        g = {k: jnp.asarray(v, jnp.float32) for k, v in draw(t + 1).items()}
        ua, a, ub, b = update(g, a, b)
        for k in g:
            np.testing.assert_allclose(ua[k], ub[k], atol=2e-6)


def test_parameters_may_be_python_numbers():
    params = {"a": 1.0, "b": -2.0}
    opt = scion(0.1, 1.0, "linf")
    updates, _ = opt.update(params, opt.init(params), params)
    np.testing.assert_allclose([updates["a"], updates["b"]], [-0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate: must lie in"),
        ({"learning_rate": 0.1, "momentum": 0.0}, r"momentum: must lie in \(0, 1\]"),
        ({"learning_rate": 0.1, "momentum": 1.5}, "momentum: must lie in"),
        ({"learning_rate": 0.1, "clip": -1.0}, "clip: must lie in"),
        ({"learning_rate": 0.1, "clip": 1.0, "clip_scope": "all"}, "clip_scope: expected"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        scion(**arguments)


def test_bad_calls_say_what_is_wrong():
    params = {"w": jnp.ones((2, 2))}
    opt = scion(0.1)
    with pytest.raises(ValueError, match="params is required by scion"):
        opt.update(params, opt.init(params))
    with pytest.raises(ValueError, match="norm of 'w'"):
        scion(0.1, norm={"w": NormSpec("spectral")}).init({"w": jnp.ones(2)})
