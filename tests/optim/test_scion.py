"""Scion against NumPy and against a peer's recorded steps; the constraint; clipping."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import NormSpec, norm, scale_by_lmo, scion, scion_init

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


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("constrained", "clip", "scope", "decay"),
    [(False, None, "layer", 0.0), (True, None, "layer", 0.0), (False, 0.1, "layer", 0.1),
     (True, 0.02, "global", 0.0)],
)
def test_steps_are_the_formulas(constrained, clip, scope, decay):
    with jax.enable_x64(True):
        opt = scion(0.1, 0.3, SPECS, constrained=constrained, clip=clip, clip_scope=scope,
                    weight_decay=decay)
        x = jax.tree.map(jnp.asarray, draw(0))
        want, d = draw(0), {k: np.zeros(s) for k, s in SHAPES.items()}
        state, update = opt.init(x), jax.jit(opt.update)
        for t in range(8):
            g = draw(t + 1)
            updates, state = update(jax.tree.map(jnp.asarray, g), state, x)
            x = optax.apply_updates(x, updates)
            d = {k: 0.7 * d[k] + 0.3 * g[k] for k in g}
            found = {k: numpy_direction(k, d[k]) for k in d}
            total = sum(SPECS[k].radius * found[k][1] for k in d)
            for k, (direction, dual) in found.items():
                share = 1.0 if clip is None else min(
                    1.0, clip * (total if scope == "global" else dual))
                pull = (0.1 * share if constrained else 0.0) + 0.1 * decay
                want[k] = (1 - pull) * want[k] - 0.1 * share * SPECS[k].radius * direction
                np.testing.assert_allclose(x[k], want[k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_constrained_weights_never_leave_their_balls(clip):
    params = scion_init(jax.random.key(0), {k: jnp.zeros(s) for k, s in SHAPES.items()}, SPECS)
    opt = scion(0.3, 0.5, SPECS, constrained=True, clip=clip)

    def step(carry, key):
        x, state = carry
        leaves, treedef = jax.tree.flatten(x)
        g = jax.tree.unflatten(treedef, [
            jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
            for i, leaf in enumerate(leaves)])
        updates, state = opt.update(g, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), jnp.stack([norm(SPECS[k], x[k]) / SPECS[k].radius for k in x])

    sizes = jax.lax.scan(step, (params, opt.init(params)),
                         jax.random.split(jax.random.key(1), 50))[1]
    assert float(sizes.max()) <= 1 + 1e-5 and float(sizes.max()) > 0.5


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
    ours = lambda a, lead=0: jnp.asarray(a.transpose(
        *range(lead), *(lead + i for i in axes[a.ndim - lead])))
    with jax.enable_x64(True):
        x = {k: ours(data[f"start/{k}"]) for k in specs}
        grads = {k: ours(data[f"grads/{k}"], 1) for k in specs}
        opt = scion(0.05, 0.1, specs, constrained=constrained)

        def step(carry, g):
            x, state = carry
            updates, state = opt.update(g, state, x)
            return (optax.apply_updates(x, updates), state), None

        (x, _), _ = jax.lax.scan(step, (x, opt.init(x)), grads)
        name = "constrained" if constrained else "unconstrained"
        for k in specs:
            np.testing.assert_allclose(x[k], ours(data[f"{name}/{k}"]), rtol=0, atol=1e-6)


def test_initial_weights_lie_on_their_spheres():
    params = {k: jnp.ones(s, jnp.bfloat16 if k == "h" else jnp.float32)
              for k, s in SHAPES.items()}
    start = scion_init(jax.random.key(0), params, SPECS)
    for k in SHAPES:
        assert start[k].dtype == params[k].dtype
        expected = 1.0 if k == "b" else SPECS[k].radius
        np.testing.assert_allclose(norm(SPECS[k], start[k]), expected, rtol=0.01)
    sigma = np.linalg.svd(start["w"], compute_uv=False)
    np.testing.assert_allclose(sigma, 2 * np.sqrt(6 / 4), rtol=1e-5)
    np.testing.assert_array_equal(start["b"], 1.0)  # vectors stay as they are
    stacked = scion_init(jax.random.key(0), {"w": jnp.zeros((3, 4, 6))}, SPECS["w"])["w"]
    assert np.abs(stacked[0] - stacked[1]).max() > 0.1


def test_lmo_piece_in_a_chain_is_unconstrained_scion():
    params = {k: jnp.asarray(v, jnp.float32) for k, v in draw(0).items()}
    chain = optax.chain(optax.ema(0.7, debias=False), scale_by_lmo(SPECS, clip=0.1),
                        optax.scale_by_learning_rate(0.1))
    whole = scion(0.1, 0.3, SPECS, clip=0.1)
    a, b = chain.init(params), whole.init(params)
    for t in range(3):
        g = {k: jnp.asarray(v, jnp.float32) for k, v in draw(t + 1).items()}
        ua, a = jax.jit(chain.update)(g, a)
        ub, b = jax.jit(whole.update)(g, b, params)
        for k in g:
            np.testing.assert_allclose(ua[k], ub[k], atol=2e-6)


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
