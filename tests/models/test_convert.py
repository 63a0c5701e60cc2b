"""Weight conversion against torch models (golden files, and live where torch is installed)."""

import dataclasses
import functools
import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from fadex.core.pytree import flatten_with_paths, map_with_path, param_count, tree_hash
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.models.convert import (
    dit_config_from_state_dict,
    export_state_dict,
    load_dit,
    load_state_dict,
    read_state_dict,
)
from fadex.models.layers import sincos_2d

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = ["dit", "diffusers_dit"]
FILES = {"dit": "dit_facebook.npz", "diffusers_dit": "dit_diffusers.npz"}


@pytest.fixture(scope="module")
def golden():
    """Golden arrays by layout, the weights apart under ``"weights"``."""
    found = {}
    for layout, name in FILES.items():
        with np.load(GOLDEN / name) as stored:
            arrays = {key: stored[key] for key in stored.files}
        arrays["weights"] = {
            key.removeprefix("w:"): arrays.pop(key) for key in list(arrays) if key[:2] == "w:"
        }
        found[layout] = arrays
    return found


@functools.partial(jax.jit, static_argnums=0)
def jitted(denoiser, *args):
    """One program for all models of one architecture."""
    return denoiser.apply(*args)


def call(model, x, t, y):
    denoiser, params = from_nnx(model)
    return np.asarray(jitted(denoiser, params, x, jnp.asarray(t), jnp.asarray(y)))


def torch_call(model, x, t, y):
    """Our model on torch's ``[B, C, H, W]`` arrays."""
    return call(model, x.transpose(0, 2, 3, 1), t, y).transpose(0, 3, 1, 2)


def relative_error(actual, expected):
    """The largest relative error of a sample in the batch."""
    axes = tuple(range(1, expected.ndim))
    difference = np.square(actual.astype(np.float64) - expected).sum(axes)
    return np.sqrt(difference / np.square(expected.astype(np.float64)).sum(axes)).max()


@functools.lru_cache
def random_params(config):
    """Parameters none of which is zero."""
    like = nnx.state(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(0)
    draw = lambda shape: (0.1 * rng.standard_normal(shape)).astype(config.param_dtype)
    return map_with_path(lambda _, x: jax.device_put(draw(x.shape)), like)


def small_config(**overrides):
    fields = dict(depth=2, width=16, num_heads=2, in_channels=3, num_classes=5, time_scale=1.0)
    return DiTConfig(**{**fields, **overrides})


# -- parity --------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_equal_the_torch_models(golden, layout, scan_layers):
    stored = golden[layout]
    model = load_dit(stored["weights"], num_heads=2, layout=layout, scan_layers=scan_layers)
    batches = {"dit": [0] if scan_layers else [1, 2], "diffusers_dit": [0]}[layout]
    shapes = [(8, 8), (4, 12), (6, 2)]
    for i in batches:
        assert stored[f"x{i}"].shape[2:] == shapes[i]
        out = torch_call(model, stored[f"x{i}"], stored[f"t{i}"], stored[f"y{i}"])
        assert out.shape == stored[f"out{i}"].shape
        assert relative_error(out, stored[f"out{i}"]) <= 1e-5


def test_default_norm_eps_of_diffusers_is_within_the_bar(golden):
    stored = golden["diffusers_dit"]
    model = load_dit(stored["weights"], num_heads=2, layout="diffusers_dit")
    out = torch_call(model, stored["x0"], stored["t0"], stored["y0"])
    assert relative_error(out, stored["out_default_eps"]) <= 1e-5


def test_diffusers_embeds_times_at_other_frequencies(golden):
    stored = golden["diffusers_dit"]
    model = load_dit(
        stored["weights"], num_heads=2, layout="diffusers_dit", time_frequencies="dit"
    )
    out = torch_call(model, stored["x0"], stored["t0"], stored["y0"])
    assert stored["t0"].tolist() == [0.0, 7.0, 251.0, 999.0]
    errors = [relative_error(out[i:i + 1], stored["out0"][i:i + 1]) for i in range(4)]
    assert errors[0] < 1e-5  # cos 0 and sin 0 at every frequency
    assert errors[1] > 1e-3 and errors[2] > 0.1 and errors[3] > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_live_parity(layout):
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    make = load_generator("make_dit_golden")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if layout == "dit":
            peer, double = make.reference_model(seed=11), True
            batches = [make.inputs((8, 8), 12), make.inputs((2, 10), 13)]
        else:
            peer, double = make.diffusers_model(seed=11), False
            batches = [make.inputs((8, 8), 12)]
        arrays = make.run(peer, batches, double=double)
    model = load_dit(peer.state_dict(), num_heads=make.HEADS, layout=layout)  # torch tensors
    for i in range(len(batches)):
        out = torch_call(model, arrays[f"x{i}"], arrays[f"t{i}"], arrays[f"y{i}"])
        assert relative_error(out, arrays[f"out{i}"]) <= 1e-5


def test_live_torch_reads_what_we_export():
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    make = load_generator("make_dit_golden")
    config = DiTConfig(
        depth=make.DEPTH, width=make.WIDTH, num_heads=make.HEADS, in_channels=make.CHANNELS,
        num_classes=make.CLASSES, learn_sigma=True, time_scale=1.0,
    )
    params = random_params(config)
    x, t, y = make.inputs((8, 8), 14)
    for layout in LAYOUTS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = make.reference_model() if layout == "dit" else make.diffusers_model()
        weights = export_state_dict(
            config, params, layout=layout, input_size=8 if layout == "dit" else None
        )
        peer.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
        arrays = make.run(peer, [(x, t, y)], double=layout == "dit")
        model = load_dit(weights, num_heads=make.HEADS, layout=layout)
        out = torch_call(model, arrays["x0"], arrays["t0"], arrays["y0"])
        assert relative_error(out, arrays["out0"]) <= 1e-5
    bfloat = {name: torch.from_numpy(w).bfloat16() for name, w in weights.items()}
    loaded = load_state_dict(config, bfloat, layout=layout)
    assert flatten_with_paths(loaded)["final_linear/kernel"].dtype == jnp.float32


def load_generator(name):
    spec = importlib.util.spec_from_file_location(name, GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- round trips ---------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_exact(layout, scan_layers, dtype):
    config = small_config(scan_layers=scan_layers, param_dtype=dtype, learn_sigma=True)
    params = random_params(config)
    weights = export_state_dict(config, params, layout=layout, input_size=8)
    assert all(w.flags.c_contiguous for w in weights.values())
    again = load_state_dict(config, weights, layout=layout)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert tree_hash(again) == tree_hash(params)
    assert export_state_dict(config, nnx.to_pure_dict(params), layout=layout).keys() < \
        weights.keys()  # all but the position table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_weights_survive_the_way_there_and_back(golden, layout):
    weights = golden[layout]["weights"]
    config = dit_config_from_state_dict(weights, num_heads=2, layout=layout)
    params = load_state_dict(config, weights, layout=layout)
    again = export_state_dict(
        config, params, layout=layout, input_size=8 if layout == "dit" else None
    )
    assert again.keys() == weights.keys()
    for name, value in again.items():
        assert value.dtype == np.float32
        tolerance = 1e-6 if name == "pos_embed" else 0.0
        np.testing.assert_allclose(value, weights[name], rtol=0, atol=tolerance, err_msg=name)


def test_layouts_hold_the_same_weights_and_stacking_changes_nothing():
    config = small_config(depth=3)
    params = random_params(config)
    stacked = dataclasses.replace(config, scan_layers=True)
    hashes = set()
    for layout in LAYOUTS:
        weights = export_state_dict(config, params, layout=layout)
        hashes.add(tree_hash(load_state_dict(config, weights, layout=layout)))
        of_stack = load_state_dict(stacked, weights, layout=layout)
        assert flatten_with_paths(of_stack)["blocks/attn/qkv/kernel"].shape == (3, 16, 48)
        assert tree_hash(export_state_dict(stacked, of_stack, layout=layout)) == tree_hash(weights)
    assert hashes == {tree_hash(params)}


def test_parameters_do_not_share_memory_with_the_state_dict():
    config = small_config()
    weights = export_state_dict(config, random_params(config))
    params = load_state_dict(config, weights)
    before = tree_hash(params)
    for value in weights.values():
        value += 1.0
    assert tree_hash(params) == before


def test_export_names_what_does_not_fit():
    config = small_config()
    params = nnx.to_pure_dict(random_params(config))
    with pytest.raises(ValueError, match="params: required with a DiTConfig"):
        export_state_dict(config)
    with pytest.raises(ValueError, match="input_size: expected a multiple of patch_size=2, got 7"):
        export_state_dict(config, params, input_size=7)
    del params["patch_embed"]["bias"]
    params["final_linear"]["kernel"] = jnp.ones((2, 2))
    params["more"] = jnp.ones(1)
    with pytest.raises(ValueError) as raised:
        export_state_dict(config, params)
    for part in ("patch_embed/bias (missing)", "more (unexpected)", "final_linear/kernel (2, 2)"):
        assert part in str(raised.value)
    with pytest.raises(TypeError, match="model: expected a DiT or .* MMDiT.* got dict"):
        export_state_dict({})


# -- errors --------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [True, False])
def test_all_problems_are_named_at_once(strict):
    config = small_config()
    weights = export_state_dict(config, random_params(config), input_size=8)
    del weights["blocks.1.mlp.fc1.weight"], weights["t_embedder.mlp.2.bias"]
    weights["blocks.0.attn.qkv.weight"] = weights["blocks.0.attn.qkv.weight"][:-1]
    weights["extra.weight"] = np.ones(3, np.float32)
    weights["blocks.2.attn.qkv.bias"] = np.ones(48, np.float32)
    weights["blocks.0.mlp.fc1.bias"] = np.ones(64, np.int8)
    weights["blocks.0.mlp.fc2.bias"] = np.full(16, np.nan, np.float32)
    weights["pos_embed"] = weights["pos_embed"][..., ::-1]
    with pytest.raises(ValueError) as raised:
        load_state_dict(config, weights, strict=strict)
    message = str(raised.value)
    assert "missing (2): 'blocks.1.mlp.fc1.weight', 't_embedder.mlp.2.bias'" in message
    assert "wrong shape (1): 'blocks.0.attn.qkv.weight' (47, 16), expected (48, 16)" in message
    assert "not floating point (1): 'blocks.0.mlp.fc1.bias' int8" in message
    assert "not finite (1): 'blocks.0.mlp.fc2.bias'" in message
    assert "not the fixed position table (1): 'pos_embed' differs from it by up to" in message
    unexpected = "unexpected (2): 'extra.weight', 'blocks.2.attn.qkv.bias'"
    assert (unexpected in message) is strict


def test_unexpected_names_are_ignored_only_without_strict():
    config = small_config()
    params = random_params(config)
    weights = export_state_dict(config, params) | {"extra": np.ones(3)}
    with pytest.raises(ValueError, match=r"unexpected \(1\): 'extra'$"):
        load_state_dict(config, weights)
    assert tree_hash(load_state_dict(config, weights, strict=False)) == tree_hash(params)


def test_copies_of_the_embedders_must_agree(golden):
    weights = dict(golden["diffusers_dit"]["weights"])
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_2.bias"
    weights[name] = weights[name] + 1e-3
    with pytest.raises(ValueError, match="one embedder, but these copies differ") as raised:
        load_dit(weights, num_heads=2, layout="diffusers_dit")
    assert f"{name!r} from '{name.replace('.1.norm1', '.0.norm1')}'" in str(raised.value)
    del weights[name]
    with pytest.raises(ValueError, match=r"missing \(1\): 'transformer_blocks.1.norm1.emb"):
        load_dit(weights, num_heads=2, layout="diffusers_dit", strict=False)


def test_stored_position_tables_are_compared():
    config = small_config()
    params = random_params(config)
    for layout, name in (("dit", "pos_embed"), ("diffusers_dit", "pos_embed.pos_embed")):
        weights = export_state_dict(config, params, layout=layout)
        table = sincos_2d(3, 3, 16)[None]
        for good in (table, table.astype(np.float16), table.astype(ml_dtypes.bfloat16)):
            load_state_dict(config, weights | {name: good}, layout=layout)
        rows_first = sincos_2d(3, 3, 16).reshape(3, 3, 16).swapaxes(0, 1).reshape(1, 9, 16)
        for bad in (rows_first, table + 1e-3, table[:, :8], table[0], table.astype(np.int32),
                    np.full_like(table, np.nan)):
            with pytest.raises(ValueError, match=f"not the fixed position table.*{name}"):
                load_state_dict(config, weights | {name: bad}, layout=layout, strict=False)


def test_the_other_layout_and_nested_checkpoints_get_a_hint():
    config = small_config()
    weights = export_state_dict(config, random_params(config), layout="diffusers_dit")
    for call in (lambda: load_state_dict(config, weights),
                 lambda: dit_config_from_state_dict(weights, num_heads=2)):
        with pytest.raises(ValueError, match="the names look like layout='diffusers_dit'"):
            call()
    with pytest.raises(TypeError, match=r"state_dict\['ema'\]: expected an array, got dict"):
        load_state_dict(config, {"ema": weights, "args": None})
    with pytest.raises(ValueError, match="layout: expected one of 'dit', 'diffusers_dit', got 'x'"):
        load_state_dict(config, weights, layout="x")
    with pytest.raises(ValueError, match="time_frequencies: expected one of"):
        load_dit(weights, num_heads=2, layout="diffusers_dit", time_frequencies="x")


def test_weights_too_large_for_the_parameter_dtype_are_named():
    config = small_config()
    weights = export_state_dict(config, random_params(config))
    weights["final_layer.linear.bias"] = weights["final_layer.linear.bias"] + 1e6
    narrow = dataclasses.replace(config, param_dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"not finite \(1\): 'final_layer.linear.bias' in float16"):
        load_state_dict(narrow, weights)


# -- sizes from shapes ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(learn_sigma=True, patch_size=4, depth=3),
        dict(class_dropout=0.0, mlp_ratio=100 / 36, width=36),
        dict(scan_layers=True, time_scale=1000.0, in_channels=1),
    ],
)
def test_config_is_read_off_the_shapes(layout, overrides):
    config = small_config(**overrides)
    weights = export_state_dict(config, random_params(config), layout=layout)
    kept = ("class_dropout", "scan_layers", "time_scale")
    given = {name: overrides[name] for name in kept if name in overrides}
    found = dit_config_from_state_dict(weights, num_heads=2, layout=layout, **given)
    assert int(found.width * found.mlp_ratio) == int(config.width * config.mlp_ratio)
    assert dataclasses.replace(found, mlp_ratio=config.mlp_ratio) == config


def test_config_errors():
    config = small_config()
    weights = export_state_dict(config, random_params(config))
    with pytest.raises(ValueError, match=r"layout 'dit' needs 'final_layer.linear.weight'$"):
        dit_config_from_state_dict(
            {k: v for k, v in weights.items() if k != "final_layer.linear.weight"}, num_heads=2
        )
    with pytest.raises(ValueError, match="num_heads: must divide width=16, got 3"):
        dit_config_from_state_dict(weights, num_heads=3)
    odd = weights | {"final_layer.linear.weight": np.ones((13, 16), np.float32)}
    with pytest.raises(ValueError, match="as many or twice as many output channels"):
        dit_config_from_state_dict(odd, num_heads=2)
    flat = weights | {"x_embedder.proj.weight": np.ones((16, 12), np.float32)}
    with pytest.raises(ValueError, match=r"expected 4 axes, got shape \(16, 12\)"):
        dit_config_from_state_dict(flat, num_heads=2)


# -- files ---------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_give_the_same_model(tmp_path, suffix):
    config = small_config()
    params = random_params(config)
    weights = export_state_dict(config, params)
    path = tmp_path / f"weights{suffix}"
    write(path, weights)
    assert tree_hash(load_state_dict(config, read_state_dict(path))) == tree_hash(params)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:40], b"", b"not weights at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"path: .*weights{suffix}' is not a sound"):
            read_state_dict(path)
    with pytest.raises(FileNotFoundError, match=r"path: no weight file at .*gone"):
        read_state_dict(tmp_path / f"gone{suffix}")


def write(path, weights):
    if path.suffix == ".npz":
        np.savez(path, **weights)
    else:
        pytest.importorskip("safetensors.numpy").save_file(weights, path)


def test_a_flipped_byte_in_an_npz_is_noticed(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.ones(1000, np.float32))
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a sound npz file"):
        read_state_dict(path)


def test_npz_that_holds_no_numbers(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.array([None]))
    with pytest.raises(ValueError, match="not a sound npz file"):
        read_state_dict(path)
    with open(path, "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match="not a sound npz file"):
        read_state_dict(path)


def test_bfloat16_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    config = small_config(param_dtype=jnp.bfloat16)
    params = random_params(config)
    weights = export_state_dict(config, params)
    path = tmp_path / "weights.safetensors"
    write(path, weights)
    stored = read_state_dict(path)
    assert {w.dtype for w in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert tree_hash(load_state_dict(config, stored)) == tree_hash(params)
    wide = load_state_dict(dataclasses.replace(config, param_dtype=jnp.float32), stored)
    narrowed = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    assert tree_hash(narrowed) == tree_hash(params)


def test_other_suffixes_and_a_missing_package(tmp_path, monkeypatch):
    for name in ("weights.pt", "weights"):
        with pytest.raises(ValueError, match=r"expected a \.safetensors or \.npz file"):
            read_state_dict(tmp_path / name)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fadex-jax\[data\]'"):
        read_state_dict(path)


# -- the model itself ----------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "millions", "published"), [("XL/2", 675, 675_129_632), ("S/2", 33, 32_963_360)]
)
def test_parameter_counts(name, millions, published):
    config = DiTConfig.named(name, learn_sigma=True, scan_layers=True)
    count = param_count(nnx.state(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))))
    assert round(count / 1e6) == millions
    # The original counts its fixed position table of 16 x 16 tokens.
    assert count + 256 * config.width == published


@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_untrained_model_predicts_exactly_zero(scan_layers):
    config = small_config(scan_layers=scan_layers, learn_sigma=True)

    @jax.jit  # without the leaves that are random, and slow to compile
    def initial():
        leaves = flatten_with_paths(nnx.state(DiT(config, rngs=nnx.Rngs(0))))
        return {path: x for path, x in leaves.items() if "modulation" in path or "final" in path}

    zeros = initial()
    params = map_with_path(lambda path, x: zeros.get(path, x), random_params(config))
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, params)
    shape = (2, 2, 6, 3) if scan_layers else (2, 4, 4, 3)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    out = call(model, x, [0.0, 999.0], [0, 5])
    assert out.shape == (*shape[:3], 6)
    assert not np.any(out)
