"""``qmatmul`` mapped over examples and on several devices; the fused kernel's use of memory."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from fadex.quant import int_group, nvfp4, qarray, qmatmul, quantize_array, razer_e4m3
from fadex.quant.kernels import fused_quantize as fused
from fadex.quant.kernels import w4a16
from fadex.quant.matmul import PREFILL_ROWS

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
interpreted = functools.partial(qmatmul, impl="interpret")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def weight(*shape):
    return jit(quantize_array, static_argnums=1)(normal(*shape), nvfp4())


def equations(jaxpr, name):
    """All equations called ``name``, whatever they lie in."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == name else []
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += equations(inner, name)
    return found


def grids(f, *args):
    """The grid of each kernel in a program."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return [eqn.params["grid_mapping"].grid for eqn in equations(jaxpr, "pallas_call")]


# --- vmap


@pytest.mark.smoke
def test_mapped_examples_become_rows():
    qw = weight(128, 64)
    over = lambda f, **o: jax.vmap(functools.partial(f, **o), (0, None))
    # One kernel of so many rows, whichever way they are counted; beyond the limit none.
    expected = grids(qmatmul, normal(16, 128), qw)
    assert len(expected) == 2
    for mapped, shape in ((over(qmatmul), (16, 128)), (over(over(qmatmul)), (4, 4, 128)),
                          (over(qmatmul), (2, 2, 4, 128))):
        assert grids(mapped, normal(*shape), qw) == expected
    assert not grids(over(qmatmul), normal(PREFILL_ROWS + 1, 128), qw)
    assert not grids(over(qmatmul), normal(2, PREFILL_ROWS // 2 + 1, 128), qw)
    # Experts stay a leading axis, also where the examples are mapped around them.
    stack, tokens = weight(3, 128, 64), normal(5, 3, 2, 128)
    experts = jax.vmap(qmatmul)
    expected = grids(qmatmul, normal(3, 10, 128), stack)
    assert grids(over(experts), tokens, stack) == expected
    assert grids(jax.vmap(over(qmatmul), (1, 0)), tokens, stack) == expected


def test_mapped_products_are_those_of_each_example():
    qw, stack = weight(128, 8), weight(3, 128, 8)
    many, vectors = normal(5, 3, 2, 128, seed=1), normal(5, 128, seed=2)
    around = normal(5, 3, 2, 8, seed=3)

    @jit
    def everything(many, vectors, qw, stack):
        f = interpreted
        over = lambda g: jax.vmap(g, (0, None))
        loss = lambda x: jnp.sum(around * over(over(f))(x, qw))
        slope = lambda x, c: jax.grad(lambda x: jnp.sum(c * f(x, qw)))(x)
        return {
            "vectors": over(f)(vectors, qw),
            "nested": over(over(f))(many, qw),
            "experts unmapped": over(f)(many, stack),
            "experts inside": over(jax.vmap(f))(many, stack),
            "one vector": jax.vmap(f, (None, 0))(vectors[0], stack),
        }, jax.grad(loss)(many), jax.vmap(slope)(many[0], around[0])

    got, outer, inner = everything(many, vectors, qw, stack)
    w, ws = np.float64(qw.dequantize()), np.float64(stack.dequantize())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    each = np.einsum("bemk,ekn->bemn", many, ws)
    for name, expected in {
        "vectors": vectors @ w, "nested": many @ w, "one vector": vectors[0] @ ws,
        "experts unmapped": each, "experts inside": each,
    }.items():
        close(got[name], expected, err_msg=name)
    close(outer, around @ w.T)
    close(inner, around[0] @ w.T)


def test_a_weight_mapped_in_part_keeps_its_other_arrays():
    qw, x = weight(128, 8), normal(3, 128, seed=1)
    scales = qw.tensor_scale * jnp.array([1.0, 2.0])
    leaves, structure = jax.tree.flatten(qw)
    at = next(i for i, leaf in enumerate(leaves) if leaf is qw.tensor_scale)

    def product(g):
        return interpreted(x, jax.tree.unflatten(structure, leaves[:at] + [g] + leaves[at + 1:]))

    out = jit(jax.vmap(product))(scales)
    w = np.float64(qw.dequantize())
    np.testing.assert_allclose(out, [x @ w, x @ (2 * w)], rtol=1e-4, atol=1e-4)


# --- several devices


def test_a_mesh_of_several_devices_takes_xlas_product():
    x, qw = normal(4, 128), weight(128, 64)
    mesh = lambda n: AbstractMesh((n,), ("n",))
    with jax.sharding.use_abstract_mesh(mesh(2)):
        assert not grids(qmatmul, x, qw)
        assert grids(interpreted, x, qw)  # asked for by name
    with jax.sharding.use_abstract_mesh(mesh(1)):
        assert grids(qmatmul, x, qw)
    # Within shard_map each device has a program of its own.
    shards = functools.partial(
        jax.shard_map, qmatmul, mesh=mesh(2), in_specs=(PartitionSpec("n"), PartitionSpec()),
        out_specs=PartitionSpec("n"),
    )
    assert grids(shards(check_vma=False), x, qw)
    assert not grids(shards(check_vma=True), x, qw)  # a kernel cannot say how its result varies


# --- arguments


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.array([1.0, 0.0])])
def test_a_static_scale_is_positive(scale):
    with pytest.raises(ValueError, match="activation_scale: must be positive, got"):
        qmatmul(normal(2, 3, 128), weight(128, 8), activation=razer_e4m3(),
                activation_scale=scale)


def test_activations_are_never_packed(monkeypatch):
    x, qw, fmt = normal(2, 128), weight(128, 8), razer_e4m3()

    def packs(*args, **options):
        raise AssertionError("packed")

    monkeypatch.setattr(qarray, "pack", packs)
    jax.eval_shape(functools.partial(qmatmul, activation=fmt, impl="interpret"), x, qw)
    jax.eval_shape(functools.partial(qmatmul, activation=fmt), x, jnp.ones((128, 8)))
    with pytest.raises(AssertionError, match="packed"):
        jax.eval_shape(functools.partial(quantize_array, fmt=fmt), x)


# --- the fused kernel


def test_the_deepest_block_is_encoded_in_parts_that_fit():
    fmt = int_group(4, 128, symmetric=False)
    rows, columns = 4096, 256
    program = jax.make_jaxpr(functools.partial(fused.fused_quantize_tpu, fmt=fmt))(
        jax.ShapeDtypeStruct((rows, columns), jnp.float32), None
    )
    call, = equations(program.jaxpr, "pallas_call")
    assert call.params["grid_mapping"].grid == (1, 1, 2)

    def largest(jaxpr):
        inner = (getattr(p, "jaxpr", p) for eqn in jaxpr.eqns
                 for p in jax.tree.leaves(list(eqn.params.values())))
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars
                 if hasattr(v.aval, "size")]
        return max(sizes + [largest(j) for j in inner if hasattr(j, "eqns")], default=0)

    assert largest(call.params["jaxpr"]) <= 512 * 256  # as in the case counted there


def test_parts_are_stored_where_they_belong():
    fmt, x = int_group(4, 128, symmetric=False, scale="float32"), normal(1280, 8)
    ours = jit(functools.partial(fused.fused_quantize_tpu, fmt=fmt, interpret=True))(x, None)
    expected = jit(quantize_array, static_argnums=1)(x, fmt)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected)):
        assert a.shape == b.shape and np.mean(np.asarray(a) != np.asarray(b)) <= 0.01


# --- the device script


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [(lambda y: y, True), (lambda y: y * 1.006, False), (lambda y: y.at[0, 0].add(y.max() / 90),
                                                         False)],
    ids=["as it is", "all a little", "one alone"],
)
def test_the_device_script_sees_small_errors_of_a_product(spoil, seen):
    path = Path(__file__).parents[2] / "benchmarks" / "device_kernels.py"
    spec = importlib.util.spec_from_file_location("device_kernels", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    entry = next(iter(script.matmul_entries(True)))

    def form(x, qw, interpret):  # tensor scale after the sum, as the kernels do
        bare = dataclasses.replace(qw, tensor_scale=jnp.ones_like(qw.tensor_scale))
        out = w4a16.w4a16_reference(x, bare, jnp.float32) * qw.tensor_scale
        return spoil(out).astype(jnp.bfloat16)

    row = script.measure(entry._replace(forms={"gpu": form}), "gpu", None)
    print(row)
    assert row["correct"] == seen
