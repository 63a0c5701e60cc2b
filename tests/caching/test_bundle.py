import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    FucaPlan,
    FucaTables,
    dmd,
    fade_plan,
    fuca_sample,
    fuca_tables,
    load_bundle,
    make_plan,
    profile_fade,
    save_bundle,
    taylorseer,
    uniform_schedule,
)
from fadex.core import Denoiser, checkpoint, from_nnx
from fadex.sampling import uniform_times

STEPS = 8
SCHEDULE = uniform_schedule(STEPS, 3, warmup=2).with_breaks([5])


class Tiny(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x, t, cond):
        return jnp.tanh(self.linear(x)) * t[:, None]


@pytest.fixture(scope="module")
def parts():
    denoiser, params = from_nnx(Tiny(nnx.Rngs(0)))
    table = profile_fade(
        denoiser, params, jax.random.normal(jax.random.key(0), (4, 3)), None,
        timesteps=uniform_times(STEPS), schedule=SCHEDULE,
    )
    return params, fade_plan(table), table


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.smoke
def test_model_plan_and_table_come_back_bit_for_bit(parts, tmp_path):
    params, plan, table = parts
    notes = {"step": 7, "loss": [0.5, 0.25]}
    path = save_bundle(tmp_path / "b", params=params, plan=plan, table=table, metadata=notes)
    typed = load_bundle(path, params_target=params)
    plain = load_bundle(path)
    equal(typed.params, params)
    equal(plain.params, nnx.to_pure_dict(params))
    for bundle in (typed, plain):
        assert bundle.metadata == notes
        assert bundle.plan.schedule == plan.schedule == SCHEDULE
        assert bundle.plan.weights.dtype == np.float64
        np.testing.assert_array_equal(bundle.plan.weights, plan.weights)
        for name, want in table._asdict().items():
            have = getattr(bundle.table, name)
            if name == "params":
                equal(tuple(have), tuple(want))
            elif isinstance(want, np.ndarray):
                np.testing.assert_array_equal(have, want)
            else:
                assert have == want
        again = fade_plan(bundle.table, params=bundle.params, timesteps=uniform_times(STEPS))
        np.testing.assert_array_equal(again.weights, plan.weights)
    # One checkpoint, one manifest.
    names = {leaf["path"].split("/")[0] for leaf in checkpoint.verify(path)["leaves"]}
    assert names == {"params", "plan", "table"}


def test_every_part_but_the_model_is_optional(parts, tmp_path):
    params, plan, _ = parts
    bundle = load_bundle(save_bundle(tmp_path / "a", params=params))
    assert bundle.plan is None and bundle.table is None and bundle.metadata is None
    on_device = plan.replace(weights=jnp.asarray(plan.weights, jnp.float32))
    bundle = load_bundle(save_bundle(tmp_path / "b", params=params, plan=on_device),
                         params_target=params)
    assert isinstance(bundle.plan.weights, jax.Array) and bundle.table is None
    np.testing.assert_array_equal(bundle.plan.weights, on_device.weights)


def test_fuca_plans_come_back_bit_for_bit(parts, tmp_path):
    params, *_ = parts
    denoiser, _ = from_nnx(Tiny(nnx.Rngs(1)))
    x, times = jax.random.normal(jax.random.key(1), (2, 3)), uniform_times(STEPS)
    tables = fuca_tables(times, SCHEDULE, history=3)
    rng = np.random.default_rng(0)  # as if fitted: every digit of a float64 counts
    tables = tables._replace(
        predictor=tables.predictor * (1 + 1e-9 * rng.normal(size=tables.predictor.shape)),
        guidance=0.1 + 0.2,
    )
    plan = FucaPlan(SCHEDULE, tables)
    path = save_bundle(tmp_path / "b", params=params, plan=plan)
    for bundle in (load_bundle(path, params_target=params), load_bundle(path)):
        again = bundle.plan
        assert isinstance(again, FucaPlan) and again.schedule == SCHEDULE
        assert isinstance(again.tables, FucaTables)
        for have, want in zip(again.tables, tables):
            assert type(have) is type(want)
            if isinstance(want, np.ndarray):
                assert have.dtype == want.dtype == np.float64
                np.testing.assert_array_equal(have, want)
            else:
                assert have == want
    tables = tables._replace(guidance=None)  # this run is not guided
    run = lambda tables: fuca_sample(denoiser, params, x, None, timesteps=times,
                                     schedule=SCHEDULE, tables=tables)
    np.testing.assert_array_equal(run(again.tables._replace(guidance=None)), run(tables))
    other = SCHEDULE._replace(breaks=())
    for bad, message in (
        (plan._replace(schedule=uniform_schedule(STEPS, 2)), "plan.tables.scale: expected shape"),
        (plan._replace(schedule=other), r"plan.tables: made for .* breaks \(5,\), the schedule"),
        (plan._replace(tables=tables._replace(slope=tables.slope * np.nan)), "plan.tables.slope"),
    ):
        with pytest.raises(ValueError, match=message):
            save_bundle(tmp_path / "bad", params=params, plan=bad)
    with pytest.raises(TypeError, match="plan: expected a ForecastPlan or a FucaPlan, got Fore"):
        save_bundle(tmp_path / "bad", params=params, plan=dmd(SCHEDULE))
    assert not (tmp_path / "bad").exists()


def test_parts_that_do_not_belong_together_are_refused_before_anything_is_written(parts, tmp_path):
    params, plan, table = parts
    path = save_bundle(tmp_path / "b", params=params, plan=plan, table=table)
    before = checkpoint.read_manifest(path)
    other = jax.tree.map(lambda a: a + 1, params)
    longer = make_plan(uniform_schedule(STEPS + 1, 3), taylorseer(1))
    shifted = make_plan(uniform_schedule(STEPS, 3, warmup=2), taylorseer(1))
    for bad, message in (
        (dict(plan=longer, table=table), "plan: made for num_steps=9, .* num_steps=8"),
        (dict(plan=shifted, table=table), r"plan: .* breaks \(\); .* breaks \(5,\)"),
        (dict(plan=plan.replace(weights=plan.weights[:-1])), "plan.weights: expected shape"),
        (dict(params=other, table=table), "table: profiled on another model"),
    ):
        with pytest.raises(ValueError, match=message):
            save_bundle(path, **(dict(params=params) | bad), overwrite=True)
    assert checkpoint.verify(path) == before
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_bundle(path, params=params)


def test_damage_and_missing_parts_are_noticed(parts, tmp_path):
    params, plan, table = parts
    path = save_bundle(tmp_path / "b", params=params, plan=plan, table=table)
    with pytest.raises(ValueError, match="linear/bias: checkpoint"):
        load_bundle(path, params_target=nnx.eval_shape(lambda: nnx.state(_wider())))
    data = max((p for p in path.rglob("*") if p.is_file() and "arrays" in p.parts),
               key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    with pytest.raises(checkpoint.CheckpointError, match="altered|damaged|differ|sha"):
        load_bundle(path)
    plain = checkpoint.save(tmp_path / "c", {"params": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match="is a checkpoint, but not a bundle"):
        load_bundle(plain)
    about = json.loads(json.dumps(checkpoint.read_manifest(path)["metadata"]))
    lost = checkpoint.save(tmp_path / "d", {"params": {"w": jnp.ones(2)}}, metadata=about)
    with pytest.raises(ValueError, match="has lost its plan"):
        load_bundle(lost)
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint here"):
        load_bundle(tmp_path / "nothing")


def _wider():
    model = Tiny(nnx.Rngs(0))
    model.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    return model


def test_a_loaded_bundle_samples_as_before(parts, tmp_path):
    from fadex.caching import cached_sample

    params, plan, table = parts
    denoiser, _ = from_nnx(Tiny(nnx.Rngs(1)))
    assert isinstance(denoiser, Denoiser)
    path = save_bundle(tmp_path / "b", params=params, plan=plan, table=table)
    bundle = load_bundle(path, params_target=params)
    x = jax.random.normal(jax.random.key(1), (2, 3))
    run = lambda params, plan: cached_sample(
        denoiser, params, x, None, timesteps=uniform_times(STEPS), plan=plan
    )
    np.testing.assert_array_equal(run(bundle.params, bundle.plan), run(params, plan))
