"""AcceleGrad#: rates of the scalar anchor, one training step in NumPy, invariants, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import (
    NormSpec,
    accelegrad,
    accelegrad_eval_params,
    accelegrad_sharp,
    certificate_schedule,
    entropy_map,
    norm,
    pnorm_map,
)
from fadex.optim.accelegrad_sharp import AcceleGradSharpState


def trajectory(opt, f, x0, steps, grad=None):
    """f at the geometry iterate after every step."""
    grad = grad or jax.grad(f)

    def step(carry, _):
        x, state = carry
        updates, state = opt.update(grad(x), state, x)
        return (optax.apply_updates(x, updates), state), f(state.y)

    return jax.lax.scan(step, (x0, opt.init(x0)), None, length=steps)[1]


def slope(values, first=30, last=None):
    t = np.arange(1, len(values) + 1)
    window = (t >= first) & (t <= (last or len(t)))
    return np.polyfit(np.log(t[window]), np.log(np.asarray(values, np.float64)[window]), 1)[0]


# ---------------------------------------------------------------- rates of the scalar anchor


@pytest.mark.smoke
def test_l2_rate_is_accelerated_whatever_the_diameter():
    # A log-uniform spectrum makes power laws exact: f ~ T^-2 accelerated, T^-1 for descent.
    steps, diameters = 10_000, [0.1, 0.5, 1.0, 2.0, 10.0]
    with jax.enable_x64(True):
        spectrum = jnp.geomspace(1e-9, 1, 600)
        x0 = jnp.full(600, 600**-0.5)
        f = lambda x: 0.5 * jnp.sum(spectrum * x * x)
        grad = lambda x: spectrum * x
        run = lambda d: trajectory(accelegrad_sharp(diameter=d), f, x0, steps, grad)
        values = np.asarray(jax.jit(jax.vmap(run))(jnp.array(diameters)))
        euclid = jax.jit(lambda: trajectory(accelegrad(1.0), f, x0, 300, grad))()
        descent = jax.lax.scan(lambda x, _: (x - grad(x), f(x)), x0, None, length=3000)[1]
    for diameter, curve in zip(diameters, values):
        assert slope(curve, last=3000) <= (-1.85 if diameter == 10 else -1.9)
    final = values[:, -1] * steps**2
    print("f(y_T) T² at D =", diameters, final)
    assert np.all(final[1:4] <= 0.2) and final[1:4].max() <= 1.5 * final[1:4].min()
    assert -1.05 <= slope(descent) <= -0.95
    np.testing.assert_allclose(values[2, :300], euclid, rtol=1e-10)


def test_linf_and_spectral_rates_are_accelerated():
    with jax.enable_x64(True):
        size = 1000
        f = lambda x: 0.125 * (
            x[0] ** 2 + jnp.sum(jnp.diff(x) ** 2) + x[-1] ** 2) - 0.25 * x[0]
        best = 1 - jnp.arange(1, size + 1) / (size + 1)
        distance = float(jnp.linalg.norm(best))
        gap = lambda x: f(x) - f(best)
        factors = np.array([0.1, 0.3, 1.0, 3.0, 10.0])
        run = lambda d: trajectory(
            accelegrad_sharp(diameter=d, norm="linf"), gap, jnp.zeros(size), 2000)
        curves = np.asarray(jax.jit(jax.vmap(run))(distance * factors))
        for factor, curve in zip(factors, curves):
            print(f"linf, D = {factor:g} ‖x*‖: slope {slope(curve):.2f}, "
                  f"f T²/‖x*‖² {curve[-1] * 2000**2 / distance**2:.2f}")
        assert slope(curves[2]) <= -1.8

        left, right = jnp.geomspace(1e-5, 1, 24), jnp.geomspace(1e-4, 1, 16)
        f = lambda x: 0.5 * jnp.sum(left[:, None] * right * x * x)
        x0 = jnp.full((24, 16), (24 * 16) ** -0.5)
        spec = NormSpec("spectral", scale="unit", method="svd")
        curve = jax.jit(lambda: trajectory(
            accelegrad_sharp(diameter=1.0, norm=spec), f, x0, 2000))()
        print("spectral: slope", slope(curve))
        assert slope(curve) <= -1.8


def test_constant_step_is_textbook_linear_coupling_and_meets_its_bound():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((8, 8))
    hessian = matrix @ matrix.T
    eta, x0, steps = 1 / np.linalg.norm(hessian, 2), rng.standard_normal(8), 60
    # A large G makes the adaptive step constant: η = 2D/√(G² + S) -> 2D/G.
    opt = accelegrad_sharp(
        diameter=eta * 1e9 / 2, lipschitz=1e9, weight_schedule="linear")
    with jax.enable_x64(True):
        def step(carry, _):
            x, state = carry
            updates, state = opt.update(hessian @ x, state, x)
            return (x + updates, state), state.y
        start = (jnp.asarray(x0), opt.init(jnp.asarray(x0)))
        ys = jax.lax.scan(step, start, None, length=steps)[1]
    y = z = x0
    for t in range(steps):
        a = (t + 2) / 2
        x = z / a + (1 - 1 / a) * y
        y, z = x - eta * hessian @ x, z - a * eta * hessian @ x
        np.testing.assert_allclose(ys[t], y, rtol=0, atol=1e-12)
        value = 0.5 * y @ hessian @ y
        assert value <= 2 * (x0 @ x0) / (eta * (t + 2) ** 2)


def test_alternative_readings_of_the_template_keep_the_rate():
    with jax.enable_x64(True):
        spectrum = jnp.geomspace(1e-6, 1, 100)
        x0 = jnp.full(100, 0.1)
        f = lambda x: 0.5 * jnp.sum(spectrum * x * x)
        for options in (
            {"anchor": "dual_averaging"}, {"lagged": True}, {"weight_schedule": "linear"},
            {"radius": 2.0}, {"norm": NormSpec("l2", radius=0.5)},
        ):
            opt = accelegrad_sharp(diameter=1.0, **options)
            curve = jax.jit(lambda opt=opt: trajectory(opt, f, x0, 1000))()
            print(options, slope(curve))
            assert slope(curve, 30, 300) <= -1.6, options


def test_radius_keeps_the_anchor_in_its_ball():
    opt = accelegrad_sharp(diameter=50.0, radius=0.5)
    x0 = jnp.array([1.0, 2.0])
    state = opt.init(x0)
    for _ in range(3):
        _, state = opt.update(jnp.array([1.0, -1.0]), state, x0)
        np.testing.assert_allclose(jnp.linalg.norm(state.z - x0), 0.5, rtol=1e-5)


# -------------------------------------------------- anchors and geometries beyond the Euclidean


def test_l1_geometry_needs_and_uses_a_mirror_anchor():
    with pytest.raises(ValueError, match="'l1' needs anchor_mirror=pnorm_map"):
        accelegrad_sharp(diameter=1.0, norm="l1")
    with pytest.raises(ValueError, match="'l1' is not bounded"):
        accelegrad_sharp(diameter=1.0, norm=lambda p: "l1").init(jnp.ones(3))
    with jax.enable_x64(True):
        size = 200
        spectrum = jnp.geomspace(1e-5, 1, size)
        target = jnp.zeros(size).at[jnp.array([3, 50, 120])].set(jnp.array([0.5, -0.3, 0.2]))
        f = lambda x: 0.5 * jnp.sum(spectrum * (x - target) ** 2)
        opt = accelegrad_sharp(diameter=1.0, norm="l1", anchor_mirror=pnorm_map(size=size))
        curve = jax.jit(lambda: trajectory(opt, f, jnp.zeros(size), 1500))()
        assert curve[-1] < 1e-3 * curve[0] and slope(curve, 100) <= -1.5


def test_entropy_keeps_both_iterates_on_the_simplex_and_finds_the_best_vertex():
    cost = jnp.array([0.3, 0.1, 0.5, 0.2])
    opt = accelegrad_sharp(
        diameter=2.0, norm="l1", geometry="mirror", mirror=entropy_map(),
        anchor_mirror=entropy_map(),
    )
    x = jnp.full(4, 0.25)
    state = opt.init(x)
    step = jax.jit(lambda x, s: opt.update(cost, s, x))
    for _ in range(60):
        updates, state = step(x, state)
        x = x + updates
        for point in (state.y, state.z, x):
            np.testing.assert_allclose(jnp.sum(point), 1.0, rtol=1e-5)
            assert float(point.min()) >= 0
    assert float(state.y[1]) > 0.95


def test_mirror_step_minimises_its_own_objective():
    # argmin η⟨g, y⟩ + D_ψ(y, x) on a grid of the 1-simplex, and by the p-norm's optimality.
    x, g, eta = np.array([0.3, 0.7]), np.array([1.0, -0.5]), 0.8
    y = entropy_map().step(jnp.array(x), jnp.array(g), jnp.array(eta))
    grid = np.linspace(1e-6, 1 - 1e-6, 200_001)
    points = np.stack([grid, 1 - grid], 1)
    objective = eta * points @ g + (points * np.log(points / x)).sum(1)
    np.testing.assert_allclose(y, points[objective.argmin()], atol=2e-5)
    m, x = pnorm_map(1.4), np.array([0.5, -1.0, 0.2])
    g = np.array([0.3, 0.1, -1.0])
    psi = lambda y: 0.5 / 0.4 * np.sum(np.abs(y) ** 1.4) ** (2 / 1.4)
    y = np.asarray(m.step(jnp.array(x), jnp.array(g), jnp.array(eta)), np.float64)
    value = lambda y: eta * g @ y + psi(y) - np.asarray(m.to_dual(jnp.array(x))) @ y
    rng = np.random.default_rng(0)
    assert all(value(y) <= value(y + 0.05 * rng.standard_normal(3)) for _ in range(200))


def test_anchor_steps_shrink_where_the_norm_exceeds_the_euclidean_one():
    # Spectral norm with c = √(N/K) = 1/2: ‖x‖ <= 2 ‖x‖₂, so the anchor's step shrinks by 4.
    params, g = jnp.zeros((16, 4)), jnp.ones((16, 4))
    for spec, factor in (("spectral", 0.25), (NormSpec("spectral", scale="unit"), 1.0),
                         (NormSpec("spectral", radius=0.5, scale="unit"), 0.25)):
        opt = accelegrad_sharp(diameter=1.0, norm=spec)
        _, state = opt.update(g, opt.init(params), params)
        dual = float(state.accumulator)
        np.testing.assert_allclose(state.z, -factor * 2 / dual * g, rtol=1e-5)
    opt = accelegrad_sharp(diameter=1.0, norm="l1", anchor_scale=0.01)
    _, state = opt.update(g, opt.init(params), params)
    np.testing.assert_allclose(state.z, -0.01 * 2 * g, rtol=1e-5)


# ------------------------------------------------------------------------ the training variant


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((4, 6)), "h": rng.standard_normal((6, 3)),
        "b": rng.standard_normal(6),
    }


SPECS = {
    "w": NormSpec("spectral", radius=2.0, method="svd"),
    "h": NormSpec("linf", radius=5.0, scale="fan_in"), "b": NormSpec("rms"),
}


def numpy_direction(name, g):
    """-lmo on the unit ball and the dual norm, in NumPy."""
    if name == "w":
        u, s, vt = np.linalg.svd(g, full_matrices=False)
        c = np.sqrt(6 / 4)
        return c * u @ vt, c * s.sum()
    if name == "h":
        return np.sign(g) / 6, np.abs(g).sum() / 6
    return g / np.sqrt(np.mean(g**2)), np.sqrt(g.size) * np.linalg.norm(g)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_scope": "global", "clip": 0.02}, {"clip": 0.05, "weight_decay": 0.1},
     {"coupling": 0.2, "weight_schedule": "constant"}, {"geometry": "lmo"}],
    ids=["default", "global", "decay", "constant", "lmo"],
)
def test_training_step_is_the_formula(options):
    params, steps = tree(), 6
    grads = [tree(s + 10) for s in range(steps)]
    grads[2] = {k: 0.01 * g for k, g in grads[2].items()}  # clipped here, not elsewhere
    with jax.enable_x64(True):
        opt = accelegrad_sharp(0.1, norm=SPECS, anchor_learning_rate=0.05, **options)
        x, state = jax.tree.map(jnp.asarray, params), None
        state = opt.init(x)
        update = jax.jit(opt.update)
        clip, scope = options.get("clip", 3.0), options.get("clip_scope", "layer")
        y, z = params, params
        v = {k: np.zeros_like(p) for k, p in params.items()}
        for t, g in enumerate(grads):
            alpha = lambda t: (1.0 if t <= 2 or "coupling" in options else (t + 1) / 4)
            tau = lambda t: options.get("coupling", 1 / alpha(t))
            point = {k: tau(t) * z[k] + (1 - tau(t)) * y[k] for k in params}
            np.testing.assert_allclose(x["w"], point["w"], rtol=0, atol=1e-12)
            a = alpha(t)
            found = {k: numpy_direction(k, g[k]) for k in g}
            total = sum(SPECS[k].radius * dual for k, (_, dual) in found.items())
            y, z = {}, dict(z)
            for k, (direction, dual) in found.items():
                v[k] = v[k] + (a * g[k]) ** 2
                z[k] = z[k] - 0.05 * a * g[k] / (np.sqrt(v[k]) + 1e-8)
                share = min(1.0, clip * (total if scope == "global" else dual))
                share = 1.0 if options.get("geometry") == "lmo" else share
                kept = (1 - 0.1 * options.get("weight_decay", 0.0)) * point[k]
                y[k] = kept - 0.1 * SPECS[k].radius * share * direction
            updates, state = update(jax.tree.map(jnp.asarray, g), state, x)
            x = optax.apply_updates(x, updates)
            for k in params:
                np.testing.assert_allclose(state.y[k], y[k], rtol=0, atol=1e-12)
                np.testing.assert_allclose(state.z[k], z[k], rtol=0, atol=1e-12)


def test_weight_decay_follows_its_mask():
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    zero = jax.tree.map(jnp.zeros_like, params)
    for mask in ({"w": True, "b": False}, lambda p: {"w": True, "b": False}):
        opt = accelegrad_sharp(0.5, norm="linf", weight_decay=0.2, mask=mask)
        _, state = opt.update(zero, opt.init(params), params)
        np.testing.assert_allclose(state.y["w"], 0.9, rtol=1e-6)
        np.testing.assert_array_equal(state.y["b"], 1.0)


@pytest.mark.parametrize("name", ["spectral", "linf", "per_output", "rms"])
def test_constrained_iterates_never_leave_their_balls(name):
    spec = NormSpec(name, radius=0.7)
    opt = accelegrad_sharp(0.3, norm=spec, constrained=True, anchor_learning_rate=0.5)

    def step(carry, key):
        x, state = carry
        g = jax.random.normal(key, x.shape) * jnp.exp(3 * jax.random.normal(key))
        updates, state = opt.update(g, state, x)
        x = x + updates
        sizes = [norm(spec, p) for p in (x, state.y, state.z)]
        return (x, state), jnp.stack(sizes)

    x0 = jnp.zeros((6, 9))
    sizes = jax.lax.scan(step, (x0, opt.init(x0)), jax.random.split(jax.random.key(0), 100))[1]
    # The polar factor of 6 Newton-Schulz steps may exceed 1 by 2.6e-3.
    assert float(sizes.max()) <= 0.7 * (1.003 if name == "spectral" else 1 + 1e-5)
    assert float(sizes.max()) > 0.5


def test_stacked_layers_train_as_separate_layers():
    rng = np.random.default_rng(0)
    stacked = jnp.asarray(rng.standard_normal((3, 4, 5)), jnp.float32)
    g = jnp.asarray(rng.standard_normal((3, 4, 5)) * np.array([1, 1e-3, 1e-5])[:, None, None],
                    jnp.float32)
    opt = accelegrad_sharp(0.1, norm="spectral")
    together, _ = opt.update(g, opt.init(stacked), stacked)
    for i in range(3):
        alone, _ = opt.update(g[i], opt.init(stacked[i]), stacked[i])
        np.testing.assert_allclose(together[i], alone, atol=1e-6)


def test_grouping_equal_shapes_changes_nothing():
    params = {k: jnp.asarray(v, jnp.float32) for k, v in tree().items()}
    params["u"] = 2 * params["w"] + 1
    results = []
    for batch in (False, True):
        opt = accelegrad_sharp(0.1, batch_leaves=batch, norm=lambda p: {
            "w": "spectral", "u": "spectral", "h": "linf", "b": "rms"})
        results.append(opt.update(params, opt.init(params), params)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), *results)


def test_recomputed_y_is_the_y_that_was_not_kept():
    x0 = jnp.array([1.0, -2.0, 0.5])
    full = accelegrad_sharp(0.1, norm="linf", coupling=0.1)
    small = accelegrad_sharp(0.1, norm="linf", coupling=0.1, recompute_y=True)
    a, b, sa, sb = x0, x0, full.init(x0), small.init(x0)
    assert sb.y == () and isinstance(sb, AcceleGradSharpState)
    for _ in range(5):
        ua, sa = full.update(a, sa, a)
        ub, sb = small.update(b, sb, b)
        a, b = a + ua, b + ub
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(accelegrad_eval_params(sb, b, coupling=0.1), sa.y, atol=1e-6)
    with pytest.raises(ValueError, match="coupling: this state keeps no y"):
        accelegrad_eval_params(sb, b)


def test_state_is_twelve_bytes_per_parameter_and_less_on_request():
    params = jnp.zeros((64, 64), jnp.bfloat16)
    wide = params.astype(jnp.float32)
    per_parameter = lambda opt, p: sum(
        leaf.nbytes for leaf in jax.tree.leaves(opt.init(p))) / params.size
    np.testing.assert_allclose(per_parameter(accelegrad_sharp(0.1), params), 12, atol=0.01)
    np.testing.assert_allclose(per_parameter(accelegrad_sharp(diameter=1.0), params), 8, atol=0.01)
    small = accelegrad_sharp(
        0.1, coupling=0.1, recompute_y=True, accumulator_dtype=jnp.bfloat16)
    np.testing.assert_allclose(per_parameter(small, wide), 6, atol=0.01)
    np.testing.assert_allclose(
        per_parameter(accelegrad_sharp(0.1, average=True), params), 16, atol=0.01)


def test_bfloat16_parameters_follow_the_float32_iterates():
    keys = jax.random.split(jax.random.key(0), 2)
    params = jax.random.normal(keys[0], (64, 64)).astype(jnp.bfloat16)
    # Steps far below a bfloat16 ulp add up in the iterates.
    opt = accelegrad_sharp(1e-5, norm="linf", anchor_learning_rate=1e-5)
    state, x = opt.init(params), params
    update = jax.jit(opt.update)
    g = jnp.ones((64, 64), jnp.bfloat16)
    for _ in range(400):
        updates, state = update(g, state, x)
        assert updates.dtype == jnp.bfloat16
        x = optax.apply_updates(x, updates)
    assert float(jnp.mean(state.y - params.astype(jnp.float32))) < -1e-3
    # Emission lands on the rounded iterate for nearly all entries, exactly in float32.
    opt = accelegrad_sharp(0.01, norm="linf")
    g = jax.random.normal(keys[1], (64, 64))
    updates, state = opt.update(g, opt.init(params), params)
    landed = optax.apply_updates(params, updates)
    exact = accelegrad_sharp(0.01, norm="linf", update_dtype=jnp.float32)
    target, _ = exact.update(g, exact.init(params), params)
    assert target.dtype == jnp.float32
    target = (params.astype(jnp.float32) + target).astype(jnp.bfloat16)
    assert float(jnp.mean(landed == target)) >= 0.97


def test_resync_decides_where_the_gradient_point_comes_from():
    x, moved, g = jnp.ones(3), jnp.full(3, 0.25), jnp.zeros(3)
    for resync, expected in (("auto", 0.25), ("params", 0.25), ("state", 1.0)):
        opt = accelegrad_sharp(diameter=1.0, resync=resync)
        _, state = opt.update(g, opt.init(x), moved)
        np.testing.assert_allclose(state.y, expected)


# ------------------------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def logistic():
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.isin(data.target, (3, 8))
    x = jnp.asarray(data.data[chosen] / 16, jnp.float32)
    y = jnp.asarray(np.where(data.target[chosen] == 3, 1.0, -1.0), jnp.float32)
    return x, y


def test_certified_rates_bound_the_last_iterate(logistic):
    x, y = logistic
    loss = lambda w: jnp.mean(jax.nn.softplus(-y * (x @ w["w"] + w["b"])))
    params = {"w": jnp.zeros(64), "b": jnp.zeros(())}
    for power, certificate in ((3 / 4, -1 / 4), (2 / 3, -1 / 3)):
        opt = accelegrad_sharp(
            certificate_schedule(0.1, power), norm="linf", coupling=0.1,
            anchor_learning_rate=0.1)
        curve = jax.jit(lambda opt=opt: trajectory(opt, loss, params, 3000))()
        found = slope(curve, 300)
        print(f"p = {power:.2f}: slope over the last decade {found:.2f}")
        assert found <= certificate


def test_noise_plateau_falls_with_the_batch(logistic):
    x, y = logistic
    loss = lambda w, x, y: jnp.mean(jax.nn.softplus(-y * (x @ w)))
    opt = accelegrad_sharp(0.01, norm="linf", coupling=0.1, anchor_learning_rate=0.1)

    @functools.partial(jax.jit, static_argnums=0)
    def plateau(batch, key):
        def step(carry, key):
            w, state = carry
            rows = jax.random.choice(key, len(y), (batch,))
            updates, state = opt.update(jax.grad(loss)(w, x[rows], y[rows]), state, w)
            return (w + updates, state), loss(state.y, x, y)
        start = (jnp.zeros(64), opt.init(jnp.zeros(64)))
        curve = jax.lax.scan(step, start, jax.random.split(key, 1500))[1]
        return jnp.mean(curve[-500:])

    levels = [float(plateau(batch, jax.random.key(0))) for batch in (4, 16, 64)]
    print("plateaus at B = 4, 16, 64:", levels)
    assert levels[1] <= 0.7 * levels[0] and levels[2] <= 0.7 * levels[1]


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.1, "diameter": 1.0}, "diameter: the diagonal anchor takes"),
        ({"learning_rate": 0.1, "anchor": "scalar", "geometry": "sharp"},
         "learning_rate: the scalar anchor with the sharp geometry"),
        ({"diameter": 1.0, "geometry": "lmo"}, "learning_rate: needed by the lmo geometry"),
        ({"diameter": 1.0, "anchor": "diagonal"}, "learning_rate: needed"),
        ({"diameter": 0.0}, "diameter: must lie in"),
        ({"learning_rate": -0.1}, "learning_rate: must lie in"),
        ({"learning_rate": 0.1, "clip": 0.0}, "clip: must lie in"),
        ({"learning_rate": 0.1, "clip_scope": "tensor"}, "clip_scope: expected"),
        ({"learning_rate": 0.1, "coupling": 1.5}, "coupling: must lie in"),
        ({"learning_rate": 0.1, "coupling": 0.0}, r"coupling: must lie in \(0, 1\]"),
        ({"learning_rate": 0.1, "weight_schedule": "constant"}, "coupling: with weight_schedule"),
        ({"learning_rate": 0.1, "recompute_y": True}, "recompute_y: .*got coupling=None"),
        ({"learning_rate": 0.1, "recompute_y": True, "coupling": 0.6}, "got coupling=0.6"),
        ({"geometry": "mirror"}, "mirror: a MirrorMap belongs"),
        ({"mirror": entropy_map()}, "mirror: a MirrorMap belongs"),
        ({"constrained": True}, "constrained: needs an LMO geometry"),
        ({"geometry": "lmo2"}, "geometry: expected one of"),
        ({"anchor": "vector"}, "anchor: expected one of"),
        ({"product": "sum"}, "product: expected one of"),
        ({"radius": -1.0}, "radius: must lie in"),
        ({"learning_rate": 0.1, "anchor_mirror": entropy_map()}, "anchor_mirror: belongs"),
        ({"norm": "spectrl"}, "name: expected one of"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        accelegrad_sharp(**arguments).init({"w": jnp.ones((2, 2))})


def test_bad_calls_say_what_is_wrong():
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    opt = accelegrad_sharp(0.1)
    with pytest.raises(ValueError, match="params is required by accelegrad_sharp"):
        opt.update(params, opt.init(params))
    with pytest.raises(ValueError, match="norm of 'b': the norm 'spectral' needs a matrix"):
        accelegrad_sharp(0.1, norm="spectral").init(params)
    with pytest.raises(ValueError, match="recompute_y: needs parameters with 32 bits"):
        accelegrad_sharp(0.1, norm="l2", coupling=0.1, recompute_y=True).init(
            jnp.ones(2, jnp.bfloat16))
