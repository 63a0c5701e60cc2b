"""What users do with any optax optimizer, done with every optimizer of ours.

Each check below is one that optax runs on its own: convergence on small problems, jit, vmap,
masking, ``inject_hyperparams``, ``MultiSteps``, ``apply_if_finite``, low precision; and what our
states promise: a stable structure, donation, resuming from Orbax bit by bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import (
    NormSpec,
    accelegrad,
    accelegrad_sharp,
    assign_norms,
    dual_anchor,
    heavy_ball,
    scion,
    sgd_interpolation,
)

# name: (constructor, the hyperparameter that users tune, its value here, other arguments).
# One Newton-Schulz step: accuracy is no matter here, and compiling six of them is.
NORMS = functools.partial(assign_norms, steps=1)
GROWING = lambda t: 1.5 + 0.25 * t  # weights whose coupling is below 1 from the first step on
OPTIMIZERS = {
    "accelegrad": (accelegrad, "diameter", 1.0, {"weight_schedule": GROWING}),
    "accelegrad_sharp": (accelegrad_sharp, "learning_rate", 0.05, {
        "clip": 30.0, "norm": NORMS, "coupling": 0.3}),
    "scion": (scion, "learning_rate", 0.05, {"clip": 10.0, "norm": NORMS}),
    "heavy_ball": (heavy_ball, "learning_rate", 0.05, {"decay": 0.9}),
    "sgd_interpolation": (sgd_interpolation, "lmax", 1.0, {
        "batch_size": 8, "row_norm_bound": 2.0}),
    "dual_anchor": (dual_anchor, "learning_rate", 0.3, {"num_steps": 400}),
}  # fmt: skip
# Other paths through the same transforms: for the checks that read their states.
VARIANTS = OPTIMIZERS | {
    "accelegrad_levy": (accelegrad, "diameter", 1.0, {}),
    "accelegrad_sharp_scalar": (accelegrad_sharp, "diameter", 1.0, {
        "norm": "linf", "average": True}),
    "scion_constrained": (scion, "learning_rate", 0.02, {
        "constrained": True, "norm": NormSpec("l2", radius=20.0), "clip": 0.05}),
    "heavy_ball_nesterov": (heavy_ball, "learning_rate", 0.05, {
        "decay": 0.9, "nesterov": True, "style": "ema"}),
}  # fmt: skip


def build(name, **changed):
    make, key, value, others = VARIANTS[name]
    return make(**({key: value} | others | changed))


# These programs run for a moment on a few numbers: nearly all of the time is LLVM's.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
each = pytest.mark.parametrize("name", OPTIMIZERS)
every = pytest.mark.parametrize("name", VARIANTS)


def small(dtype=np.float32):
    """In NumPy: every eager jnp operation on a new shape would be a program to compile."""
    return {
        "in": {"kernel": np.array([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0]], dtype),
               "bias": np.array([0.5, -1.0, 0.3], dtype)},
        "head": {"kernel": np.array([[0.3, -0.2], [1.0, 0.1], [0.4, 0.6]], dtype)},
    }


TARGET = jax.tree.map(lambda p: np.float32(0.3) + np.float32(0.1) * p, small())
SCALES = {"in": {"kernel": 1.0, "bias": 0.3}, "head": {"kernel": 0.5}}
GRADS = jax.tree.map(lambda p, t, s: np.float32(s) * (p - t), small(), TARGET, SCALES)


def loss(params):
    parts = jax.tree.map(
        lambda p, t, s: 0.5 * s * jnp.sum((p.astype(jnp.float32) - t) ** 2),
        params, TARGET, SCALES,
    )
    return sum(jax.tree.leaves(parts))


def one_step(opt, params, state):
    updates, state = opt.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def train(opt, params, steps):
    step = lambda carry, _: (one_step(opt, *carry), None)
    return jax.lax.scan(step, (params, opt.init(params)), None, length=steps)[0]


@functools.cache
def advance(name):
    """(parameters, state, n) -> the same after n steps, from one program for each optimizer."""
    opt = build(name)
    body = lambda _, carry: one_step(opt, *carry)
    return jit(lambda params, state, n: jax.lax.fori_loop(0, n, body, (params, state)))


@functools.cache
def start(name):
    return jit(lambda p: (p, build(name).init(p)))(small())


@functools.cache
def update(name):
    return jit(build(name).update)


@functools.cache
def warm(name):
    """Parameters and state after 6 steps: a first step alone would not see every part of them."""
    return advance(name)(*start(name), 6)


def same(a, b, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), a, b)


def identical(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.smoke
@every
def test_converges_and_its_state_keeps_structure_shapes_and_dtypes(name):
    # The loop itself refuses a state whose shapes, dtypes or weak types change.
    params, state = advance(name)(*start(name), 399)
    assert float(loss(params)) < 0.02 * float(loss(small())), name
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array) and not leaf.weak_type


@each
def test_vmap_over_hyperparameters_equals_a_loop(name):
    _, key, value, _ = OPTIMIZERS[name]
    run = jax.vmap(lambda v: train(build(name, **{key: v}), small(), 6)[0])
    together = jit(run)(np.array([0.5, 1.0], np.float32) * value)
    alone, _ = warm(name)
    same(jax.tree.map(lambda x: x[1], together), alone, rtol=5e-5, atol=1e-6)
    assert any(np.any(x[0] != x[1]) for x in jax.tree.leaves(together))


@pytest.mark.parametrize("name", ["accelegrad_sharp", "accelegrad", "scion", "heavy_ball"])
def test_gradients_flow_to_hyperparameters(name):
    # Tuning by gradient: d(final loss)/d(hyperparameter) against a central difference.
    _, key, value, others = OPTIMIZERS[name]
    norm = {"norm": "linf"} if "norm" in others else {}
    scales = np.array([1.0, 0.3, 0.1], np.float32)
    final = lambda x: 0.5 * jnp.sum(scales * (x - 0.3) ** 2)

    def run(v):
        opt = build(name, **{key: v}, **norm)

        def step(carry, _):
            x, state = carry
            updates, state = opt.update(scales * (x - 0.3), state, x)
            return (x + updates, state), None

        x = np.array([1.0, -0.5, 0.25], np.float32)
        return final(jax.lax.scan(step, (x, opt.init(x)), None, length=3)[0][0])

    h = 0.01 * value
    values, slopes = jit(jax.vmap(jax.value_and_grad(run)))(
        np.array([value - h, value, value + h], np.float32))
    np.testing.assert_allclose(slopes[1], (values[2] - values[0]) / (2 * h), rtol=0.1)
    assert abs(slopes[1]) > 1e-4


@each
def test_hyperparameters_can_be_injected_and_changed(name):
    make, key, value, others = OPTIMIZERS[name]
    static = tuple(k for k in others if k not in ("decay", "clip", "coupling"))
    opt = optax.inject_hyperparams(make, static_args=static)(**{key: value}, **others)

    step = lambda _, carry: one_step(opt, *carry)
    run = jit(lambda params, state, n: jax.lax.fori_loop(0, n, step, (params, state)))
    params, state = run(small(), jit(opt.init)(small()), 6)
    same(params, warm(name)[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(optax.tree.get(state, key), value, rtol=1e-6)
    changed = optax.tree.set(state, **{key: np.full_like(optax.tree.get(state, key), 2 * value)})
    plain, other = run(params, state, 1)[0], run(params, changed, 1)[0]
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other)))


@each
def test_masked_and_partitioned_leaves_are_left_alone(name):
    # Named by path: {"in": {"kernel": ...}} alone gets the same norm as the masked tree.
    mask = {"in": {"kernel": True, "bias": False}, "head": {"kernel": False}}
    labels = {"in": {"kernel": "a", "bias": "b"}, "head": {"kernel": "b"}}
    masked = optax.masked(build(name), mask)
    split = optax.partition({"a": build(name), "b": optax.set_to_zero()}, labels)

    @jit
    def run(params, head):
        def step(carry, _):
            params, one, two = carry
            grads = jax.grad(loss)(params) | {"head": {"kernel": head}}
            updates, one = masked.update(grads, one, params)
            moved, two = split.update(grads, two, params)
            return (optax.apply_updates(params, moved), one, two), (updates, moved)

        return jax.lax.scan(step, (params, masked.init(params), split.init(params)), None,
                            length=6)[1]

    updates, moved = run(small(), GRADS["head"]["kernel"])
    identical(updates["head"]["kernel"], np.stack([GRADS["head"]["kernel"]] * 6))
    same(moved["in"]["kernel"], updates["in"]["kernel"], rtol=1e-6, atol=1e-7)
    assert np.any(moved["in"]["kernel"][0] != moved["in"]["kernel"][5])
    assert not np.any(moved["in"]["bias"]) and not np.any(moved["head"]["kernel"])
    # A leaf that is masked contributes nothing to the scalars of its group (optax#1538).
    again, _ = run(small(), np.full((3, 2), np.nan, np.float32))
    identical(again["in"]["kernel"], updates["in"]["kernel"])


@each
def test_multi_steps_with_bfloat16_parameters(name):
    # lax.cond inside MultiSteps needs equal dtypes on both branches (optax#377, #1038).
    params = small(jnp.bfloat16)
    opt = optax.MultiSteps(build(name), every_k_schedule=2)
    state, step = jit(opt.init)(params), jit(opt.update)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS)
    first, state = step(grads, state, params)
    assert all(not np.any(np.asarray(u, np.float32)) for u in jax.tree.leaves(first))
    second, state = step(grads, state, params)
    for update_leaf, p in zip(jax.tree.leaves(second), jax.tree.leaves(params)):
        assert update_leaf.dtype == p.dtype and np.any(np.asarray(update_leaf, np.float32))


@each
def test_nan_gradients_stay_visible_and_apply_if_finite_drops_them(name):
    params, state = warm(name)
    poisoned = jax.tree.map(np.copy, GRADS)
    for leaf in jax.tree.leaves(poisoned):
        leaf[(0,) * leaf.ndim] = np.nan
    updates, _ = update(name)(poisoned, state, params)
    assert all(np.any(np.isnan(u)) for u in jax.tree.leaves(updates))
    safe = optax.apply_if_finite(build(name), max_consecutive_errors=3)
    step = jit(safe.update)
    kept = jit(safe.init)(small())._replace(inner_state=state)
    for errors in (1, 2, 3):
        updates, kept = step(poisoned, kept, params)
        assert all(not np.any(u) for u in jax.tree.leaves(updates))
        assert kept.notfinite_count == errors
        identical(kept.inner_state, state)
    # A finite gradient in between, and all is as if nothing had happened.
    updates, fine = step(GRADS, kept, params)
    same(updates, update(name)(GRADS, state, params)[0], rtol=2e-6, atol=1e-7)
    assert fine.notfinite_count == 0
    # After the last error that it may drop it gives up: what is wrong must show (optax#1746).
    updates, kept = step(poisoned, kept, params)
    assert any(np.any(np.isnan(u)) for u in jax.tree.leaves(updates))
    assert kept.notfinite_count == 4 and kept.total_notfinite == 4


@each
def test_zero_gradients_and_half_precision_give_finite_steps(name):
    # float16: squares of small gradients vanish and 0/0 would be NaN (optax#1784).
    params, opt = small(jnp.float16), build(name)
    params["in"] = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["in"])

    def run(size):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, size, p.dtype), params)
        step = lambda state, _: opt.update(grads, state, params)[::-1]
        return jax.lax.scan(step, opt.init(params), None, length=2)[1]

    found = jit(jax.vmap(run))(np.array([0.0, 1e-6, 1e3], np.float32))
    for u, p in zip(jax.tree.leaves(found), jax.tree.leaves(params)):
        assert u.dtype == p.dtype and u.shape == (3, 2, *p.shape)
        assert np.all(np.isfinite(np.asarray(u, np.float32)))
        assert not np.any(np.asarray(u[0], np.float32))


@every
def test_scalars_empty_leaves_and_empty_trees(name):
    params = {"s": np.ones((), np.float32), "e": np.zeros((0, 3), np.float32)}
    opt = build(name)
    step = lambda p: opt.update(p, opt.init(p), p)[0]
    updates, nothing = jit(lambda p: (step(p), step({})))(params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert np.isfinite(updates["s"]) and nothing == {}


@each
def test_works_in_a_chain_after_gradient_transforms(name):
    params, state = warm(name)
    opt = optax.chain(optax.clip_by_global_norm(0.1), build(name))
    # Extra arguments of other members of a chain pass by.
    chained = jit(lambda g, s, p: opt.update(g, s, p, value=1.0, loss=2.0))
    updates, _ = chained(GRADS, (optax.EmptyState(), state), params)
    size = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(GRADS)))
    clipped = jax.tree.map(lambda g: np.float32(0.1 / size) * g, GRADS)
    same(updates, update(name)(clipped, state, params)[0], rtol=1e-5, atol=1e-7)


@every
def test_buffers_are_distinct_and_can_be_donated(name):
    opt, want = build(name), advance(name)(*start(name), 3)[0]
    step = jit(functools.partial(one_step, opt), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, small())
    state = opt.init(params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(pointers)) == len(pointers), "a buffer is shared and can't be donated twice"
    for _ in range(3):
        params, state = step(params, state)
    same(params, want, rtol=1e-5, atol=1e-6)


@every
def test_abstract_parameters_give_an_abstract_state(name):
    abstract = jax.eval_shape(small)
    state = jax.eval_shape(build(name).init, abstract)
    real = start(name)[1]
    assert jax.tree.structure(state) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(real)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_orbax_resumes_bit_for_bit(tmp_path):
    import orbax.checkpoint as ocp

    kept = {name: warm(name) for name in VARIANTS}
    fresh = lambda: {name: (small(), build(name).init(small())) for name in VARIANTS}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "six", kept)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "six", jax.eval_shape(fresh))
    assert jax.tree.structure(back) == jax.tree.structure(kept)  # NamedTuples came back
    for name in VARIANTS:
        identical(advance(name)(*kept[name], 10), advance(name)(*back[name], 10))


@every
def test_integer_and_complex_parameters_are_refused(name):
    if name == "sgd_interpolation":
        pytest.skip("a chain of optax's own transforms")
    for leaf in (jnp.arange(3), jnp.ones(3, jnp.complex64)):
        with pytest.raises(ValueError, match=r"\['n'\].*expected a real floating-point array"):
            build(name).init({"n": leaf})
