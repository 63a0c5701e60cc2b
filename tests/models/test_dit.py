import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.models import DiT, DiTConfig, drop_labels, from_nnx
from fadex.models.layers import frequency_embedding, sincos_2d

CONFIG = DiTConfig(depth=2, width=32, num_heads=2, in_channels=2, num_classes=5)
X, T, Y = jnp.linspace(-1, 1, 3 * 4 * 6 * 2).reshape(3, 4, 6, 2), jnp.array([0.1, 0.5, 0.9]), \
    jnp.array([0, 3, 5])


def random_model(**overrides):
    """All parameters random: adaLN-zero would hide mistakes."""
    import dataclasses

    model = DiT(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [p + 0.1 * jax.random.normal(k, p.shape, p.dtype) for p, k in zip(leaves, keys)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.mark.smoke
def test_fresh_models_predict_exactly_zero_at_any_time():
    model = DiT(CONFIG, rngs=nnx.Rngs(0))
    assert jnp.array_equal(model(X, T, Y), jnp.zeros((3, 4, 6, 2)))
    assert jnp.array_equal(model(X, jnp.float32(0.3), Y), jnp.zeros((3, 4, 6, 2)))


@pytest.mark.smoke
@pytest.mark.parametrize("site", ["crf", "module"])
def test_features_lead_back_to_the_output(model, site):
    out, feats = model.with_features(X, T, Y, (site,))
    np.testing.assert_allclose(out, model(X, T, Y), rtol=1e-5, atol=1e-6)
    shape = (3, 6, 32) if site == "crf" else (4, 3, 6, 32)
    assert feats[site].shape == shape
    np.testing.assert_allclose(model.from_features(X, T, Y, feats), out, rtol=1e-4, atol=1e-5)
    if site == "module":
        weights = jnp.tile(jnp.array([1.5, -0.5]), (4, 1))
        history = jnp.stack([feats[site], feats[site]])
        fused = model.from_history(X, T, Y, weights, history)
        np.testing.assert_allclose(fused, out, rtol=1e-4, atol=1e-5)
        assert model.module_names() == ["block0/attn", "block0/mlp", "block1/attn", "block1/mlp"]


def test_sites_come_in_any_order(model):
    _, one = model.with_features(X, T, Y, ("crf", "module"))
    _, two = model.with_features(X, T, Y, ("module", "crf"))
    assert list(one) == ["crf", "module"] and list(two) == ["module", "crf"]
    for site in one:
        assert jnp.array_equal(one[site], two[site])


@pytest.mark.smoke
def test_stacked_layers_compute_what_listed_layers_compute(model):
    stacked = random_model(scan_layers=True)
    listed = nnx.state(model)
    rows = [listed["blocks"][i] for i in range(2)]
    state = nnx.state(stacked)
    for name in listed:
        if name != "blocks":
            state[name] = listed[name]
    state["blocks"] = jax.tree.map(lambda *a: jnp.stack(a), *rows)
    nnx.update(stacked, state)
    np.testing.assert_allclose(stacked(X, T, Y), model(X, T, Y), rtol=1e-5, atol=1e-6)
    for site in ("crf", "module"):
        (_, a), (_, b) = (m.with_features(X, T, Y, (site,)) for m in (stacked, model))
        np.testing.assert_allclose(a[site], b[site], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            stacked.from_features(X, T, Y, a), model.from_features(X, T, Y, b), rtol=1e-4,
            atol=1e-5,
        )


def test_same_seed_gives_the_same_parameters_stacked_or_listed():
    one = nnx.state(DiT(CONFIG, rngs=nnx.Rngs(0)))["blocks"][1]["attn"]["qkv"]["kernel"][...]
    import dataclasses

    stacked = DiT(dataclasses.replace(CONFIG, scan_layers=True), rngs=nnx.Rngs(0))
    assert jnp.array_equal(stacked.blocks.attn.qkv.kernel[1], one)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_parameters(model):
    half = random_model(dtype=jnp.bfloat16)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(half)))
    out, exact = half(X, T, Y), model(X, T, Y)
    assert out.dtype == jnp.bfloat16
    gap = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 0 < gap < 0.05
    stored = random_model(param_dtype=jnp.bfloat16)
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(nnx.state(stored)))


def test_attention_sees_positions_and_labels(model):
    swapped = X[:, :, ::-1]
    out = model(swapped, T, Y)[:, :, ::-1]
    assert jnp.abs(out - model(X, T, Y)).max() > 1e-3
    assert jnp.abs(model(X, T, jnp.array([1, 3, 5])) - model(X, T, Y))[0].max() > 1e-4


def test_position_table_encodes_column_then_row():
    table = sincos_2d(3, 5, 16).reshape(3, 5, 16)
    assert np.array_equal(table[0, :, :8], table[2, :, :8])  # first half: the column
    assert np.array_equal(table[:, 0, 8:], table[:, 4, 8:])  # second half: the row
    np.testing.assert_allclose(table[1, 2, 0], np.sin(2.0), rtol=1e-6)
    np.testing.assert_allclose(table[1, 2, 4], np.cos(2.0), rtol=1e-6)
    np.testing.assert_allclose(table[1, 2, 8], np.sin(1.0), rtol=1e-6)


def test_frequencies_are_cosines_then_sines():
    emb = np.asarray(frequency_embedding(jnp.array([0.0, 3.0]), 6))
    np.testing.assert_allclose(emb[0], [1, 1, 1, 0, 0, 0])
    angles = 3.0 * 1e4 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(emb[1], np.concatenate([np.cos(angles), np.sin(angles)]), rtol=1e-5)


def test_labels_drop_at_the_given_rate():
    labels = drop_labels(jax.random.key(0), jnp.zeros(20_000, int), 0.25, 9)
    assert abs(float((labels == 9).mean()) - 0.25) < 0.01
    assert not jnp.any(drop_labels(jax.random.key(0), jnp.zeros(9, int), 0.0, 9))


def test_gradients_reach_every_parameter(model):
    denoiser, params = from_nnx(model)
    grads = jax.grad(lambda p: jnp.sum(denoiser.apply(p, X, T, Y) ** 2))(params)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_token_count_changes_raise_instead_of_reusing_a_cache(model):
    _, feats = model.with_features(X, T, Y, ("crf",))
    wider = jnp.concatenate([X, X], axis=2)
    with pytest.raises(ValueError, match="a cache must be rebuilt when the number of tokens"):
        model.from_features(wider, T, Y, feats)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiTConfig(width=30, num_heads=4), "num_heads: must divide width=30"),
        (lambda: DiTConfig(depth=0), "depth: must be >= 1, got 0"),
        (lambda: DiTConfig(class_dropout=2.0), "class_dropout: must lie in"),
        (lambda: DiTConfig(width=6, num_heads=1), "width: the position table needs"),
        (lambda: DiTConfig.named("M/2"), "name: expected one of 'S', 'B', 'L', 'XL'"),
        (lambda: DiTConfig.named("S"), "name: expected SIZE/PATCH"),
    ],
)
def test_bad_configurations_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_inputs_are_named(model):
    with pytest.raises(ValueError, match=r"x: expected \[B, height, width, 2\]"):
        model(X[..., :1], T, Y)
    with pytest.raises(ValueError, match="x: sides must be multiples of patch_size=2"):
        model(X[:, :3], T, Y)
    with pytest.raises(ValueError, match="site: expected one of 'crf', 'module'"):
        model.with_features(X, T, Y, ("block",))
