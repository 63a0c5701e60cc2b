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
    dual_anchor,
    heavy_ball,
    scion,
    sgd_interpolation,
)

# name: (constructor, the hyperparameter that users tune, its value here, other arguments)
RULE = {"batch_size": 8, "row_norm_bound": 2.0, "lmax": 1.0}
OPTIMIZERS = {
    "accelegrad": (accelegrad, "diameter", 1.0, {}),
    "accelegrad_sharp": (accelegrad_sharp, "learning_rate", 0.05, {"clip": 30.0}),
    "accelegrad_sharp_scalar": (accelegrad_sharp, "diameter", 1.0, {"norm": "linf"}),
    "scion": (scion, "learning_rate", 0.05, {"clip": 10.0}),
    "scion_constrained": (scion, "learning_rate", 0.02, {
        "constrained": True, "norm": NormSpec("l2", radius=20.0), "clip": 0.05}),
    "heavy_ball": (heavy_ball, "learning_rate", 0.05, {"decay": 0.9}),
    "heavy_ball_nesterov": (heavy_ball, "learning_rate", 0.05, {
        "decay": 0.9, "nesterov": True, "style": "ema"}),
    "sgd_interpolation": (sgd_interpolation, "lmax", 1.0, {
        "batch_size": 8, "row_norm_bound": 2.0}),
    "dual_anchor": (dual_anchor, "learning_rate", 0.3, {"num_steps": 400}),
}  # fmt: skip


def build(name, **changed):
    make, key, value, others = OPTIMIZERS[name]
    return make(**({key: value} | others | changed))


every = pytest.mark.parametrize("name", OPTIMIZERS)


def small(dtype=jnp.float32):
    return {
        "in": {"kernel": jnp.array([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0]], dtype),
               "bias": jnp.array([0.5, -1.0, 0.3], dtype)},
        "head": {"kernel": jnp.array([[0.3, -0.2], [1.0, 0.1], [0.4, 0.6]], dtype)},
    }


TARGET = jax.tree.map(lambda p: 0.3 * jnp.ones_like(p) + 0.1 * p, small())
SCALES = {"in": {"kernel": 1.0, "bias": 0.3}, "head": {"kernel": 0.5}}


def loss(params):
    parts = jax.tree.map(
        lambda p, t, s: 0.5 * s * jnp.sum((p.astype(jnp.float32) - t) ** 2),
        params, TARGET, SCALES,
    )
    return sum(jax.tree.leaves(parts))


def train(opt, params, steps, keep=None):
    def step(carry, _):
        params, state = carry
        updates, state = opt.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), loss(params)

    return jax.lax.scan(step, (params, opt.init(params)), None, length=steps)


def same(a, b, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), a, b)


def identical(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.smoke
@every
def test_converges_and_its_state_keeps_structure_shapes_and_dtypes(name):
    # scan itself refuses a state whose shapes, dtypes or weak types change.
    opt = build(name)
    (params, state), curve = jax.jit(lambda p: train(opt, p, 399))(small())
    assert float(loss(params)) < 0.02 * float(curve[0]), name
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array) and not leaf.weak_type


@every
def test_vmap_over_hyperparameters_and_seeds_equals_a_loop(name):
    _, key, value, _ = OPTIMIZERS[name]
    values = jnp.array([0.5, 1.0]) * value
    run = lambda v: train(build(name, **{key: v}), small(), 4)[0][0]
    together = jax.jit(jax.vmap(run))(values)
    alone = jax.jit(run)(values[1])
    same(jax.tree.map(lambda x: x[1], together), alone, rtol=2e-5, atol=1e-6)
    one, two = (jax.tree.leaves(jax.tree.map(lambda x, i=i: x[i], together)) for i in (0, 1))
    assert any(np.any(a != b) for a, b in zip(one, two))


@every
def test_hyperparameters_can_be_injected_and_changed(name):
    make, key, value, others = OPTIMIZERS[name]
    params, grads = small(), jax.grad(loss)(small())
    static = tuple(k for k in others if k not in ("decay", "clip"))
    opt = optax.inject_hyperparams(make, static_args=static)(**{key: value}, **others)
    state = opt.init(params)
    updates, state = jax.jit(opt.update)(grads, state, params)
    plain = build(name)
    same(updates, plain.update(grads, plain.init(params), params)[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(optax.tree.get(state, key), value, rtol=1e-6)
    other = optax.tree.set(opt.init(params), **{key: jnp.asarray(2.0 * value)})
    changed = jax.jit(opt.update)(grads, other, params)
    # Updates or iterates: the first steps of AcceleGrad# are the anchor's alone.
    pairs = zip(jax.tree.leaves((updates, state.inner_state)),
                jax.tree.leaves((changed[0], changed[1].inner_state)))
    assert any(np.any(a != b) for a, b in pairs)


@every
def test_masked_and_partitioned_leaves_are_left_alone(name):
    params, grads = small(), jax.grad(loss)(small())
    mask = {"in": {"kernel": True, "bias": False}, "head": {"kernel": False}}
    opt = optax.masked(build(name), mask)
    updates, _ = jax.jit(opt.update)(grads, opt.init(params), params)
    identical(updates["head"], grads["head"])
    # Named by path: {"in": {"kernel": ...}} alone gets the same norm as the masked tree.
    labels = {"in": {"kernel": "a", "bias": "b"}, "head": {"kernel": "b"}}
    split = optax.partition({"a": build(name), "b": optax.set_to_zero()}, labels)
    moved, _ = jax.jit(split.update)(grads, split.init(params), params)
    identical(moved["in"]["kernel"], updates["in"]["kernel"])
    assert not np.any(moved["in"]["bias"]) and not np.any(moved["head"]["kernel"])
    # A leaf that is masked contributes nothing to the scalars of its group (optax#1538).
    poisoned = grads | {"head": {"kernel": jnp.full((3, 2), jnp.nan)}}
    again, _ = jax.jit(opt.update)(poisoned, opt.init(params), params)
    identical(again["in"]["kernel"], updates["in"]["kernel"])


@every
def test_multi_steps_with_bfloat16_parameters(name):
    # lax.cond inside MultiSteps needs equal dtypes on both branches (optax#377, #1038).
    params = small(jnp.bfloat16)
    opt = optax.MultiSteps(build(name), every_k_schedule=2)
    state, update = opt.init(params), jax.jit(opt.update)
    grads = jax.grad(loss)(params)
    first, state = update(grads, state, params)
    assert all(not np.any(np.asarray(u, np.float32)) for u in jax.tree.leaves(first))
    second, state = update(grads, state, params)
    for update_leaf, p in zip(jax.tree.leaves(second), jax.tree.leaves(params)):
        assert update_leaf.dtype == p.dtype and np.any(np.asarray(update_leaf, np.float32))


@every
def test_nan_gradients_stay_visible_and_apply_if_finite_drops_them(name):
    params, grads = small(), jax.grad(loss)(small())
    poisoned = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), grads)
    opt = build(name)
    updates, _ = jax.jit(opt.update)(poisoned, opt.init(params), params)
    if name != "accelegrad_sharp":  # its first step is the anchor's alone: x = z
        assert all(np.any(np.isnan(u)) for u in jax.tree.leaves(updates))
    assert any(np.any(np.isnan(u)) for u in jax.tree.leaves(updates))
    safe = optax.apply_if_finite(opt, max_consecutive_errors=3)
    start = safe.init(params)
    step = jax.jit(safe.update)
    updates, state = step(poisoned, start, params)
    assert all(not np.any(u) for u in jax.tree.leaves(updates))
    identical(state.inner_state, start.inner_state)
    updates, _ = step(grads, state, params)
    same(updates, jax.jit(opt.update)(grads, opt.init(params), params)[0], rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_zero_gradients_and_half_precision_give_finite_steps(name, dtype):
    # float16: squares of small gradients vanish and 0/0 would be NaN (optax#1784).
    params = small(dtype)
    opt = build(name)
    update = jax.jit(opt.update)
    for size in (0.0, 1e-6, 1e3):
        grads = jax.tree.map(lambda p, size=size: jnp.full_like(p, size), params)
        state = opt.init(params)
        for _ in range(2):
            updates, state = update(grads, state, params)
            for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params)):
                assert u.dtype == dtype and u.shape == p.shape
                assert np.all(np.isfinite(np.asarray(u, np.float32)))
                if size == 0 and name != "scion_constrained":
                    assert not np.any(np.asarray(u, np.float32))


@every
def test_scalars_empty_leaves_and_empty_trees(name):
    params = {"s": jnp.ones(()), "e": jnp.zeros((0, 3)), "v": jnp.ones(3)}
    opt = build(name)
    updates, _ = jax.jit(opt.update)(params, opt.init(params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert np.isfinite(updates["s"])
    updates, _ = opt.update({}, opt.init({}), {})
    assert updates == {}


@every
def test_works_in_a_chain_after_gradient_transforms(name):
    params, grads = small(), jax.grad(loss)(small())
    opt = optax.chain(optax.clip_by_global_norm(0.1), build(name))
    updates, _ = jax.jit(opt.update)(grads, opt.init(params), params)
    clipped, _ = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
    plain = build(name)
    same(updates, jax.jit(plain.update)(clipped, plain.init(params), params)[0], rtol=1e-6)
    # Extra arguments of other members of a chain pass by.
    opt.update(grads, opt.init(params), params, value=1.0, loss=2.0)


@every
def test_buffers_are_distinct_and_can_be_donated(name):
    params = small()
    opt = build(name)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = opt.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    want, _ = train(opt, params, 3)[0]
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
    real = build(name).init(small())
    assert jax.tree.structure(state) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(real)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@every
def test_orbax_resumes_bit_for_bit(name, tmp_path):
    import orbax.checkpoint as ocp

    opt = build(name)

    @jax.jit
    def step(params, state):
        updates, state = opt.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = small(), opt.init(small())
    for _ in range(3):
        params, state = step(params, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "three", (params, state))
        checkpointer.wait_until_finished()
        target = jax.eval_shape(lambda: (small(), opt.init(small())))
        back, back_state = checkpointer.restore(tmp_path / "three", target)
    assert jax.tree.structure(back_state) == jax.tree.structure(state)  # NamedTuples came back
    for _ in range(10):
        params, state = step(params, state)
        back, back_state = step(back, back_state)
    identical((params, state), (back, back_state))


@every
def test_integer_and_complex_parameters_are_refused(name):
    if name == "sgd_interpolation":
        pytest.skip("a chain of optax's own transforms")
    for leaf in (jnp.arange(3), jnp.ones(3, jnp.complex64)):
        with pytest.raises(ValueError, match=r"\['n'\].*expected a real floating-point array"):
            build(name).init({"n": leaf})


@pytest.mark.parametrize("name", ["accelegrad_sharp", "accelegrad", "scion", "heavy_ball"])
def test_gradients_flow_to_hyperparameters(name):
    # Tuning by gradient: d(final loss)/d(hyperparameter) against a central difference.
    _, key, value, _ = OPTIMIZERS[name]
    final = jax.jit(lambda v: loss(train(build(name, **{key: v}), small(), 4)[0][0]))
    slope = float(jax.grad(final)(jnp.float32(value)))
    h = 0.01 * value
    numeric = float((final(jnp.float32(value + h)) - final(jnp.float32(value - h))) / (2 * h))
    np.testing.assert_allclose(slope, numeric, rtol=0.1)
