import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import dual_anchor, dual_anchor_batch_size, noise_gain


def reference_dual_ohm(operator, y0, num_steps):
    """The paper's z-form, step by step in NumPy: ``y_0 .. y_{N-1}``, stacked.

    `fadex.solvers.dual_ohm` takes this function's place (or its side) once it exists.
    """
    y, z, path = y0, np.zeros_like(y0), [y0]
    for k in range(num_steps - 1):
        image = operator(y)
        z = ((num_steps - k - 1) * z + (image - y)) / (num_steps - k)
        y = image - z
        path.append(y)
    return np.stack(path)


def halpern(operator, x0, num_steps):
    """OHM: the method whose terminal iterate dual-anchor shares; ``x_{N-1}``."""
    x = x0
    for k in range(num_steps - 1):
        x = x0 / (k + 2) + (k + 1) / (k + 2) * operator(x)
    return x


def follow(opt, field, y0, keys_or_steps):
    """Iterates ``[steps + 1, ...]`` under ``field(y)``, or ``field(y, x)`` for scanned ``x``."""
    length = keys_or_steps if isinstance(keys_or_steps, int) else None

    def body(carry, x):
        y, state = carry
        update, state = opt.update(field(y) if length else field(y, x), state, y)
        y = optax.apply_updates(y, update)
        return (y, state), y

    xs = None if length else keys_or_steps
    (_, state), path = jax.lax.scan(body, (y0, opt.init(y0)), xs, length)
    return jax.tree.map(lambda p, first: jnp.concatenate([first[None], p]), path, y0), state


def cayley(key, d):
    """A random rotation, as the Cayley transform of a skew matrix."""
    s = np.asarray(jax.random.normal(key, (d, d)), np.float64)
    s = (s - s.T) / np.sqrt(d)
    return np.linalg.solve(np.eye(d) + s, np.eye(d) - s)


def random_maps(count, d):
    """Pieces of nonexpansive maps with the fixed point 0, for :func:`composed`."""
    rng = np.random.default_rng(2)
    normal = rng.normal(size=(count, d))
    return {
        "rotation": np.linalg.qr(rng.normal(size=(count, d, d)))[0],
        "low": -rng.exponential(size=(count, d)), "high": rng.exponential(size=(count, d)),
        "normal": normal / np.linalg.norm(normal, axis=1, keepdims=True),
        "level": rng.exponential(size=count),
    }


def composed(m, y):
    """A rotation, two projections (box, half-space), a rotation back, a proximal step."""
    y = jnp.clip(m["rotation"] @ y, m["low"], m["high"])
    y = y - m["normal"] * jnp.maximum(m["normal"] @ y - m["level"], 0.0)
    y = m["rotation"] @ y
    return jnp.sign(y) * jnp.maximum(jnp.abs(y) - 0.01, 0.0)


@pytest.mark.smoke
def test_equals_the_papers_z_form_and_ohm_at_the_end():
    d, n = 12, 40
    q = cayley(jax.random.key(0), d)
    linear = lambda y: 0.95 * y @ q.T
    nonlinear = lambda y: np.clip(y @ q.T, -0.5, 0.7)
    y0 = np.asarray(jax.random.normal(jax.random.key(1), (d,)), np.float64)
    with jax.enable_x64(True):
        rotation = jnp.asarray(q)
        opt = dual_anchor(0.25, n)
        run = jax.jit(lambda y, clip: follow(
            opt,
            lambda y: (y - jnp.where(clip, jnp.clip(rotation @ y, -0.5, 0.7),
                                     0.95 * rotation @ y)) / 0.25,
            y, n - 1,
        )[0])
        for operator, clip in ((linear, False), (nonlinear, True)):
            path = run(jnp.asarray(y0), clip)
            assert path.dtype == jnp.float64
            np.testing.assert_allclose(path, reference_dual_ohm(operator, y0, n), atol=1e-12)
            if not clip:
                np.testing.assert_allclose(path[-1], halpern(operator, y0, n), atol=1e-12)
                # the residual's closed form, (y_0 - T^N y_0) / N
                power = np.linalg.matrix_power(0.95 * q, n)
                np.testing.assert_allclose(
                    path[-1] - operator(np.asarray(path[-1])), (y0 - power @ y0) / n, atol=1e-12
                )


@pytest.mark.parametrize("n", [2, 60])
def test_residual_of_nonexpansive_maps_obeys_the_bound(n):
    maps = jax.tree.map(jnp.float32, random_maps(200, 6))
    starts = jnp.asarray(np.random.default_rng(3).normal(size=(200, 6)) * 3, jnp.float32)
    opt = dual_anchor(1.0, n)

    @jax.jit
    @jax.vmap
    def ratios(m, y0):
        y = follow(opt, lambda y: y - composed(m, y), y0, n - 1)[0][-1]
        return jnp.sum((y - composed(m, y)) ** 2) * n**2 / (4 * jnp.sum(y0**2))

    found = np.asarray(ratios(maps, starts))
    assert found.max() <= 1.0
    # not for want of movement
    assert found.max() > 0.05


def test_bound_is_reached_by_a_rotation_and_only_at_the_end():
    # t^N = -1 makes the residual |1 - t^N| / N = 2 / N, the bound itself
    n = 50
    angle = np.pi / n
    q = jnp.asarray([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    y0 = jnp.array([1.0, 0.0])
    path, _ = jax.jit(lambda: follow(dual_anchor(1.0, n), lambda y: y - q @ y, y0, n - 1))()
    residual = jnp.linalg.norm(path - path @ q.T, axis=1)
    np.testing.assert_allclose(residual[-1], 2 / n, rtol=1e-4)
    # T = -I: on the way the residual is above the bound of a horizon that would end there
    path, _ = jax.jit(lambda: follow(dual_anchor(1.0, n), lambda y: 2 * y, y0, n - 1))()
    residual = 2 * jnp.linalg.norm(path, axis=1)
    assert residual[-1] <= 2 / n
    assert np.any(residual > 2 / (1 + np.arange(n)) * 1.5)


def halpern_gain(n, t):
    weight, total = 1.0, 0.0
    for k in range(n - 2, -1, -1):
        share = (k + 1) / (k + 2)
        total, weight = total + abs((1 - t) * weight * share) ** 2, weight * share * t
    return total


@pytest.mark.parametrize("n", [16, 256])
def test_noise_gain_is_that_of_the_iteration(n):
    t = np.array([-1.0, -0.5, 0.3, 0.99])
    opt = dual_anchor(1.0, n)
    pulses = jnp.eye(n - 1)  # noise in T y_k at one step

    @jax.jit
    def response():
        one = lambda t, pulse: follow(opt, lambda y, e: y - t * y - e, jnp.zeros(()), pulse)[0][-1]
        return jax.vmap(lambda t: jax.vmap(lambda p: (1 - t) * one(t, p))(pulses))(jnp.asarray(t))

    gain = np.sum(np.asarray(response(), np.float64) ** 2, axis=1)
    np.testing.assert_allclose(noise_gain(n, t), gain, rtol=1e-3, atol=1e-5)


def test_noise_gain_stays_below_one_and_a_half_where_halperns_grows():
    disk = np.exp(1j * np.linspace(0, np.pi, 201)) * np.linspace(0, 1, 11)[:, None]
    for n in (2, 16, 64, 256, 1024):
        gain = noise_gain(n, disk)
        assert gain.max() <= min(1.5, np.pi**2 / 4 - 1)
        np.testing.assert_allclose(gain.max(), noise_gain(n), rtol=1e-12)  # at t = -1
        assert halpern_gain(n, -1.0) >= (n if n > 2 else 1)
    # the limit
    np.testing.assert_allclose(noise_gain(1 << 14), np.pi**2 / 4 - 1, rtol=1e-4)
    # at a common step a = eta lambda the noise of SGD is a / (2 - a)
    a = np.geomspace(1e-3, 1.99, 50)
    assert np.all(noise_gain(1024, 1 - a) <= 0.41 * a / (2 - a))


def test_residual_times_horizon_is_flat_at_noise_of_one_over_the_horizon():
    # 64 seeds; the mean of 64 residual norms has a relative standard error below 4 %
    d, seeds = 20, 64
    q = cayley(jax.random.key(3), d)
    y0 = np.ones(d) / np.sqrt(d)
    flat, rival = [], []
    horizons = [8, 32, 128, 512]
    for n in horizons:
        noise = np.asarray(jax.random.normal(jax.random.key(n), (n - 1, seeds, d)))
        noise = noise / (n * np.sqrt(d))
        opt = dual_anchor(1.0, n)
        path = jax.jit(lambda start, noise, opt=opt: follow(
            opt, lambda y, e: y - y @ jnp.asarray(q.T, jnp.float32) - e, start, noise
        )[0][-1])(jnp.tile(jnp.asarray(y0, jnp.float32), (seeds, 1)), noise)
        x = x0 = np.tile(y0, (seeds, 1))
        for k in range(n - 1):
            x = x0 / (k + 2) + (k + 1) / (k + 2) * (x @ q.T + noise[k])
        for y, out in ((np.asarray(path, np.float64), flat), (x, rival)):
            out.append(n * np.mean(np.linalg.norm(y - y @ q.T, axis=1)))
    assert max(flat) / min(flat) <= 2
    slope = np.polyfit(np.log(horizons), np.log(rival), 1)[0]
    assert 0.3 < slope < 0.6  # towards sqrt(N)
    assert rival[-1] > 5 * flat[-1]


def test_strongly_monotone_field_at_batch_equal_to_the_horizon():
    # F = 0.3 I + skew of norm 1, N steps with batch N; 64 seeds
    d, seeds, mu = 20, 64, 0.3
    s = np.asarray(jax.random.normal(jax.random.key(5), (d, d)), np.float64)
    s = s - s.T
    field = mu * np.eye(d) + s / np.linalg.norm(s, 2)
    eta = mu / np.linalg.norm(field, 2) ** 2
    start = np.tile(np.ones(d) / np.sqrt(d), (seeds, 1))
    size = lambda y: np.mean(np.linalg.norm(y @ field.T, axis=1))
    found = {"dual": [], "ohm": [], "sgd": []}
    horizons = (400, 1600)
    for n in horizons:
        matrix = jnp.asarray(field.T, jnp.float32)

        @jax.jit
        def run(key, n=n, matrix=matrix):
            noise = 0.3 / np.sqrt(n * d) * jax.random.normal(key, (n - 1, seeds, d))
            first = jnp.asarray(start, jnp.float32)
            step = lambda y, e: y @ matrix + e
            ends = [follow(opt, step, first, noise)[0][-1]
                    for opt in (dual_anchor(eta, n), optax.sgd(eta))]

            def halpern_step(x, inputs):
                e, k = inputs
                return first / (k + 2) + (k + 1) / (k + 2) * (x - eta * step(x, e)), None

            ohm, _ = jax.lax.scan(halpern_step, first, (noise, jnp.arange(n - 1.0)))
            return ends[0], ohm, ends[1]

        for name, y in zip(("dual", "ohm", "sgd"), run(jax.random.key(6))):
            found[name].append(size(np.asarray(y, np.float64)))
    slope = np.diff(np.log(found["dual"]))[0] / np.log(horizons[1] / horizons[0])
    assert slope <= -0.5
    assert found["dual"][-1] <= 0.75 * min(found["ohm"][-1], found["sgd"][-1])


def test_logistic_regression_ends_below_sgd_at_equal_samples_and_step():
    # digits, noise-dominated: batch 32, 199 steps, eta = 1 / L, 16 seeds. (Against an SGD whose
    # own step is tuned there is no gain: benchmarks/optim_river.py has the grid.)
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    lmax = np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 4
    x, y = jnp.asarray(x, jnp.float32), jnp.where(y >= 5, 1.0, -1.0)
    grad = jax.grad(lambda w, x, y: jnp.mean(jax.nn.softplus(-y * (x @ w))))

    def run(opt, key):
        picks = jax.random.randint(key, (199, 32), 0, len(y))
        path, _ = follow(opt, lambda w, i: grad(w, x[i], y[i]), jnp.zeros(x.shape[1]), picks)
        return jnp.linalg.norm(grad(path[-1], x, y))

    keys = jax.random.split(jax.random.key(7), 16)
    ours, theirs = jax.jit(lambda keys: [
        jax.vmap(functools.partial(run, opt))(keys).mean()
        for opt in (dual_anchor(1 / lmax, 200), optax.sgd(1 / lmax))
    ])(keys)
    assert ours <= 0.9 * theirs


def saddle(mu, key):
    """``phi(x, y) = mu/2 |x|^2 + x'Ay - mu/2 |y|^2`` with ``|A| = 1``: gradient, matrix of F."""
    a = np.asarray(jax.random.normal(key, (4, 4)), np.float64)
    a = a / np.linalg.norm(a, 2)
    phi = lambda p: (mu / 2 * jnp.sum(p["x"] ** 2) + p["x"] @ jnp.asarray(a, jnp.float32) @ p["y"]
                     - mu / 2 * jnp.sum(p["y"] ** 2))
    return jax.grad(phi), np.block([[mu * np.eye(4), a], [-a.T, mu * np.eye(4)]])


def test_minimax_signs_solve_a_cocoercive_saddle_and_not_a_bilinear_one():
    n = 60
    start = {"x": jnp.ones(4), "y": -jnp.ones(4)}
    flat = np.concatenate([start["x"], start["y"]]).astype(np.float64)
    for mu, eta in ((0.5, 2 * 0.5 / 1.25), (0.0, 0.5)):
        gradient, matrix = saddle(mu, jax.random.key(8))
        opt = dual_anchor(eta, n, sign={"x": 1, "y": -1})
        path, _ = jax.jit(lambda p, opt=opt, g=gradient: follow(opt, g, p, n - 1))(start)
        end = np.concatenate([path["x"][-1], path["y"][-1]]).astype(np.float64)
        operator = np.eye(8) - eta * matrix
        expected = (flat - np.linalg.matrix_power(operator, n) @ flat) / n  # closed form
        np.testing.assert_allclose(eta * matrix @ end, expected, rtol=1e-3, atol=1e-5)
        bound = 2 * np.linalg.norm(flat) / n
        residual = np.linalg.norm(eta * matrix @ end)
        assert residual <= bound if mu else residual > 2 * bound


def test_resolvent_and_cayley_operator_solve_the_bilinear_game():
    n = 60
    _, matrix = saddle(0.0, jax.random.key(8))
    resolvent = np.linalg.inv(np.eye(8) + matrix)
    y0 = jnp.ones(8)
    run = jax.jit(lambda t: follow(dual_anchor(1.0, n), lambda y: y - t @ y, y0, n - 1)[0][-1])
    for operator in (resolvent, 2 * resolvent - np.eye(8)):
        y = np.asarray(run(jnp.asarray(operator, jnp.float32)), np.float64)
        assert np.linalg.norm(y - operator @ y) <= 2 * np.sqrt(8) / n


def test_after_the_horizon_updates_are_zero_and_the_state_stays():
    n = 5
    y0 = jnp.array([1.0, -2.0])
    opt = dual_anchor(0.5, n)
    path, state = jax.jit(lambda y: follow(opt, lambda y: y * jnp.array([1.0, 0.3]), y, n + 6))(y0)
    assert np.all(np.diff(path[:n], axis=0) != 0)
    np.testing.assert_array_equal(path[n - 1:], np.tile(path[n - 1], (8, 1)))
    assert state.count == n - 1
    update, after = opt.update(jnp.full(2, jnp.nan), state, y0)
    np.testing.assert_array_equal(update, jnp.zeros(2))
    np.testing.assert_array_equal(after.dual_anchor, state.dual_anchor)


def test_repeat_restarts_from_the_last_iterate():
    n, curvature = 6, jnp.array([1.0, 0.1, 0.03])
    y = np.ones(3)
    run = jax.jit(
        lambda y: follow(dual_anchor(1.0, n, restart="repeat"), lambda y: curvature * y, y,
                         3 * (n - 1))
    )
    path, state = run(jnp.ones(3))
    for lap in range(3):
        y = reference_dual_ohm(lambda y: y - np.asarray(curvature) * y, y, n)[-1]
        np.testing.assert_allclose(path[(lap + 1) * (n - 1)], y, rtol=1e-5, atol=1e-7)
    assert state.count == 0 and not np.any(state.dual_anchor)


def test_batch_size_brings_the_noise_to_the_target():
    # one coordinate with T = -I, the worst case; 20000 chains: rms to 0.5 %
    n, var, target = 40, 4.0, 0.3
    b = dual_anchor_batch_size(n, var, target)
    opt = dual_anchor(2.0, n)  # F = identity, T = I - 2 F = -I
    noise = jnp.sqrt(var / b) * jax.random.normal(jax.random.key(9), (n - 1, 20000))
    end = jax.jit(lambda e: follow(opt, lambda y, e: y + e, jnp.zeros(20000), e)[0][-1])(noise)
    assert 0.95 * target < jnp.sqrt(jnp.mean(end**2)) <= 1.02 * target
    assert dual_anchor_batch_size(n, var, target / 2) in range(4 * b - 4, 4 * b + 1)
    assert dual_anchor_batch_size(n, 0.0, target) == 1


def test_works_inside_optax():
    """Chain, injected and vmapped learning rates, masks with signs, MultiSteps, donation."""
    n = 8
    params = {"w": jnp.ones((2, 3)), "b": jnp.full(3, 2.0)}
    curvature = {"w": jnp.full((2, 3), 0.5), "b": jnp.array([1.0, 0.1, 0.0])}
    field = lambda p: jax.tree.map(jnp.multiply, curvature, p)
    plain = jax.jit(lambda p: follow(dual_anchor(0.7, n), field, p, n - 1))(params)[0]
    same = lambda a, b: jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a, b
    )

    injected = optax.chain(
        optax.clip_by_global_norm(1e9),
        optax.inject_hyperparams(dual_anchor, static_args=("num_steps",))(
            learning_rate=0.7, num_steps=n),
    )
    path, state = jax.jit(lambda p: follow(injected, field, p, n - 1))(params)
    same(path, plain)
    assert jnp.isclose(optax.tree.get(state, "learning_rate"), 0.7)
    assert optax.tree.get(state, "dual_anchor")["w"].shape == (2, 3)

    paths = jax.jit(jax.vmap(lambda lr: follow(dual_anchor(lr, n), field, params, n - 1)[0]))(
        jnp.array([0.2, 0.7]))
    same(jax.tree.map(lambda x: x[1], paths), plain)

    masked = optax.masked(
        dual_anchor(0.7, n, sign={"w": -1, "b": 1}), {"w": False, "b": True}
    )
    state = masked.init(params)
    update, _ = masked.update(field(params), state, params)
    np.testing.assert_allclose(update["b"], plain["b"][1] - plain["b"][0], rtol=1e-5)
    np.testing.assert_array_equal(update["w"], field(params)["w"])

    step = jax.jit(
        lambda p, s: injected.update(field(p), s, p), donate_argnums=(1,)
    )
    state = injected.init(params)
    step(params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.size > 1)


def test_bfloat16_parameters_keep_a_float32_state_and_their_own_dtype():
    n = 16
    params = {"w": jnp.ones((4,), jnp.bfloat16), "empty": jnp.zeros((0, 3))}
    opt = optax.MultiSteps(dual_anchor(1.0, n), every_k_schedule=2)
    state = opt.init(params)
    update = jax.jit(opt.update)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type),
                                       jax.eval_shape(lambda: tree))
    for _ in range(2 * (n - 1)):
        gradient = jax.tree.map(lambda p: 0.1 * p, params)
        updates, new = update(gradient, state, params)
        assert shapes(new) == shapes(state)
        assert updates["w"].dtype == jnp.bfloat16
        params, state = optax.apply_updates(params, updates), new
    assert optax.tree.get(state, "dual_anchor")["w"].dtype == jnp.float32
    plain = dual_anchor(1.0, n)  # float32 gradients, as mixed precision gives them
    updates, _ = plain.update(jax.tree.map(jnp.float32, params), plain.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    # closed form of the residual, to the rounding of bfloat16
    np.testing.assert_allclose(
        0.1 * params["w"].astype(jnp.float32), (1 - 0.9**n) / n, atol=0.1 * 2 * 2**-8
    )


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    (dict(learning_rate=0.1, num_steps=1), ValueError, "num_steps: must be >= 2, got 1"),
    (dict(learning_rate=0.1, num_steps=5.0), TypeError, "num_steps: expected an integer"),
    (dict(learning_rate=optax.constant_schedule(0.1), num_steps=5), ValueError, "stay constant"),
    (dict(learning_rate=0.0, num_steps=5), ValueError, "learning_rate"),
    (dict(learning_rate=0.1, num_steps=5, sign={"a": 0}), ValueError, r"sign\['a'\].*got 0"),
    (dict(learning_rate=0.1, num_steps=5, restart="on"), ValueError, "restart"),
    (dict(learning_rate=0.1, num_steps=5, sign={"a": jnp.ones(())}), TypeError,
     r"sign\['a'\].*static_args"),
    (dict(learning_rate=0.1, num_steps=jnp.array(5)), TypeError, "num_steps.*static_args"),
    (dict(learning_rate=0.1, num_steps=5, state_dtype="wide"), TypeError, "state_dtype"),
])
def test_bad_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        dual_anchor(**kwargs)


@pytest.mark.parametrize(("kwargs", "static", "message"), [
    ({}, (), "num_steps.*static_args"),
    (dict(sign=-1), ("num_steps",), "sign: expected 1.*static_args"),
    (dict(state_dtype=jnp.bfloat16), ("num_steps",), "state_dtype: expected a dtype.*static_args"),
])
def test_what_injection_takes_for_hyperparameters_is_named(kwargs, static, message):
    opt = optax.inject_hyperparams(dual_anchor, static_args=static)(0.1, 5, **kwargs)
    with pytest.raises(TypeError, match=message):
        opt.init(jnp.ones(2))


def test_python_numbers_are_parameters_too():
    opt, params = dual_anchor(0.5, 2), {"a": 1.0}
    updates, _ = opt.update(params, opt.init(params), params)
    # k = 0, c = 1/2: z = -eta g / 2, and the update is -eta g - z.
    np.testing.assert_allclose(updates["a"], -0.25, rtol=1e-6)


def test_bad_helper_arguments_and_integer_parameters_are_named():
    with pytest.raises(ValueError, match="target"):
        dual_anchor_batch_size(10, 1.0, 0.0)
    with pytest.raises(ValueError, match="noise_var"):
        dual_anchor_batch_size(10, -1.0, 0.1)
    with pytest.raises(ValueError, match=r"params\['n'\].*int32"):
        dual_anchor(0.1, 5).init({"n": jnp.arange(3)})
