import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from fadex.core import from_linen, from_nnx


class Nnx(nnx.Module):
    def __init__(self, rngs, dropout=False):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, x, t, cond):
        return self.linear(x) * t[:, None] + cond[:, None]


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, t, cond):
        return linen.Dense(3)(x) * t[:, None] + cond[:, None]


ARGS = (jnp.ones((2, 3)), jnp.full((2,), 0.5), jnp.ones((2,)))


@pytest.mark.smoke
def test_nnx_model_becomes_a_pure_function_of_its_parameters():
    model = Nnx(nnx.Rngs(0))
    denoiser, params = from_nnx(model)
    assert jnp.array_equal(jax.jit(denoiser.apply)(params, *ARGS), model(*ARGS))
    doubled = jax.tree.map(lambda p: 2 * p, params)
    assert not jnp.array_equal(denoiser.apply(doubled, *ARGS), model(*ARGS))
    assert denoiser.with_features is None and denoiser.from_features is None


@pytest.mark.smoke
def test_linen_module_becomes_a_pure_function_of_its_variables():
    module = Linen()
    variables = module.init(jax.random.key(0), *ARGS)
    denoiser, params = from_linen(module, variables)
    assert jnp.array_equal(denoiser.apply(params, *ARGS), module.apply(variables, *ARGS))


def test_equal_architectures_give_equal_denoisers_so_nothing_recompiles():
    first, _ = from_nnx(Nnx(nnx.Rngs(0)))
    second, _ = from_nnx(Nnx(nnx.Rngs(1)))
    assert first == second and hash(first) == hash(second)
    assert from_linen(Linen(), {"params": {}})[0] == from_linen(Linen(), {"params": {}})[0]


class WithConstants(Nnx):
    def __init__(self, rngs):
        super().__init__(rngs, dropout=True)
        self.table = jnp.arange(3.0)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x, t, cond):
        return self.dropout(self.norm(super().__call__(x, t, cond) + self.table))


def test_constants_and_models_in_evaluation_mode_are_welcome():
    model = WithConstants(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"model: holds mutable collections .*model.eval"):
        from_nnx(model)
    model.eval()
    denoiser, params = from_nnx(model)
    np.testing.assert_allclose(jax.jit(denoiser.apply)(params, *ARGS), model(*ARGS), rtol=1e-6)


def test_linen_modules_must_be_hashable():
    class Listy(linen.Module):
        widths: list

        def __call__(self, x, t, cond):
            return x

    with pytest.raises(ValueError, match="module: its fields must be hashable"):
        from_linen(Listy([1, 2]), {"params": {}})


def test_state_that_is_not_a_parameter_is_refused():
    with pytest.raises(ValueError, match="model: holds mutable collections"):
        from_nnx(Nnx(nnx.Rngs(0), dropout=True))
    with pytest.raises(ValueError, match=r"model: holds mutable collections \(batch_stats\)"):
        from_linen(Linen(), {"params": {}, "batch_stats": {}})
    with pytest.raises(ValueError, match="variables: expected a dict with 'params'"):
        from_linen(Linen(), {})
