import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, struct

from fadex.core import pytree


class Projections(NamedTuple):
    query: jax.Array
    value: jax.Array


@struct.dataclass
class Packed:
    codes: jax.Array
    scale: jax.Array
    bits: int = struct.field(pytree_node=False, default=4)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])


@pytest.fixture(scope="module")
def block():
    return Block(nnx.Rngs(0))


def test_paths_name_keys_fields_and_positions():
    tree = {"a": [1, {"b": 2}], "n": Projections(3, (4,)), "d": Packed(5, 6)}
    assert pytree.flatten_with_paths(tree) == {
        "a/0": 1, "a/1/b": 2, "d/codes": 5, "d/scale": 6, "n/query": 3, "n/value/0": 4,
    }
    assert pytree.flatten_with_paths(11) == {"": 11}
    assert pytree.flatten_with_paths({"a": None, "b": (), "c": {}}) == {}


def test_nnx_values_are_dropped_from_paths_and_a_field_called_value_is_not(block):
    expected = ["inner/bias", "inner/kernel", "layers/0/bias", "layers/0/kernel",
                "layers/1/bias", "layers/1/kernel"]
    state = nnx.state(block)
    assert list(pytree.flatten_with_paths(state)) == expected
    assert list(pytree.flatten_with_paths(block)) == expected
    assert list(pytree.flatten_with_paths(Projections(1, 2))) == ["query", "value"]
    raw = [pytree.path_str(kp) for kp, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert raw == expected
    # A Variable may hold a tree; its own step disappears from the middle of the path too.
    held = {"w": nnx.Param(Packed(jnp.zeros(2), jnp.ones(())))}
    assert list(pytree.flatten_with_paths(held)) == ["w/codes", "w/scale"]


def test_leaves_that_share_a_path_are_refused():
    with pytest.raises(ValueError, match="share a path: 'a/b'"):
        pytree.flatten_with_paths({"a/b": 1, "a": {"b": 2}})


def test_map_with_path_keeps_the_structure_and_takes_further_trees(block):
    tree = {"x": Packed(1, 2, bits=3), "y": [4, None]}
    other = {"x": Packed(10, 20, bits=3), "y": [40, None]}
    mapped = pytree.map_with_path(lambda path, a, b: (path, a + b), tree, other)
    assert mapped["x"] == Packed(("x/codes", 11), ("x/scale", 22), bits=3)
    assert mapped["y"] == [("y/0", 44), None]
    state = nnx.state(block)
    named = pytree.map_with_path(lambda path, x: path, state)
    assert named["layers"][1]["kernel"].get_value() == "layers/1/kernel"
    assert jax.tree.structure(named) == jax.tree.structure(state)


def test_map_with_path_works_under_jit():
    fn = jax.jit(lambda t: pytree.map_with_path(lambda p, x: x * len(p), t))
    assert fn({"ab": jnp.ones(()), "abcd": jnp.ones(())}) == {"ab": 2.0, "abcd": 4.0}


def test_counts_cover_arrays_abstract_arrays_and_keys():
    tree = {
        "w": jnp.ones((3, 4), jnp.bfloat16), "n": np.zeros(5, np.int8), "step": 7,
        "s": jax.ShapeDtypeStruct((2, 2), jnp.float32), "none": None,
        "key": jax.random.split(jax.random.key(0), 2),
    }
    assert pytree.param_count(tree) == 12 + 5 + 4 + 2
    assert pytree.tree_bytes(tree) == 24 + 5 + 16 + 2 * 8


def test_hash_is_the_sha256_of_names_shapes_dtypes_and_bytes():
    tree = {"b": np.arange(3, dtype="<i4"), "a": jnp.asarray([[1.0], [2.0]])}
    stream = b""
    for name, kind, data in [
        (b"a", b"float32[2,1]", bytes.fromhex("0000803f00000040")),
        (b"b", b"int32[3]", bytes.fromhex("000000000100000002000000")),
    ]:
        for part in (name, kind, data):
            stream += len(part).to_bytes(8, "little") + part
    assert pytree.tree_hash(tree) == hashlib.sha256(stream).hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "float8_e4m3fn", "bool"])
def test_hash_is_the_same_for_jax_and_numpy(dtype):
    values = np.asarray([-2, 0, 1, 3]).astype(np.dtype(dtype))
    here, there = {"x": values}, {"x": jnp.asarray(values)}
    assert pytree.tree_hash(here) == pytree.tree_hash(there)
    assert pytree.tree_hash(here) == pytree.tree_hash({"x": values[::-1][::-1]})


def test_hash_ignores_undefined_bits_of_narrow_dtypes_and_byte_order():
    clean = np.asarray([1, 2, 3], np.uint8)
    dirty = (clean | 0x50).view(ml_dtypes.uint4)
    assert pytree.tree_hash(dirty) == pytree.tree_hash(clean.view(ml_dtypes.uint4))
    assert pytree.tree_hash(np.arange(3, dtype=">i4")) == pytree.tree_hash(
        np.arange(3, dtype="<i4"))


def test_hash_sees_every_difference():
    base = {"a": np.zeros((2, 3), np.float32), "k": jax.random.key(1), "s": 1}
    variants = [
        base,
        base | {"a": np.full((2, 3), -0.0, np.float32)},
        base | {"a": np.zeros((3, 2), np.float32)},
        base | {"a": np.zeros((2, 3), np.int32)},
        base | {"k": jax.random.key(2)},
        base | {"k": jax.random.key_data(jax.random.key(1))},
        base | {"s": 1.0},
        base | {"s": True},
        base | {"t": 1},
        {"b": base["a"], "k": base["k"], "s": 1},
    ]
    hashes = [pytree.tree_hash(tree) for tree in variants]
    assert len(set(hashes)) == len(variants)

    class Fields(NamedTuple):
        s: int
        k: jax.Array
        a: np.ndarray

    # The order of fields is no content.
    assert pytree.tree_hash(Fields(base["s"], base["k"], base["a"])) == hashes[0]


def test_hash_does_not_depend_on_the_process():
    tree = {"x": np.arange(4.0), "names": ("a", 2)}
    code = ("import numpy as np; from fadex.core.pytree import tree_hash; "
            "print(tree_hash({'x': np.arange(4.0), 'names': ('a', 2)}))")
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "7"},
                         capture_output=True, text=True, check=True)
    assert out.stdout.strip() == pytree.tree_hash(tree)


def test_pure_dict_has_plain_containers_and_the_same_leaves(block):
    state = nnx.state(block)
    plain = pytree.to_pure_dict(state)
    assert type(plain) is dict and type(plain["layers"]) is dict
    assert isinstance(plain["layers"][1]["kernel"], jax.Array)
    assert pytree.tree_hash(plain) == pytree.tree_hash(state)
    assert pytree.tree_hash(pytree.to_pure_dict(block)) == pytree.tree_hash(state)

    opt = optax.adamw(1e-3).init({"w": jnp.ones(2)})
    plain = pytree.to_pure_dict(opt)
    assert isinstance(plain, tuple) and set(plain[0]) == {"count", "mu", "nu"}
    assert plain[1] == {}
    mixed = {"z": [1, None, (2, Projections(3, 4))], "a": Packed(5, 6), "e": {}}
    assert pytree.to_pure_dict(mixed) == {
        "z": [1, None, (2, {"query": 3, "value": 4})], "a": {"codes": 5, "scale": 6}, "e": {},
    }
    assert list(pytree.to_pure_dict(mixed)) == ["z", "a", "e"]


def test_pure_dict_maps_leaves_in_the_order_of_jax():
    tree = {"b": Projections(1, 2), "a": [3, {"d": 4, "c": 5}]}
    seen = []
    pytree.to_pure_dict(tree, seen.append)
    assert seen == jax.tree.leaves(tree)


def test_static_fields_have_texts_only_where_another_process_would_agree():
    @dataclasses.dataclass(frozen=True)
    class Spec:
        bits: int
        names: frozenset

    @struct.dataclass
    class Holder:
        x: int
        spec: object = struct.field(pytree_node=False)
        dtype: object = struct.field(pytree_node=False)
        fn: object = struct.field(pytree_node=False)

    holder = Holder(1, Spec(np.int64(4), frozenset({"b", "a"})), jnp.bfloat16, lambda: None)
    (node,) = pytree.typed_nodes([holder])
    assert node["path"] == "0"
    assert node["static"] == {
        "spec": "Spec(bits=4, names={'a', 'b'})", "dtype": "dtype bfloat16", "fn": None,
    }
    (twin,) = pytree.typed_nodes([holder.replace(dtype=np.dtype(ml_dtypes.bfloat16))])
    assert twin["static"]["dtype"] == node["static"]["dtype"]
