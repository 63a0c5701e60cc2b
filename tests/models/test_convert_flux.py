"""FLUX weights against diffusers (golden file, and live where torch is installed)."""

import dataclasses
import functools
import importlib.util
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.core.pytree import flatten_with_paths, map_with_path, tree_hash
from fadex.models import (
    DiTConfig,
    MMDiT,
    MMDiTConfig,
    export_state_dict,
    from_nnx,
    load_mmdit,
    load_state_dict,
    mmdit_config_from_state_dict,
    read_state_dict,
)
from fadex.models.convert import LAYOUTS

GOLDEN = Path(__file__).parents[1] / "golden"
FLUX = ["flux_bfl", "flux_diffusers"]


def load_generator():
    spec = importlib.util.spec_from_file_location("golden", GOLDEN / "make_flux_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_generator()


@pytest.fixture(scope="module")
def golden():
    """Golden arrays, the weights apart under ``"weights"``, in float32."""
    with np.load(GOLDEN / "flux_diffusers.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    weights = {name[2:]: arrays.pop(name).astype(np.float32)
               for name in list(arrays) if name[:2] == "w:"}
    return arrays | {"weights": weights}


@functools.partial(jax.jit, static_argnums=0)
def jitted(denoiser, *args):
    """One program for all models of one architecture."""
    return denoiser.apply(*args)


def call(model, arrays):
    cond = {name: arrays[name] for name in ("txt", "pooled", "img_ids", "txt_ids")}
    if model.config.guidance_embed:
        cond["guidance"] = arrays["guidance"]
    denoiser, params = from_nnx(model)
    return np.asarray(jitted(denoiser, params, arrays["x"], arrays["t"], cond))


def inputs_of(golden):
    return {name: value for name, value in golden.items() if name != "weights"}


def relative_error(actual, expected):
    """The largest relative error of a sample in the batch."""
    difference = np.square(actual.astype(np.float64) - expected).sum((1, 2))
    return np.sqrt(difference / np.square(expected.astype(np.float64)).sum((1, 2))).max()


def small_config(**overrides):
    fields = dict(
        patch_size=2, in_channels=8, double_depth=2, single_depth=3, width=16, num_heads=2,
        text_width=6, pooled_width=5, guidance_embed=True, rope_axes=(2, 2, 4),
    )
    return MMDiTConfig(**{**fields, **overrides})


def abstract_params(config):
    return nnx.state(nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0))), nnx.Param)


@functools.lru_cache
def random_params(config):
    like = abstract_params(config)
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape).astype(config.param_dtype)
    return map_with_path(lambda _, x: jax.device_put(draw(x.shape)), like)


# -- parity --------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(("out", "scan_layers"), [
    ("out", False), ("out", True), ("out_schnell", True)
])
def test_outputs_equal_those_of_diffusers(golden, out, scan_layers):
    weights = golden["weights"]
    if out == "out_schnell":
        weights = make.without_guidance(weights)
    model = load_mmdit(
        weights, layout="flux_diffusers", rope_axes=make.AXES, scan_layers=scan_layers
    )
    assert model.config.guidance_embed is (out == "out")
    error = relative_error(call(model, golden), golden[out])
    print(f"{out}, scan_layers={scan_layers}: relative error {error:.1e} to diffusers")
    assert error <= 1e-5


@pytest.mark.smoke
def test_names_of_bfl_give_the_same_model(golden):
    ours = load_mmdit(golden["weights"], layout="flux_diffusers", rope_axes=make.AXES,
                      scan_layers=True)
    weights = export_state_dict(ours)  # the default layout of an MMDiT: BFL's
    assert set(weights) >= {
        "img_in.weight", "double_blocks.1.txt_attn.norm.key_norm.scale",
        "single_blocks.0.modulation.lin.bias", "final_layer.adaLN_modulation.1.weight",
    }
    # An implementation of its own, which reads these names, in float64.
    formula = make.bfl_forward(weights, inputs_of(golden))
    assert relative_error(golden["out"], formula) <= 1e-5
    again = load_mmdit(weights, rope_axes=make.AXES, scan_layers=True)
    assert tree_hash(nnx.state(again)) == tree_hash(nnx.state(ours))
    assert relative_error(call(again, golden), formula) <= 1e-5


@pytest.mark.smoke
def test_final_modulation_is_stored_in_opposite_order(golden):
    theirs = golden["weights"]
    model = load_mmdit(theirs, layout="flux_diffusers", rope_axes=make.AXES, scan_layers=True)
    weights = export_state_dict(model, layout="flux_bfl")
    for kind in ("weight", "bias"):
        scale, shift = np.split(theirs[f"norm_out.linear.{kind}"], 2)
        np.testing.assert_array_equal(
            weights[f"final_layer.adaLN_modulation.1.{kind}"], np.concatenate([shift, scale])
        )
    # Every other modulation keeps its order, and linear1 has its parts one after another.
    np.testing.assert_array_equal(
        weights["double_blocks.1.img_mod.lin.weight"],
        theirs["transformer_blocks.1.norm1.linear.weight"],
    )
    single = "single_transformer_blocks.1."
    parts = [f"{single}attn.to_{part}.weight" for part in "qkv"] + [f"{single}proj_mlp.weight"]
    np.testing.assert_array_equal(
        weights["single_blocks.1.linear1.weight"], np.concatenate([theirs[p] for p in parts])
    )
    trap = dict(theirs) | {
        f"norm_out.linear.{kind}": weights[f"final_layer.adaLN_modulation.1.{kind}"]
        for kind in ("weight", "bias")
    }
    wrong = load_mmdit(trap, layout="flux_diffusers", rope_axes=make.AXES, scan_layers=True)
    assert relative_error(call(wrong, golden), golden["out"]) > 0.1


def test_live_parity_and_torch_reads_what_we_export():
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    arrays = make.inputs(12)
    for guidance in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = make.diffusers_model(guidance=guidance, seed=11)
            expected = make.run(peer, arrays)
        model = load_mmdit(  # torch tensors
            peer.state_dict(), layout="flux_diffusers", rope_axes=make.AXES, scan_layers=True
        )
        error = relative_error(call(model, arrays), expected)
        print(f"guidance={guidance}: relative error {error:.1e} to diffusers")
        assert error <= 1e-5
        other = map_with_path(lambda _, x: 0.9 * x, nnx.state(model))
        weights = export_state_dict(model, other, layout="flux_diffusers")
        peer.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = make.run(peer, arrays)
        nnx.update(model, other)
        assert relative_error(call(model, arrays), expected) <= 1e-5


# -- round trips ---------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("layout", FLUX)
def test_round_trip_is_exact(layout, scan_layers, dtype):
    config = small_config(scan_layers=scan_layers, param_dtype=dtype, guidance_embed=scan_layers)
    params = random_params(config)
    weights = export_state_dict(config, params, layout=layout)
    assert all(w.flags.c_contiguous and w.dtype == dtype for w in weights.values())
    again = load_state_dict(config, weights, layout=layout)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert tree_hash(again) == tree_hash(params)
    pure = export_state_dict(config, nnx.to_pure_dict(params), layout=layout)
    assert tree_hash(pure) == tree_hash(weights)


def test_golden_weights_survive_the_way_there_and_back(golden):
    weights = golden["weights"]
    model = load_mmdit(weights, layout="flux_diffusers", rope_axes=make.AXES)
    again = export_state_dict(model, layout="flux_diffusers")
    assert again.keys() == weights.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_layouts_hold_the_same_weights_and_stacking_changes_nothing():
    config = small_config()
    params = random_params(config)
    stacked = dataclasses.replace(config, scan_layers=True)
    for layout in FLUX:
        weights = export_state_dict(config, params, layout=layout)
        assert tree_hash(load_state_dict(config, weights, layout=layout)) == tree_hash(params)
        of_stack = load_state_dict(stacked, weights, layout=layout)
        leaves = flatten_with_paths(of_stack)
        assert leaves["single_blocks/linear1/kernel"].shape == (3, 16, 112)
        assert leaves["double_blocks/txt/norm/query/scale"].shape == (2, 8)
        assert tree_hash(export_state_dict(stacked, of_stack, layout=layout)) == tree_hash(weights)


def test_files_give_the_same_model(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    config = small_config(param_dtype=jnp.bfloat16)
    params = random_params(config)
    path = tmp_path / "flux.safetensors"
    save_file(export_state_dict(config, params), path)
    model = load_mmdit(read_state_dict(path), rope_axes=(2, 2, 4), param_dtype=jnp.bfloat16)
    assert model.config == config
    assert tree_hash(nnx.state(model)) == tree_hash(params)


# -- sizes from shapes ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", FLUX)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(guidance_embed=False, double_depth=1, mlp_ratio=100 / 36, width=36, num_heads=3,
             rope_axes=(2, 4, 6)),
        dict(in_channels=3, patch_size=1, scan_layers=True, time_scale=1.0),
        dict(in_channels=16, out_channels=8, text_width=7),
    ],
)
def test_config_is_read_off_the_shapes(layout, overrides):
    config = small_config(**overrides)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_params(config))
    weights = export_state_dict(config, zeros, layout=layout)
    kept = ("scan_layers", "time_scale")
    given = {name: overrides[name] for name in kept if name in overrides}
    found = mmdit_config_from_state_dict(
        weights, layout=layout, rope_axes=config.rope_axes, **given
    )
    assert found.hidden == config.hidden
    assert dataclasses.replace(found, mlp_ratio=config.mlp_ratio) == config


def test_flux_itself_is_recognised_from_its_shapes():
    """The published shapes, without their 11.9 billion values."""

    class Shape:
        def __init__(self, *shape):
            self.shape, self.dtype = shape, np.dtype(np.float32)

        def __array__(self, dtype=None, copy=None):
            raise AssertionError("only shapes are read")

    names = {"img_in.weight": (3072, 64), "txt_in.weight": (3072, 4096),
             "vector_in.in_layer.weight": (3072, 768), "guidance_in.in_layer.weight": (3072, 256),
             "final_layer.linear.weight": (64, 3072)}
    for i in range(19):
        names[f"double_blocks.{i}.img_attn.qkv.weight"] = (9216, 3072)
        names[f"double_blocks.{i}.img_attn.norm.query_norm.scale"] = (128,)
        names[f"double_blocks.{i}.img_mlp.0.weight"] = (12288, 3072)
    names |= {f"single_blocks.{i}.linear2.weight": (3072, 15360) for i in range(38)}
    weights = {name: Shape(*shape) for name, shape in names.items()}
    assert mmdit_config_from_state_dict(weights) == MMDiTConfig.flux()


# -- errors --------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layout", FLUX)
def test_all_problems_are_named_at_once(layout, strict):
    config = small_config()
    weights = export_state_dict(config, random_params(config), layout=layout)
    block, single, key = {
        "flux_bfl": ("double_blocks.1.txt_mlp.0", "single_blocks.2.linear2",
                     "double_blocks.0.img_attn.norm.key_norm.scale"),
        "flux_diffusers": ("transformer_blocks.1.ff_context.net.0.proj",
                           "single_transformer_blocks.2.proj_out",
                           "transformer_blocks.0.attn.norm_k.weight"),
    }[layout]
    del weights[f"{block}.weight"], weights[f"{block}.bias"]
    weights[f"{single}.weight"] = weights[f"{single}.weight"][:, :-1]
    weights[key] = np.full(8, np.nan, np.float32)
    weights[f"{single}.bias"] = np.ones(16, np.int8)
    weights["extra.weight"] = np.ones(3, np.float32)
    with pytest.raises(ValueError) as raised:
        load_state_dict(config, weights, layout=layout, strict=strict)
    message = str(raised.value)
    assert f"does not fit this MMDiT in layout {layout!r}\n" in message
    missing = sorted([f"'{block}.bias'", f"'{block}.weight'"])
    assert f"missing (2): {', '.join(missing)}" in message
    assert f"wrong shape (1): '{single}.weight' (16, 79), expected (16, 80)" in message
    assert f"not finite (1): {key!r}" in message
    assert f"not floating point (1): '{single}.bias' int8" in message
    assert ("unexpected (1): 'extra.weight'" in message) is strict


def test_layouts_of_other_models_get_a_hint():
    config = small_config()
    params = random_params(config)
    weights = {layout: export_state_dict(config, params, layout=layout) for layout in FLUX}
    for layout, other in (FLUX, FLUX[::-1]):
        hint = f"the names look like layout={other!r}"
        with pytest.raises(ValueError, match=hint):
            load_state_dict(config, weights[other], layout=layout)
        with pytest.raises(ValueError, match=f"layout {layout!r} needs .*{hint}"):
            mmdit_config_from_state_dict(weights[other], layout=layout)
    with pytest.raises(ValueError, match="expected one of 'flux_bfl', 'flux_diffusers', got 'dit'"):
        load_state_dict(config, weights["flux_bfl"], layout="dit")
    dit = DiTConfig(depth=1, width=16, num_heads=2, num_classes=2)
    with pytest.raises(ValueError, match="expected one of 'dit', 'diffusers_dit', got 'flux_bfl'"):
        load_state_dict(dit, weights["flux_bfl"], layout="flux_bfl")
    with pytest.raises(ValueError, match="the names look like layout='flux_bfl'"):
        load_state_dict(dit, weights["flux_bfl"])
    assert LAYOUTS == ("dit", "diffusers_dit", *FLUX)
    with pytest.raises(TypeError, match=r"state_dict\['model'\]: expected an array, got dict"):
        load_state_dict(config, {"model": weights})


def test_other_bad_arguments_are_named():
    config = small_config()
    params = random_params(config)
    weights = export_state_dict(config, params)
    with pytest.raises(ValueError, match="input_size: only a DiT has a position table, got 8"):
        export_state_dict(config, params, input_size=8)
    with pytest.raises(ValueError, match="params: required with an MMDiTConfig"):
        export_state_dict(config)
    with pytest.raises(ValueError, match="rope_axes: .* three even sizes that sum to 8"):
        mmdit_config_from_state_dict(weights)
    scale = "double_blocks.0.img_attn.norm.query_norm.scale"
    with pytest.raises(ValueError, match="the widths contradict one another: .*img_in.weight"):
        mmdit_config_from_state_dict(weights | {scale: np.ones(7)}, rope_axes=(2, 2, 4))
    with pytest.raises(ValueError, match=r"img_in.weight'\]: expected 2 axes, got shape \(16,\)"):
        mmdit_config_from_state_dict(weights | {"img_in.weight": np.ones(16)})
    pure = nnx.to_pure_dict(params)
    del pure["guidance_embed"]["fc1"]["bias"]
    pure["more"] = np.ones(1)
    with pytest.raises(ValueError, match="guidance_embed/fc1/bias.*more"):
        export_state_dict(config, pure)
