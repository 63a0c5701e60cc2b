import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fadex.core import checkpoint
from fadex.core.checkpoint import CheckpointError, read_manifest, restore, save, verify
from fadex.core.pytree import flatten_with_paths, to_pure_dict, tree_hash


class State(NamedTuple):
    count: jax.Array
    moments: dict


@struct.dataclass
class Packed:
    codes: jax.Array
    scale: jax.Array | None
    bits: int = struct.field(pytree_node=False, default=4)
    dtype: object = struct.field(pytree_node=False, default=jnp.float32)


def small_tree():
    return {"layer": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
            "step": 3}


def assert_same(actual, expected):
    """Same structure, kinds, shapes, dtypes and bytes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (name, a), (_, b) in zip(
        flatten_with_paths(actual).items(), flatten_with_paths(expected).items()
    ):
        both_jax = isinstance(a, jax.Array) and isinstance(b, jax.Array)
        assert both_jax or type(a) is type(b), name
    assert tree_hash(actual) == tree_hash(expected)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """One checkpoint, copied by every test that damages it."""
    return save(tmp_path_factory.mktemp("golden") / "ck", small_tree(), metadata={"loss": 0.5})


@pytest.fixture
def copy(golden, tmp_path):
    return Path(shutil.copytree(golden, tmp_path / "copy"))


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(bytes(data))


def rewrite_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_bytes(checkpoint._checksum_line(content))


# -- round trips ---------------------------------------------------------------------------


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    rng = np.random.default_rng(0)
    tree = {
        "float32": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32),
        "special": np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32),
        "zeros": jnp.full((4,), -0.0),
        "bfloat16": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        "float16": rng.normal(size=2).astype(np.float16),
        "float64": rng.normal(size=2),
        "int4": jnp.asarray([-8, 7, 0], jnp.int4),
        "uint4": np.asarray([15, 1, 0], ml_dtypes.uint4),
        "fp8": jnp.asarray([1.0, -448.0], jnp.float8_e4m3fn),
        "fp8_as_bytes": jnp.asarray([1.5, -2.0], jnp.float8_e4m3),
        "complex": np.asarray([1 + 2j], np.complex64),
        "bool": jnp.asarray([True, False]),
        "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
        "scalar": {"jax": jnp.asarray(2, jnp.int8), "numpy": np.float32(3), "array": np.zeros(())},
        "python": [True, -3, 10**30, 0.1, float("inf"), 1 - 2j, "text\n", b"\x00\xff"],
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": (), "array": jnp.zeros((0, 3), jnp.int8)},
        "tuple": (1, [2.0, (None,)]),
        "odd names": {"a.b": np.ones(1), "..": np.ones(2), "é ": np.ones(3), "": np.ones(4)},
        "integer keys": {10: np.ones(1), 9: np.zeros(1)},
    }
    path = save(tmp_path / "ck", tree)
    assert_same(restore(path), tree)
    assert_same(restore(path, tree), tree)
    assert restore(path)["python"] == tree["python"]
    assert restore(path)["integer keys"].keys() == {9, 10}
    # A restored numpy array is ours to change.
    restored = restore(path)["float64"]
    restored += 1


@pytest.mark.parametrize("tree", [jnp.arange(3.0), 7, None, (), {"a": {}}, [None, 1.5]],
                         ids=["array", "number", "none", "empty", "nested-empty", "scalars"])
def test_bare_leaves_and_trees_without_arrays_are_trees_too(tmp_path, tree):
    path = save(tmp_path / "ck", tree)
    assert_same(restore(path), tree)
    assert_same(restore(path, tree), tree)


def test_key_arrays_keep_their_implementation_and_their_stream(tmp_path):
    tree = {
        "one": jax.random.key(3),
        "rbg": jax.random.key(4, impl="rbg"),
        "many": jax.vmap(jax.random.key)(jnp.arange(6, dtype=jnp.uint32)).reshape(2, 3),
        "none": jax.random.split(jax.random.key(0), 0),
        "raw": jax.random.PRNGKey(5),
    }
    path = save(tmp_path / "ck", tree)
    for back in (restore(path), restore(path, tree), restore(path, jax.eval_shape(lambda: tree))):
        assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, tree)
        assert str(jax.random.key_impl(back["rbg"])) == "rbg"
        assert tree_hash(back) == tree_hash(tree)
        draw = jax.vmap(jax.vmap(jax.random.normal))
        np.testing.assert_array_equal(draw(back["many"]), draw(tree["many"]))
    with pytest.raises(CheckpointError, match=r"one: checkpoint key<fry>\[\], target key<rbg>\[\]"):
        restore(path, tree | {"one": jax.random.key(3, impl="rbg")})


def test_weak_types_survive_so_that_promotion_does_not_change(tmp_path):
    tree = {"rate": jnp.asarray(0.1), "table": jnp.full((2, 2), 3.0), "strong": jnp.float32(0.1)}
    back = restore(save(tmp_path / "ck", tree))
    assert jax.tree.map(lambda x: x.weak_type, back) == {
        "rate": True, "table": True, "strong": False}
    assert tree_hash(back) == tree_hash(tree)
    assert (back["rate"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_named_tuples_and_dataclasses_come_back_through_a_target(tmp_path):
    tree = [State(jnp.int32(4), {"m": np.ones(2)}), Packed(jnp.arange(3), None, bits=3)]
    path = save(tmp_path / "ck", tree)
    target = [State(jnp.int32(0), {"m": np.zeros(2)}), Packed(jnp.zeros(3, jnp.int32), None, 3)]
    assert_same(restore(path, target), tree)
    assert restore(path, target)[1].bits == 3
    assert_same(restore(path), to_pure_dict(tree))
    types = {node["path"]: node for node in read_manifest(path)["types"]}
    assert types["0"]["type"].endswith("State")
    assert types["1"]["static"] == {"bits": "3", "dtype": "dtype float32"}


def test_leaves_are_matched_by_path_not_by_order(tmp_path):
    path = save(tmp_path / "ck", {"count": np.ones(1), "moments": np.zeros(1), "a": np.ones(2)})

    class Reordered(NamedTuple):
        moments: np.ndarray
        a: np.ndarray
        count: np.ndarray

    back = restore(path, Reordered(np.zeros(1), np.zeros(2), np.zeros(1)))
    assert (back.moments[0], back.a[0], back.count[0]) == (0.0, 1.0, 1.0)


def test_a_static_field_that_differs_is_named(tmp_path):
    path = save(tmp_path / "ck", {"q": Packed(jnp.arange(3), None, bits=3)})
    with pytest.raises(CheckpointError, match=r"q/bits \(static\): checkpoint 3, target 4"):
        restore(path, {"q": Packed(jnp.arange(3), None, bits=4)})
    # Two spellings of the same dtype are no difference.
    restore(path, {"q": Packed(jnp.arange(3), None, bits=3, dtype=np.dtype("float32"))})


def test_an_optax_state_continues_where_it_stopped(tmp_path):
    params = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.zeros(3, jnp.bfloat16)}
    tx = optax.chain(optax.clip(1.0), optax.adamw(learning_rate=1e-2))
    grads = jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(grads, tx.init(params), params)
    path = save(tmp_path / "ck", {"params": params, "opt": state})
    abstract = jax.eval_shape(lambda: {"params": params, "opt": tx.init(params)})
    back = restore(path, abstract)
    assert_same(back["opt"], state)
    ours = tx.update(grads, back["opt"], back["params"])
    theirs = tx.update(grads, state, params)
    assert tree_hash(ours) == tree_hash(theirs)


def test_an_nnx_state_merges_into_the_same_module(tmp_path):
    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.dropout(self.norm(x))

    net, x = Net(0), jnp.linspace(0.0, 1.0, 8).reshape(2, 4)
    net(x)
    graph, state = nnx.split(net)
    path = save(tmp_path / "ck", state)
    assert "layers/0/kernel" in {leaf["path"] for leaf in read_manifest(path)["leaves"]}

    _, fresh = nnx.split(Net(1))
    abstract = nnx.split(nnx.eval_shape(lambda: Net(1)))[1]
    expected = nnx.merge(graph, state, copy=True)(x)
    for target in (fresh, abstract):
        back = restore(path, target)
        assert type(back) is nnx.State
        assert tree_hash(back) == tree_hash(state)
        np.testing.assert_array_equal(nnx.merge(graph, back)(x), expected)
    # Without a target: a plain dict that nnx itself takes back.
    plain = restore(path)
    assert type(plain) is dict and isinstance(plain["layers"][0]["kernel"], jax.Array)
    nnx.replace_by_pure_dict(fresh, plain)
    assert tree_hash(fresh) == tree_hash(state)


def test_states_of_many_seeds_round_trip(tmp_path):
    tx = optax.adam(1e-3)

    def start(key):
        params = {"w": jax.random.normal(key, (2,))}
        return params, tx.init(params), key

    state = jax.vmap(start)(jax.random.split(jax.random.key(0), 4))
    assert_same(restore(save(tmp_path / "ck", state), state), state)


def test_kind_and_place_follow_the_target(tmp_path):
    path = save(tmp_path / "ck", {"x": jnp.ones(2), "y": np.ones(2, np.float32), "n": 1})
    back = restore(path)
    assert isinstance(back["x"], jax.Array) and isinstance(back["y"], np.ndarray)
    assert not back["x"].committed
    as_numpy = restore(path, {"x": np.zeros(2, np.float32), "y": back["y"], "n": 0})
    assert isinstance(as_numpy["x"], np.ndarray)
    device = jax.devices()[0]
    pinned = jax.device_put(jnp.ones(2), device)
    back = restore(path, jax.eval_shape(lambda: back) | {"x": pinned})
    assert back["x"].committed and not back["y"].committed and back["n"] == 1
    mesh = NamedSharding(Mesh(np.asarray([device]), ("x",)), PartitionSpec("x"))
    for where in (mesh, {"x": mesh, "y": mesh, "n": None}):
        back = restore(path, sharding=where)
        assert back["x"].sharding == mesh and back["y"].sharding == mesh and back["n"] == 1
    with pytest.raises(ValueError, match="sharding: not a prefix"):
        restore(path, sharding={"x": mesh})
    with pytest.raises(TypeError, match="sharding: expected"):
        restore(path, sharding="cpu")


def test_64_bit_leaves_are_never_narrowed_in_silence(tmp_path):
    with jax.enable_x64(True):
        path = save(tmp_path / "ck", {"x": jnp.full(2, 1 / 3, jnp.float64), "y": np.arange(2)})
        assert restore(path)["x"].dtype == jnp.float64
    with pytest.raises(CheckpointError, match=r"64-bit.*\n  x: float64\[2\]$"):
        restore(path)
    target = {"x": np.zeros(2), "y": np.zeros(2, int)}
    assert restore(path, target)["x"].dtype == np.float64


def test_paths_may_be_relative_links_and_nested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert save("runs/a/step_1", small_tree()) == tmp_path / "runs/a/step_1"
    assert_same(restore("runs/a/step_1"), small_tree())
    assert_same(restore(Path("runs/../runs/a/step_1")), small_tree())
    Path("latest").symlink_to("runs/a/step_1")
    assert_same(restore("latest"), small_tree())
    save("latest", {"x": 1}, overwrite=True)
    assert Path("latest").is_symlink() and restore("runs/a/step_1") == {"x": 1}
    with pytest.raises(ValueError, match="path: expected a local path"):
        save("gs://bucket/x", small_tree())


def test_metadata_comes_back_and_must_be_json(golden, tmp_path):
    manifest = read_manifest(golden)
    assert manifest["metadata"] == {"loss": 0.5}
    assert manifest["written_by"]["jax"] == jax.__version__
    assert verify(golden) == manifest
    with pytest.raises(TypeError, match="metadata: must be JSON"):
        save(tmp_path / "ck", small_tree(), metadata={"f": print})
    assert not list(tmp_path.iterdir())


def test_plain_orbax_reads_the_arrays(golden):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(golden / "arrays", ocp.args.PyTreeRestore(
            restore_args=dict.fromkeys(["layer/w", "layer/b"],
                                       ocp.RestoreArgs(restore_type=np.ndarray))))
    np.testing.assert_array_equal(found["layer/w"], np.arange(6.0).reshape(2, 3))


def test_reading_in_many_batches_gives_the_same_tree(golden, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 1)
    assert_same(restore(golden), small_tree())


# -- damage --------------------------------------------------------------------------------


def test_random_bit_flips_in_random_files_are_all_caught(copy):
    rng = random.Random(0)
    files = files_of(copy)
    assert len(files) > 8
    for _ in range(20):
        file = rng.choice(files)
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(CheckpointError):
            restore(copy)
        flip(file, bit)
    assert_same(restore(copy), small_tree())


def test_a_flip_of_any_bit_of_manifest_and_checksum_is_caught(copy):
    for name, step in (("manifest.sha256", 1), ("manifest.json", 97)):
        for bit in range(0, 8 * (copy / name).stat().st_size, step):
            flip(copy / name, bit)
            with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
                read_manifest(copy)
            flip(copy / name, bit)
    verify(copy)


def test_every_file_that_is_missing_truncated_or_extra_is_named(copy):
    for file in files_of(copy):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=f"(missing.*{file.name}|{file.name}: missing)"):
            restore(copy)
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=f"{file.name}( is damaged|: .* bytes, expected)"
                           if file.parent != copy else r"manifest\.json is damaged"):
            restore(copy)
        file.write_bytes(content)
    (copy / "arrays" / "d" / "stray").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="arrays/d/stray: not in the manifest"):
        restore(copy)
    (copy / "arrays" / "d" / "stray").unlink()
    (copy / "NOTES.txt").write_text("a note beside the checkpoint is no damage")
    verify(copy)


def test_all_damaged_files_are_named_at_once(copy):
    first, second = [f for f in files_of(copy) if f.parent != copy][:2]
    flip(first, 0)
    second.unlink()
    with pytest.raises(CheckpointError) as caught:
        verify(copy)
    assert first.name in str(caught.value) and second.name in str(caught.value)


def test_unknown_versions_and_foreign_folders_are_refused(copy, tmp_path):
    rewrite_manifest(copy, lambda m: m.update(version=99))
    with pytest.raises(CheckpointError, match="unknown format 'fadex-checkpoint' version 99"):
        restore(copy)
    rewrite_manifest(copy, lambda m: m.update(version=1, format="other"))
    with pytest.raises(CheckpointError, match="unknown format 'other'"):
        restore(copy)
    rewrite_manifest(copy, lambda m: m.pop("version"))
    with pytest.raises(CheckpointError, match="not a checkpoint manifest"):
        restore(copy)
    with pytest.raises(CheckpointError, match="the path does not exist"):
        restore(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        restore(tmp_path)
    with pytest.raises(CheckpointError, match="restore it with Orbax"):
        restore(copy / "arrays")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        restore(tmp_path / "file")
    assert issubclass(CheckpointError, ValueError)


def test_every_difference_to_the_target_is_named_with_both_values(golden):
    target = {
        "layer": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(3, jnp.float32), "extra": np.zeros(1)},
        "step": jnp.int32(0),
    }
    with pytest.raises(CheckpointError) as caught:
        restore(golden, target)
    for line in (
        "layer/w: checkpoint float32[2,3], target float32[3,2]",
        "layer/b: checkpoint bfloat16[3], target float32[3]",
        "layer/extra: not in the checkpoint; target float64[1]",
        "step: checkpoint Python int, target int32[]",
    ):
        assert line in str(caught.value)
    with pytest.raises(CheckpointError, match=r"layer/w: not in the target; checkpoint float32"):
        restore(golden, {"layer": {"b": jnp.zeros(3, jnp.bfloat16)}, "step": 0})
    with pytest.raises(CheckpointError, match="step: checkpoint Python int, target Python bool"):
        restore(golden, small_tree() | {"step": True})


# -- what may not be saved -----------------------------------------------------------------


def test_leaves_that_cannot_be_stored_are_named_before_anything_is_written(tmp_path):
    bad = {"ok": 1, "a": object(), "b": [np.asarray(["x"])], "c": np.zeros(1, "M8[s]"),
           "d": np.zeros(1, [("x", "f4")]), "e": jax.ShapeDtypeStruct((1,), jnp.float32)}
    with pytest.raises(TypeError) as caught:
        save(tmp_path / "ck", bad)
    lines = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == ["a", "b/0", "c", "d", "e"]
    with pytest.raises(TypeError, match="x: a traced value"):
        jax.jit(lambda x: save(tmp_path / "ck", {"x": x}) and x)(1.0)
    with pytest.raises(ValueError, match="share a path"):
        save(tmp_path / "ck", {"a/b": 1, "a": {"b": 2}})
    assert not list(tmp_path.iterdir())


def test_an_existing_path_is_not_replaced_unless_asked(copy, tmp_path):
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=f"{copy} exists; pass overwrite=True"):
        save(copy, {"x": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert_same(restore(copy), small_tree())
    save(copy, {"x": 1}, overwrite=True)
    assert restore(copy) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    for path in (tmp_path / "home", tmp_path / "home" / "thesis.tex", tmp_path):
        with pytest.raises(FileExistsError, match="not a checkpoint; it is never replaced"):
            save(path, small_tree(), overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "x"
    (tmp_path / "new").mkdir()
    save(tmp_path / "new", {"x": 1}, overwrite=True)
    assert restore(tmp_path / "new") == {"x": 1}


# -- interruptions -------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("stage", ["_write_arrays", "_file_table", "_write_manifest",
                                   "_compare_with_source", "_move_into_place"])
def test_a_failure_at_any_stage_leaves_what_was_there(golden, tmp_path, monkeypatch, stage,
                                                      overwrite):
    path = tmp_path / "ck"
    if overwrite:
        shutil.copytree(golden, path)
    real = getattr(checkpoint, stage)

    def fail(*args):
        if stage in ("_write_arrays", "_file_table", "_write_manifest"):
            real(*args)
        raise KeyboardInterrupt(stage)

    monkeypatch.setattr(checkpoint, stage, fail)
    with pytest.raises(KeyboardInterrupt, match=stage):
        save(path, {"x": jnp.ones(2)}, overwrite=overwrite)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == (["ck"] if overwrite else [])
    if overwrite:
        assert_same(restore(path), small_tree())


def test_a_failing_rename_puts_the_old_checkpoint_back(copy, tmp_path, monkeypatch):
    calls = []

    def second_fails(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no space left")
        os.rename(source, destination)

    monkeypatch.setattr(checkpoint, "_rename", second_fails)
    with pytest.raises(OSError, match="no space left"):
        save(copy, {"x": 1}, overwrite=True)
    assert len(calls) == 3
    assert_same(restore(copy), small_tree())
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_a_path_that_appears_meanwhile_is_kept(golden, tmp_path, monkeypatch):
    real = checkpoint._compare_with_source

    def intrude(*args):
        real(*args)
        shutil.copytree(golden, tmp_path / "ck")

    monkeypatch.setattr(checkpoint, "_compare_with_source", intrude)
    with pytest.raises(FileExistsError, match="appeared while the checkpoint was written"):
        save(tmp_path / "ck", {"x": 1})
    assert_same(restore(tmp_path / "ck"), small_tree())
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_what_was_written_is_compared_with_the_tree_before_it_counts(copy, monkeypatch):
    def write_something_else(folder, arrays, write=checkpoint._write_arrays):
        write(folder, {name: np.asarray(x) + 1 for name, x in arrays.items()})

    monkeypatch.setattr(checkpoint, "_write_arrays", write_something_else)
    with pytest.raises(CheckpointError, match="x reads back differently; nothing was replaced"):
        save(copy, {"x": np.ones(2)}, overwrite=True)
    assert_same(restore(copy), small_tree())


def test_a_process_killed_between_the_renames_leaves_the_old_checkpoint_findable(copy, tmp_path):
    code = f"""
        import os
        from fadex.core import checkpoint

        def die_at_the_second(source, destination, calls=[]):
            calls.append(source)
            if len(calls) == 2:
                os._exit(9)
            os.rename(source, destination)

        checkpoint._rename = die_at_the_second
        checkpoint.save({str(copy)!r}, {{"x": 1}}, overwrite=True)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 9
    assert not copy.exists()
    with pytest.warns(UserWarning, match="an overwrite was interrupted"):
        assert_same(restore(copy), small_tree())
    with pytest.raises(FileExistsError, match="interrupted overwrite left its old checkpoint"):
        save(copy, {"x": 2})
    save(copy, {"x": 2}, overwrite=True)
    assert restore(copy) == {"x": 2}
    assert not list(tmp_path.glob(".copy.replaced-*"))


# -- several devices -----------------------------------------------------------------------


def test_a_checkpoint_of_eight_devices_opens_on_one_and_the_reverse(golden, tmp_path):
    path = tmp_path / "eight"
    code = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from fadex.core.checkpoint import restore, save

        assert len(jax.devices()) == 8
        mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("rows", "columns"))
        place = lambda *axes: NamedSharding(mesh, P(*axes))
        tree = {{
            "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), place("rows", "columns")),
            "copied": jax.device_put(jnp.arange(4, dtype=jnp.bfloat16), place()),
            "bytes": jax.device_put(jnp.ones(8, jnp.float8_e4m3), place("rows")),
            "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), place("rows")),
            "count": jnp.int32(3),
        }}
        save({str(path)!r}, tree)

        def same(back):
            data = lambda x: jax.random.key_data(x) if x.dtype == tree["keys"].dtype else x
            return all(jax.tree.leaves(jax.tree.map(
                lambda a, b: np.array_equal(data(a), data(b)), back, tree)))

        here = restore({str(path)!r}, tree)           # each leaf where its target lives
        assert same(here) and here["w"].sharding == tree["w"].sharding
        assert here["keys"].sharding.is_equivalent_to(tree["keys"].sharding, 1)
        assert not here["count"].committed             # so it mixes with sharded arrays
        jax.jit(lambda t: t["w"] * t["count"])(here)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
        assert restore({str(path)!r}, abstract)["w"].sharding == tree["w"].sharding
        other = restore({str(path)!r}, sharding={{
            "w": place("columns"), "copied": place("rows"), "bytes": None, "keys": None,
            "count": jax.devices()[5]}})
        assert same(other) and other["w"].sharding == place("columns")
        assert other["count"].devices() == {{jax.devices()[5]}}
        one = restore({str(golden)!r}, sharding=place())   # written on one device
        assert one["layer"]["w"].sharding == place()
    """
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                        "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(jax.devices()) == 1
    expected = {
        "w": jnp.arange(64.0).reshape(8, 8), "copied": jnp.arange(4, dtype=jnp.bfloat16),
        "bytes": jnp.ones(8, jnp.float8_e4m3), "keys": jax.random.split(jax.random.key(0), 8),
        "count": jnp.int32(3),
    }
    assert_same(restore(path), expected)
    assert_same(restore(path, expected), expected)
    assert restore(path)["w"].devices() == {jax.devices()[0]}
