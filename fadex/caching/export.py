r"""Cached samplers as files: a program that runs without the model's Python code.

:func:`export_sampler` lowers a whole cached run (model, plan, sampler, guidance) by
``jax.export``; :func:`load_sampler` reads it back without that code. A file holds one program
per platform::

    8 bytes        b"FADEXPRG"
    8 bytes        length of the header, little-endian
    32 bytes       SHA-256 of the header
    header         JSON: settings, operands, and offset, size and SHA-256 of each program
    programs       what `jax.export.Exported.serialize()` gave, one after the other

so JAX alone is enough to run one (offsets count from the end of the header)::

    data = open("digits.fadex", "rb").read()
    start = 48 + int.from_bytes(data[8:16], "little")
    header = json.loads(data[48:start])
    program = header["programs"]["cpu"]
    blob = data[start + program["offset"] :][: program["size"]]
    images = jax.export.deserialize(bytearray(blob)).call(params, x, cond, null_cond, guidance, key)

where the six operands are lists of arrays, empty where the header lists none. Serialization
needs the package ``flatbuffers`` (``pip install 'fadex-jax[export]'``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex._version import __version__
from fadex.caching.adaptive import Policy, adaptive_sample
from fadex.caching.fuca import fuca_sample
from fadex.caching.fuca_profile import FucaPlan
from fadex.caching.plan import Forecaster, ForecastPlan
from fadex.caching.sampling import cached_sample
from fadex.core.checks import check_choice, check_int
from fadex.core.denoiser import Denoiser
from fadex.core.kernels import export_for
from fadex.core.pytree import flatten_with_paths
from fadex.sampling.samplers import Sampler, flow_euler

_MAGIC = b"FADEXPRG"
_FORMAT, _VERSION = "fadex.sampler", 1
_PLATFORMS = ("cpu", "cuda", "tpu")
_BATCH = "b"


def _platform() -> str:
    """The default backend by its name in programs."""
    name = jax.default_backend()
    return "cuda" if name == "gpu" else name


def _describe(tree: Any, *, drop_batch: bool) -> list[dict[str, Any]]:
    """Name, dtype and shape of the leaves (without the batch axis), as the header keeps them."""
    leaves = []
    for path, leaf in flatten_with_paths(tree).items():
        shape = tuple(np.shape(leaf))
        if drop_batch and not shape:
            raise ValueError(f"cond/{path}: expected a leading batch axis, got a scalar")
        dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            raise ValueError(f"{path}: typed PRNG keys can't be operands; use their key data")
        leaves.append({
            "path": path, "dtype": jax.dtypes.canonicalize_dtype(dtype).name,
            "shape": list(shape[1:] if drop_batch else shape),
        })
    return leaves


def _sampler_of(
    plan: Any, run: Any, site: str, cache_dtype: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., jax.Array], str, Any]:
    """What to run with ``(denoiser, params, x, cond, **shared)``, its name, and its schedule."""
    if (plan is None) == (run is None):
        raise ValueError("plan, run: expected exactly one of them")
    if run is not None:
        if site != "output" or cache_dtype is not None or options:
            raise ValueError("site, cache_dtype, options: bind them to run, by functools.partial")
        if not callable(run):
            raise TypeError(f"run: expected a sampling function, got {type(run).__name__}")
        inner = run.func if isinstance(run, functools.partial) else run
        bound = run.keywords if isinstance(run, functools.partial) else {}
        schedule = bound.get("schedule", getattr(bound.get("plan"), "schedule", None))
        return run, getattr(inner, "__name__", type(inner).__name__), schedule
    if isinstance(plan, (ForecastPlan, Forecaster)):
        bound = dict(plan=plan, site=site, cache_dtype=cache_dtype)
        return functools.partial(cached_sample, **bound, **options), "cached_sample", plan.schedule
    if isinstance(plan, FucaPlan):
        if site != "output" or cache_dtype is not None:
            raise ValueError("site, cache_dtype: a FucaPlan serves site='output', uncompressed")
        bound = plan._asdict()
        return functools.partial(fuca_sample, **bound, **options), "fuca_sample", plan.schedule
    if isinstance(plan, Policy):
        bound = dict(policy=plan, site=site, cache_dtype=cache_dtype)
        return functools.partial(adaptive_sample, **bound, **options), "adaptive_sample", None
    raise TypeError(
        "plan: expected a ForecastPlan, a Forecaster, a FucaPlan or a Policy, got "
        f"{type(plan).__name__}"
    )


def export_sampler(
    denoiser: Denoiser,
    params: Any,
    *,
    shape: tuple[int, ...],
    cond: Any = None,
    timesteps: Any,
    plan: ForecastPlan | Forecaster | FucaPlan | Policy | None = None,
    run: Callable[..., jax.Array] | None = None,
    options: Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: float = 1.0,
    guided: bool | None = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    cache_dtype: Any = None,
    dtype: Any = jnp.float32,
    batch: int | None = None,
    platforms: Iterable[str] | None = None,
    include_params: bool = True,
    path: str | os.PathLike[str] | None = None,
) -> bytes:
    """Export a cached sampler with everything but the noise bound.

    Args:
      denoiser, params: the model.
      shape: of one sample, without the batch axis.
      cond: an example of the conditions, arrays or ``jax.ShapeDtypeStruct`` with a leading
        batch axis of any length; only dtypes and the other axes count. None without.
      timesteps, sampler, site, cfg_channels, guidance_interval, cache_dtype: as in
        :func:`~fadex.caching.cached_sample`; ``timesteps`` is one grid ``[S + 1]``.
      plan: says which sampler runs: :func:`~fadex.caching.cached_sample` for a
        :class:`~fadex.caching.ForecastPlan` or :class:`~fadex.caching.Forecaster`,
        :func:`~fadex.caching.fuca_sample` for a :class:`~fadex.caching.FucaPlan`, and
        :func:`~fadex.caching.adaptive_sample` for a :class:`~fadex.caching.Policy`, whose
        numbers are baked in.
      run: in place of ``plan``, any function that is called like those, e.g.
        ``functools.partial(toca_sample, schedule=schedule)``; gets ``key`` for a stochastic
        ``sampler`` only, and returns the samples alone.
      options: further keywords of the sampler, e.g. ``{"cooldown": 2, "order": 1}`` of
        :func:`~fadex.caching.adaptive_sample`.
      guidance: the default of the exported sampler; a call may pass another.
      guided: whether the program holds the null branch; by default when ``guidance`` is not 1.
      dtype: of the latents.
      batch: samples of a call; None leaves it open (a symbolic dimension). Fix it for the Pallas
        kernels on TPU and GPU, whose blocks need sizes; an open batch runs XLA's fused loop.
      platforms: some of ``"cpu"``, ``"cuda"``, ``"tpu"``; that of this process by default. No
        accelerator is needed to export for one.
      include_params: bake the weights into the program. False makes them an operand, for
        weights that are large, shared or exchanged: keep them in a checkpoint
        (:func:`fadex.core.checkpoint.save`) and give them to :func:`load_sampler`.
      path: also write the file there, under a temporary name first.

    Returns:
      The file's content.

    Raises:
      ValueError: a bad argument, by name.
      TypeError: ``plan`` is none of those.
      ImportError: ``flatbuffers`` is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.caching import (export_sampler, load_sampler, make_plan, taylorseer,
      ...                            uniform_schedule)
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> plan = make_plan(uniform_schedule(20, 4), taylorseer(1))
      >>> content = export_sampler(denoiser, jnp.float32(1.0), shape=(4,), plan=plan,
      ...                          timesteps=uniform_times(20))
      >>> sampler = load_sampler(content)
      >>> sampler(jnp.ones((3, 4))).shape, sampler.header["nfe"]
      ((3, 4), 8)
    """
    from jax import export

    sampler = flow_euler() if sampler is None else sampler
    cached, name, schedule = _sampler_of(plan, run, site, cache_dtype, options or {})
    if np.ndim(timesteps) != 1:
        raise ValueError(f"timesteps: expected one grid [S + 1], got shape {np.shape(timesteps)}")
    if np.ndim(guidance):
        raise ValueError(f"guidance: expected a number, got shape {np.shape(guidance)}")
    guided = guidance != 1.0 if guided is None else bool(guided)
    if guided and cond is None:
        raise ValueError("cond: required for guidance")
    if not guided and guidance != 1.0:
        raise ValueError(f"guided: False leaves no null branch for guidance={guidance}")
    if batch is not None:
        batch = check_int("batch", batch, minimum=1)
    platforms = (_platform(),) if platforms is None else tuple(dict.fromkeys(platforms))
    if not platforms:
        raise ValueError("platforms: expected at least one")
    for platform in platforms:
        check_choice("platforms", platform, _PLATFORMS)

    operands = {
        "params": [] if include_params else _describe(params, drop_batch=False),
        "x": [{"path": "", "dtype": jnp.dtype(dtype).name, "shape": list(shape)}],
        "cond": _describe(cond, drop_batch=True),
        "null_cond": _describe(cond, drop_batch=True) if guided else [],
        "guidance": [{"path": "", "dtype": "float32", "shape": []}] if guided else [],
        "key": [{"path": "", "dtype": "uint32", "shape": [2]}] if sampler.stochastic else [],
    }
    structure = jax.tree.structure(cond)
    names = jax.tree.structure(params)

    def program(weights, x, cond, null_cond, guidance, key):
        shared = dict(
            timesteps=timesteps, sampler=sampler, cfg_channels=cfg_channels,
            guidance=guidance[0] if guided else 1.0, guidance_interval=guidance_interval,
            null_cond=structure.unflatten(null_cond) if guided else None,
        )
        if key:
            shared["key"] = jax.random.wrap_key_data(key[0], impl="threefry2x32")
        out = cached(
            denoiser, params if include_params else names.unflatten(weights), x[0],
            structure.unflatten(cond), **shared,
        )
        if not isinstance(out, jax.Array):
            raise ValueError(f"{name}: an export returns the samples alone, got {type(out)}")
        return out

    size = export.symbolic_shape(_BATCH)[0] if batch is None else batch
    arguments = [
        [
            jax.ShapeDtypeStruct(
                (size, *leaf["shape"]) if role in ("x", "cond", "null_cond") else
                tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]),
            )
            for leaf in leaves
        ]
        for role, leaves in operands.items()
    ]
    blobs, programs, offset = [], {}, 0
    if guided and isinstance(plan, FucaPlan):
        # In the program guidance is traced: whether the tables were fitted at it is seen here.
        shapes = [*arguments[:4], *arguments[5:]]
        jax.eval_shape(lambda *a: program(*a[:4], [guidance], *a[4:]), *shapes)
    for platform in platforms:
        blob = bytes(export_for(platform, program, *arguments).serialize())
        digest = hashlib.sha256(blob).hexdigest()
        programs[platform] = {"offset": offset, "size": len(blob), "sha256": digest}
        blobs.append(blob)
        offset += len(blob)
    header = {
        "format": _FORMAT, "version": _VERSION,
        "written_by": {"fadex": __version__, "jax": jax.__version__},
        "programs": programs, "operands": operands, "batch": batch, "guidance": float(guidance),
        "num_steps": len(timesteps) - 1, "site": site, "run": name,
        # Null where it is decided while sampling, or not known.
        "nfe": None if schedule is None else schedule.nfe,
        "anchors": None if schedule is None else list(schedule.anchors),
        "timesteps": np.asarray(timesteps, np.float32).tolist(),
    }
    text = json.dumps(header, sort_keys=True).encode()
    size, digest = len(text).to_bytes(8, "little"), hashlib.sha256(text).digest()
    content = b"".join([_MAGIC, size, digest, text, *blobs])
    if path is not None:
        _write(Path(path), content)
    return content


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class ExportedSampler:
    """A sampler read from a file, called as ``sampler(x, cond, ...)``.

    Args of the call:
      x: noise ``[B, ...]``.
      cond, null_cond: conditions ``[B, ...]`` in the containers they were exported with.
      guidance: a number; that of the export by default.
      key: PRNG key (typed, or raw ``uint32 [2]``), for stochastic samplers.

    Works under ``jit``; a value does not recompile.

    Attributes:
      header: what the file says about itself.
      exported: the program, a ``jax.export.Exported``.
      weights: leaves of the parameters, where they are an operand.
    """

    header: dict[str, Any]
    exported: Any
    weights: list[Any]

    def __call__(
        self,
        x: jax.Array,
        cond: Any = None,
        *,
        null_cond: Any = None,
        guidance: float | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Samples like ``x``. Raises ValueError for operands that do not fit, by name."""
        operands = self.header["operands"]
        batch = np.shape(x)[:1]
        if self.header["batch"] is not None and batch != (self.header["batch"],):
            raise ValueError(
                f"x: exported for a batch of {self.header['batch']}, got shape {np.shape(x)}"
            )
        if not operands["guidance"] and guidance not in (None, 1.0):
            raise ValueError(f"guidance: exported without the null branch, got {guidance}")
        scale = self.header["guidance"] if guidance is None else guidance
        if key is not None and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        given = {"x": x, "cond": cond, "null_cond": null_cond}
        arrays = {role: _fit(role, operands[role], tree, batch) for role, tree in given.items()}
        arrays["guidance"] = _fit("guidance", operands["guidance"], jnp.float32(scale), ())
        arrays["key"] = _fit("key", operands["key"], key, ())
        return self.exported.call(
            self.weights, *(arrays[role] for role in ("x", "cond", "null_cond", "guidance", "key"))
        )


def _fit(role: str, leaves: list[dict[str, Any]], tree: Any, batch: tuple) -> list[jax.Array]:
    """The leaves of ``tree`` as the program's operands."""
    if not leaves:
        return []
    given = flatten_with_paths(tree)
    names = {leaf["path"] for leaf in leaves}
    if given.keys() != names:
        raise ValueError(f"{role}: expected the arrays {sorted(names)}, got {sorted(given)}")
    arrays = []
    for leaf in leaves:
        array = jnp.asarray(given[leaf["path"]])
        want = (*batch, *leaf["shape"])
        kind = jnp.dtype(leaf["dtype"])
        same = array.dtype == kind or (array.dtype.kind in "iu" and kind.kind in "iu")
        if array.shape != want or not same:
            where = f"{role}/{leaf['path']}" if leaf["path"] else role
            raise ValueError(
                f"{where}: expected {kind.name}{list(want)}, got {array.dtype.name}"
                f"{list(array.shape)}"
            )
        arrays.append(array.astype(kind))
    return arrays


def load_sampler(
    source: str | os.PathLike[str] | bytes,
    *,
    params: Any = None,
    platform: str | None = None,
) -> ExportedSampler:
    """Read a sampler written by :func:`export_sampler`.

    Args:
      source: a file, or its content.
      params: the weights, where the export left them out; any containers with the same names
        (what :func:`fadex.core.checkpoint.restore` gives back without a target will do).
      platform: which program of the file; that of this process by default.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not an exported sampler, damaged, without a program for the platform, or
        ``params`` that do not fit.
    """
    from jax import export

    if isinstance(source, (bytes, bytearray, memoryview)):
        content, name = bytes(source), "source"
    else:
        if not Path(source).is_file():
            raise FileNotFoundError(f"source: no exported sampler at {source}")
        content, name = Path(source).read_bytes(), f"source: {source}"
    header, start = _read_header(content, name)
    platform = _platform() if platform is None else platform
    if platform not in header["programs"]:
        raise ValueError(
            f"platform: exported for {', '.join(header['programs'])}, got {platform!r}"
        )
    program = header["programs"][platform]
    blob = content[start + program["offset"] :][: program["size"]]
    if hashlib.sha256(blob).hexdigest() != program["sha256"]:
        raise ValueError(f"{name} is damaged: the program's checksum does not match")
    weights = header["operands"]["params"]
    if weights and params is None:
        raise ValueError("params: required, the weights were left out of the export")
    if not weights and params is not None:
        raise ValueError("params: the export holds its own weights")
    return ExportedSampler(
        header, export.deserialize(bytearray(blob)), _fit("params", weights, params, ())
    )


def _read_header(content: bytes, name: str) -> tuple[dict[str, Any], int]:
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{name} is not an exported sampler")
    start = 48 + int.from_bytes(content[8:16], "little")
    text = content[48:start]
    if hashlib.sha256(text).digest() != content[16:48]:
        raise ValueError(f"{name} is damaged: the header's checksum does not match")
    try:
        header = json.loads(text)
        sizes = [p["offset"] + p["size"] for p in header["programs"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: the header can't be read ({error})") from error
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise ValueError(
            f"{name}: expected {_FORMAT} of version {_VERSION}, got {header.get('format')!r} of "
            f"version {header.get('version')!r}"
        )
    if start + max(sizes) != len(content):
        raise ValueError(f"{name} is damaged: {start + max(sizes)} bytes expected, "
                         f"{len(content)} found")
    return header, start
