import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import cached_sample, custom_schedule, make_plan, taylorseer
from fadex.core.pytree import flatten_with_paths, map_with_path, param_count
from fadex.models import MMDiT, MMDiTConfig, apply_rope, from_nnx, image_ids, rope_table
from fadex.models.layers import RMSNorm
from fadex.sampling import sample, uniform_times

CONFIG = MMDiTConfig(
    patch_size=2, in_channels=8, double_depth=2, single_depth=2, width=16, num_heads=2,
    text_width=6, pooled_width=5, guidance_embed=True, rope_axes=(2, 2, 4),
)
B, NT, GRID = 3, 5, (2, 3)
NI = GRID[0] * GRID[1]
T = jnp.array([0.1, 0.5, 0.9])


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X = draw(0, B, 4, 6, 2)
COND = {"txt": draw(1, B, NT, 6), "pooled": draw(2, B, 5), "guidance": jnp.array([1.0, 3.5, 4.0])}


@functools.lru_cache
def random_model(**overrides):
    """All parameters random: adaLN-zero would hide mistakes. Stacked or listed, the same."""
    config = dataclasses.replace(CONFIG, **overrides)
    model = nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    stacked = {"double_blocks", "single_blocks"} if config.scan_layers else set()

    def leaf(path, like):
        group, _, rest = path.partition("/")
        paths = [f"{group}/{i}/{rest}" for i in range(2)] if group in stacked else [path]
        rows = []
        for name in paths:
            rng = np.random.default_rng(sum(map(ord, name)) * len(name))
            shape = like.shape[1:] if group in stacked else like.shape
            rows.append(0.3 * rng.standard_normal(shape) + ("scale" in name))
        return jnp.asarray(np.stack(rows) if group in stacked else rows[0], like.dtype)

    nnx.update(model, map_with_path(leaf, nnx.state(model, nnx.Param)))
    return model


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run(denoiser, method, static, params, *args):
    """One program for each method; ``static`` arguments come last."""
    return getattr(denoiser, method)(params, *args, *static)


def call(model, method="apply", *args, static=()):
    denoiser, params = from_nnx(model)
    return run(denoiser, method, static, params, *args)


def close(actual, expected, tolerance=1e-5):
    scale = float(np.abs(np.asarray(expected)).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def tokens_of(x):
    """FLUX's packing, one pixel at a time: channel, then row, then column of the patch."""
    x = np.asarray(x)
    out = np.zeros((x.shape[0], NI, 8), np.float32)
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            for i in range(8):
                channel, p, q = i // 4, i // 2 % 2, i % 2
                out[:, row * GRID[1] + column, i] = x[:, 2 * row + p, 2 * column + q, channel]
    return out


def with_ids(cond, text_shift=0.0, image_shift=0.0):
    ids = {"img_ids": image_ids(*GRID) + np.float32(image_shift),
           "txt_ids": np.zeros((NT, 3), np.float32) + np.float32(text_shift)}
    return cond | {name: jnp.tile(a[None], (B, 1, 1)) for name, a in ids.items()}


# -- the model -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["listed", "stacked"])
def passes(request):
    """Everything that the two forms of the model offer, from one program each."""
    denoiser, params = from_nnx(random_model(scan_layers=request.param))

    @jax.jit
    def everything(params):
        args = (params, X, T, COND)
        out, feats = denoiser.with_features(*args, ("module", "crf"))
        found = {"out": denoiser.apply(*args), "with_features": out, "feats": feats}
        for site, feature in feats.items():
            found[f"from_{site}"] = denoiser.from_features(*args, {site: feature})
        modules = feats["module"]
        weights, history = draw(6, 6, 3), draw(7, 3, *modules.shape)
        forecast = jnp.einsum("gk,kg...->g...", weights, history)
        found["forecast"] = denoiser.from_features(*args, {"module": forecast})
        found["history"] = denoiser.from_history(*args, weights, history)
        for blocks in (0, 1, 2):
            hidden = denoiser.begin(*args, blocks)
            finished, residual = denoiser.finish(*args, hidden, blocks)
            resumed = denoiser.resume(*args, hidden, residual)
            found[f"stop{blocks}"] = hidden, finished, residual, resumed
        found["signal"] = denoiser.modulated(*args)
        return found

    return everything(params)


def initial(config, choose):
    """Chosen leaves of a new model; the others are never drawn."""
    return jax.jit(lambda: choose(MMDiT(config, rngs=nnx.Rngs(0))))()


@pytest.mark.smoke
def test_fresh_models_predict_exactly_zero():
    model = random_model(scan_layers=True)
    zeros = initial(model.config, lambda m: {
        path: x for path, x in flatten_with_paths(nnx.state(m)).items()
        if "modulation" in path or "final" in path
    })
    denoiser, params = from_nnx(model)
    params = map_with_path(lambda path, x: zeros.get(path, x), params)
    out = run(denoiser, "apply", (), params, X, T, COND)
    assert out.shape == X.shape and not jnp.any(out)


def test_same_seed_gives_the_same_parameters_stacked_or_listed():
    config = dataclasses.replace(CONFIG, scan_layers=True)
    stacked = initial(config, lambda m: (m.double_blocks.img.qkv.kernel[1],
                                         m.single_blocks.linear1.kernel[1]))
    listed = initial(CONFIG, lambda m: (m.double_blocks[1].img.qkv.kernel[...],
                                        m.single_blocks[1].linear1.kernel[...]))
    assert all(jnp.array_equal(a, b) for a, b in zip(stacked, listed))


@pytest.mark.smoke
def test_stacked_layers_compute_what_listed_layers_compute(passes):
    assert float(jnp.abs(passes["out"]).max()) > 0.1
    close(call(random_model(scan_layers=True), "apply", X, T, COND), passes["out"])


@pytest.mark.smoke
def test_images_are_packed_channel_row_column():
    model = random_model(scan_layers=True)
    image = call(model, "apply", X, T, COND)
    assert X.shape[1] != X.shape[2]
    tokens = call(model, "apply", tokens_of(X), T, with_ids(COND))
    assert tokens.shape == (B, NI, 8)
    close(tokens, tokens_of(image))


def test_a_patch_of_one_pixel_makes_every_pixel_a_token():
    denoiser, params = from_nnx(random_model(patch_size=1, in_channels=2, scan_layers=True))
    x = X[:, :2, :3]
    image, tokens = jax.jit(lambda p: (
        denoiser.apply(p, x, 0.5, COND),
        denoiser.apply(p, x.reshape(B, NI, 2), jnp.full(B, 0.5), with_ids(COND)),
    ))(params)
    close(tokens, image.reshape(B, NI, 2))


def test_only_differences_of_positions_matter():
    model = random_model(scan_layers=True)
    x = tokens_of(X)
    out = call(model, "apply", x, T, with_ids(COND))
    both = call(model, "apply", x, T, with_ids(COND, text_shift=7.0, image_shift=7.0))
    close(both, out, 1e-4)
    image_alone = call(model, "apply", x, T, with_ids(COND, image_shift=7.0))
    assert jnp.abs(image_alone - out).max() > 1e-2 * jnp.abs(out).max()


def test_image_tokens_are_a_set_of_contents_and_positions():
    model = random_model(scan_layers=True)
    x, cond = tokens_of(X), with_ids(COND)
    out = call(model, "apply", x, T, cond)
    order = np.random.default_rng(0).permutation(NI)
    moved = call(model, "apply", x[:, order], T, cond | {"img_ids": cond["img_ids"][:, order]})
    close(moved, out[:, order])
    text = np.random.default_rng(1).permutation(NT)  # all at position zero: a set without order
    close(call(model, "apply", x, T, cond | {"txt": cond["txt"][:, text]}), out)


def test_every_condition_reaches_the_output_of_its_sample_alone():
    model = random_model(scan_layers=True)
    out = call(model, "apply", X, T, COND)
    for key in COND:
        other = call(model, "apply", X, T, COND | {key: COND[key].at[1].add(0.3)})
        gap = jnp.abs(other - out).max(axis=(1, 2, 3))
        assert gap[1] > 1e-3 and gap[0] == gap[2] == 0
    broken = call(model, "apply", X.at[1].set(jnp.nan), T, COND)
    assert jnp.array_equal(broken[0], out[0]) and jnp.isnan(broken[1]).all()


def test_guidance_varies_without_another_compilation():
    model = random_model(scan_layers=True)
    call(model, "apply", X, T, COND)
    before = run._cache_size()
    outs = [call(model, "apply", X, T, COND | {"guidance": jnp.array([g] * B)})
            for g in (2.0, 5.0)]
    assert run._cache_size() == before
    assert jnp.abs(outs[0] - outs[1]).max() > 1e-3


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_parameters():
    half = random_model(dtype=jnp.bfloat16, scan_layers=True)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(half)))
    out = call(half, "apply", X, T, COND)
    exact = call(random_model(scan_layers=True), "apply", X, T, COND)
    assert out.dtype == jnp.bfloat16
    gap = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 0 < gap < 0.1
    config = dataclasses.replace(CONFIG, param_dtype=jnp.bfloat16)
    stored = nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(nnx.state(stored)))


def test_gradients_reach_every_parameter_and_the_conditions():
    denoiser, params = from_nnx(random_model(double_depth=1, single_depth=1))
    loss = lambda p, cond: jnp.sum(denoiser.apply(p, X, T, cond) ** 2)
    grads, of_cond = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, COND)
    silent = [name for name, g in flatten_with_paths(grads).items() if not np.any(g)]
    assert not silent
    assert all(np.all(np.isfinite(g)) and np.any(g) for g in of_cond.values())


@pytest.mark.smoke
def test_flux_has_the_published_number_of_parameters():
    config = MMDiTConfig.flux(scan_layers=True)
    params = nnx.state(nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0))), nnx.Param)
    assert param_count(params) == 11_901_408_320  # FLUX.1 [dev]
    assert param_count(params) - param_count(params["guidance_embed"]) == 11_891_178_560
    assert dataclasses.replace(config, guidance_embed=False) == MMDiTConfig(scan_layers=True)


# -- positions -----------------------------------------------------------------------------


@pytest.mark.smoke
def test_rotation_turns_neighbouring_pairs_as_complex_numbers():
    axes, x = (2, 4, 2), np.asarray(draw(3, 2, 6, 2, 8))
    ids = np.random.default_rng(4).integers(0, 50, (2, 6, 3)).astype(np.float32)
    frequencies = [1.0, 1.0, 1e-2, 1.0]  # theta^(-2i/d) within each axis
    angles = ids[..., [0, 1, 1, 2]].astype(np.float64) * frequencies
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, :, None]
    expected = np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
    for given, tolerance in ((ids, 1e-6), (jnp.asarray(ids), 1e-5)):
        close(apply_rope(jnp.asarray(x), *rope_table(given, axes)), expected, tolerance)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), *rope_table(ids, axes)).dtype == jnp.bfloat16


def test_image_ids_run_along_the_rows():
    assert image_ids(2, 3).tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]
    ]
    with pytest.raises(ValueError, match="ids: expected 2 positions per token"):
        rope_table(image_ids(2, 3), (4, 4))


def test_rms_norm_has_unit_mean_square_times_the_scale():
    norm = RMSNorm(8, dtype=jnp.float32, param_dtype=jnp.float32)
    norm.scale[...] = jnp.arange(8.0)
    x = draw(5, 4, 8) * 100
    unit = np.asarray(x, np.float64)
    unit /= np.sqrt((unit**2).mean(-1, keepdims=True) + 1e-6)
    close(norm(x), unit * np.arange(8.0), 1e-6)


# -- caching sites and passes that stop ----------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("site", ["crf", "module"])
def test_features_lead_back_to_the_output(passes, site):
    close(passes["with_features"], passes["out"])
    modules = 2 * CONFIG.double_depth + CONFIG.single_depth
    shape = (B, NI, 16) if site == "crf" else (modules, B, NT + NI, 16)
    assert passes["feats"][site].shape == shape
    close(passes[f"from_{site}"], passes["out"])
    assert random_model().module_names() == [
        "double0/attn", "double0/mlp", "double1/attn", "double1/mlp", "single0", "single1"
    ]


def test_stacked_features_equal_listed_ones_in_any_order_of_sites(passes):
    model = random_model(scan_layers=True)
    _, feats = call(model, "with_features", X, T, COND, static=(("crf", "module"),))
    for site, feature in feats.items():
        close(passes["feats"][site], feature)
    order = jax.eval_shape(lambda: model.with_features(X, T, COND, ("module", "crf")))[1]
    assert set(order) == {"module", "crf"}


@pytest.mark.smoke
def test_a_history_is_summed_module_by_module(passes):
    close(passes["history"], passes["forecast"])
    assert jnp.abs(passes["history"] - passes["out"]).max() > 0.1


@pytest.mark.smoke
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_pass_stops_and_resumes_anywhere(passes, blocks):
    hidden, finished, residual, resumed = passes[f"stop{blocks}"]
    shapes = {"txt": (B, NT, 16), "img": (B, NI, 16)}
    assert {name: a.shape for name, a in hidden.items()} == shapes
    assert {name: a.shape for name, a in residual.items()} == shapes
    close(finished, passes["out"])
    close(resumed, passes["out"])
    if blocks == 0:
        close(residual["img"], passes["feats"]["crf"])


def test_a_pass_stops_within_the_double_blocks():
    for blocks, message in ((3, "must be <= the 2 double blocks, got 3"), (-1, "must be >= 0")):
        with pytest.raises(ValueError, match=f"blocks: {message}"):
            jax.eval_shape(lambda: random_model().begin(X, T, COND, blocks))


def test_the_signal_is_the_modulated_image_input_of_the_first_block(passes):
    model = random_model()
    signals = jax.jit(lambda: model.double_blocks[0].img.modulation(model._embed(X, T, COND).c))()
    shift, scale = np.split(np.asarray(signals, np.float64)[:, None], 6, axis=-1)[:2]
    img = np.asarray(passes["stop0"][0]["img"], np.float64)
    unit = (img - img.mean(-1, keepdims=True)) / np.sqrt(img.var(-1, keepdims=True) + 1e-6)
    close(passes["signal"], unit * (1 + scale) + shift)


# -- cached sampling -----------------------------------------------------------------------

EVERY = make_plan(custom_schedule(6, range(6)), taylorseer(1))
SECOND = make_plan(custom_schedule(6, (0, 2, 4)), taylorseer(1))


@pytest.mark.smoke
@pytest.mark.parametrize("site", ["output", "crf", "module"])
def test_cached_sampling_of_images_with_guidance(site):
    denoiser, params = from_nnx(random_model(scan_layers=True))
    batch = (denoiser, params, X, COND)
    shared = dict(timesteps=uniform_times(6), guidance=2.0,
                  null_cond=jax.tree.map(np.zeros_like, COND))
    full = sample(*batch, **shared)
    assert jnp.array_equal(cached_sample(*batch, plan=EVERY, site=site, **shared), full)
    out = cached_sample(*batch, plan=SECOND, site=site, **shared)
    assert 0 < jnp.linalg.norm(out - full) < 0.3 * jnp.linalg.norm(full)


@pytest.mark.parametrize("site", ["output", "crf", "module"])
def test_cached_sampling_of_tokens(site):
    denoiser, params = from_nnx(random_model(scan_layers=True))
    batch = (denoiser, params, jnp.asarray(tokens_of(X)), with_ids(COND))
    shared = dict(timesteps=uniform_times(6))
    full = sample(*batch, **shared)
    out = cached_sample(*batch, plan=SECOND, site=site, **shared)
    assert 0 < jnp.linalg.norm(out - full) < 0.3 * jnp.linalg.norm(full)


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(width=18), r"rope_axes: .*width / num_heads = 9, got \(2, 2, 4\)"),
        (dict(num_heads=3), "num_heads: must divide width=16, got 3"),
        (dict(rope_axes=(1, 3, 4)), "rope_axes: expected three even sizes"),
        (dict(rope_axes=(4, 4)), "rope_axes: expected three even sizes"),
        (dict(in_channels=6), r"in_channels: .* multiple of patch_size\^2=4, got 6"),
        (dict(out_channels=6), "out_channels: channels of a token"),
        (dict(double_depth=0), "double_depth: must be >= 1, got 0"),
        (dict(mlp_ratio=0.0), "mlp_ratio: must lie in"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
    assert dataclasses.replace(CONFIG, rope_axes=[2, 2, 4]) == CONFIG  # a list serves


def test_bad_inputs_are_named():
    model = random_model()
    missing = lambda key: {k: v for k, v in COND.items() if k != key}
    cases = [
        (X[..., :1], COND, r"x: expected an image \[B, height, width, 2\] or tokens \[B, N, 8\]"),
        (X[:, :3], COND, "x: sides must be multiples of patch_size=2"),
        (tokens_of(X), COND, r"cond\['img_ids'\]: required when x is a sequence of tokens"),
        (X, COND["txt"], "cond: expected a dictionary with 'txt' and 'pooled', got"),
        (X, missing("guidance"), r"cond\['guidance'\]: required by this model"),
        (X, missing("pooled"), r"cond\['pooled'\]: required by this model"),
        (X, COND | {"text": 0}, r"cond: expected entries among .*, got \['text'\]"),
        (X, COND | {"txt": COND["txt"][..., :2]}, r"cond\['txt'\]: expected shape \(3, 5, 6\)"),
        (X, COND | {"txt": COND["pooled"]}, r"cond\['txt'\]: expected shape \(3, N, 6\)"),
        (X, COND | {"guidance": jnp.ones(2)}, r"cond\['guidance'\]: expected shape \(3,\)"),
        (X, COND | {"img_ids": jnp.ones((NI, 3))}, r"cond\['img_ids'\]: expected shape \(3, 6, 3"),
    ]
    for x, cond, message in cases:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda: model(x, T, cond))
    with pytest.raises(ValueError, match=r"cond\['guidance'\]: this model has no guidance"):
        jax.eval_shape(lambda: random_model(guidance_embed=False)(X, T, COND))
    with pytest.raises(ValueError, match="site: expected one of 'crf', 'module'"):
        jax.eval_shape(lambda: model.with_features(X, T, COND, ("block",)))


def test_token_count_changes_raise_instead_of_reusing_a_cache():
    model = random_model()
    longer = COND | {"txt": np.concatenate([COND["txt"], COND["txt"]], axis=1)}
    wider = np.concatenate([X, X], axis=2)
    cases = [
        (model.from_features, wider, COND, {"crf": np.zeros((B, NI, 16))}),
        (model.from_features, X, longer, {"module": np.zeros((6, B, NT + NI, 16))}),
        (model.from_history, X, longer, np.ones((6, 2)), np.zeros((2, 6, B, NT + NI, 16))),
    ]
    for method, x, cond, *rest in cases:
        with pytest.raises(ValueError, match="a cache must be rebuilt when the number of tokens"):
            jax.eval_shape(method, x, T, cond, *rest)
