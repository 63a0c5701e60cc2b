"""Choosing a kernel by the platform a program is lowered for, and exporting to any platform.

A kernel comes as up to three functions of one signature: a TPU form (Pallas Mosaic), a GPU
form (Pallas Triton) and a ``jnp`` reference. :func:`by_platform` leaves the choice to
lowering, so one jitted program exports to every platform from any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fadex.core.checks import check_choice

_GPU_CUSTOM_CALLS = ("__gpu$xla.gpu.triton", "xla.gpu.triton", "triton_kernel_call")


def by_platform(
    *args: Any,
    default: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> Any:
    """Call the form that fits the platform the surrounding program is lowered for.

    Works under ``jit``, ``vmap``, ``grad`` and ``jax.export``; platforms without a form of
    their own get ``default``, and so does every platform when a dimension is symbolic
    (``jax.export.symbolic_shape``): a kernel's blocks need sizes.
    """
    if any(not isinstance(n, int) for a in jax.tree.leaves(args) for n in jax.numpy.shape(a)):
        return default(*args)
    forms = {name: form for name, form in (("tpu", tpu), ("cuda", cuda)) if form is not None}
    return jax.lax.platform_dependent(*args, default=default, **forms)


@contextlib.contextmanager
def _described_gpu() -> Iterator[None]:
    # Newer releases lower a GPU kernel on a machine without a GPU only when told what the
    # device is; older ones have no such description and need none.
    device = getattr(jax.sharding, "AbstractDevice", None)
    use = getattr(jax.sharding, "use_abstract_mesh", None)
    if device is None or use is None:
        yield
        return
    try:
        mesh = jax.sharding.AbstractMesh(
            (1,), ("x",), abstract_device=device("NVIDIA H100 80GB HBM3", 132, "gpu")
        )
    except TypeError:
        yield
        return
    with use(mesh):
        yield


def export_for(platform: str, fn: Callable[..., Any], *args: Any) -> jax.export.Exported:
    """Lower ``fn(*args)`` for ``"cpu"``, ``"tpu"`` or ``"cuda"`` on any machine.

    ``args`` may be arrays or ``jax.ShapeDtypeStruct``. One platform at a time: a program
    with platform-dependent kernels can't be exported for several at once.
    """
    from jax import export

    check_choice("platform", platform, ("cpu", "tpu", "cuda"))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _GPU_CUSTOM_CALLS]
    lower = export.export(jax.jit(fn), platforms=[platform], disabled_checks=checks)
    if platform == "cuda":
        with _described_gpu():
            return lower(*args)
    return lower(*args)
