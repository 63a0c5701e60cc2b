r"""FADE's look-up table: profile once, then read weights at no cost.

The dynamics of a model's features are stable over samples, so the parameters of the
fractional operator are profiled offline on one small batch, per cell of

* site or layer ``g``,
* step ``s`` (or a bin of times), and
* skip offset ``k`` (steps since the last anchor; a function of ``s`` for one schedule),

and stored. The table of a schedule (``axis="step"``) serves that schedule; a table binned
over time (``axis="time"``) is keyed ``(g, bin of t, k)`` and also serves other step counts
with the same interval.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fadex.caching.fade import (
    FORMS,
    HISTORY,
    FadeGrid,
    FadeParams,
    candidate_weights,
    candidates,
    fade_weights,
)
from fadex.caching.plan import ForecastPlan
from fadex.caching.profile import (
    check_site,
    gram_errors,
    optimal_amplitude,
    profile_gram,
    replay,
)
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_choice, check_finite, check_int, check_real
from fadex.core.denoiser import Denoiser
from fadex.core.pytree import tree_hash
from fadex.sampling.samplers import Sampler, flow_euler

FORMAT_VERSION = 1
_TIE = 1e-9


class FadeLUT(NamedTuple):
    """A profiled table.

    Attributes:
      params: :class:`FadeParams` of arrays ``[S, G]`` (``axis="step"``) or
        ``[bins, offsets, G]`` (``axis="time"``; offset 1 first).
      errors: squared error of each cell's forecast on the profiling samples over the squared
        norm of its target, like ``params`` (NaN where nothing was profiled). In open mode the
        target is the feature itself; in closed mode it also holds the drift to be undone, so
        the number says how much of that is left, not how well the feature is forecast.
      schedule: the profiled schedule.
      site, mode, axis: what was profiled and how.
      timesteps: ``[S + 1]``.
      guidance: scalar, of the profiling run.
      model_hash: sha256 over the parameters.
      sampler: a name for the profiled sampler.
      grid: the candidates.
      samples: profiled samples.
    """

    params: FadeParams
    errors: np.ndarray
    schedule: CacheSchedule
    site: str
    mode: str
    axis: str
    timesteps: np.ndarray
    guidance: float
    model_hash: str
    sampler: str
    grid: FadeGrid
    samples: int


def sampler_name(sampler: Sampler) -> str:
    """A name that tells samplers apart, as tables record it."""
    step = getattr(sampler.step, "func", sampler.step)
    return f"{step.__name__.strip('_')}:{sampler.prediction}"


def _best(errors: np.ndarray, preference: np.ndarray, valid: np.ndarray, norm: float) -> int:
    """Smallest error; among ties the preferred candidate wins.

    Ties lie within a relative 1e-9, or within the rounding of a float32 Gram matrix whose
    largest squared displacement is ``norm``: below that, errors only rank noise.
    """
    errors = np.where(valid, errors, np.inf)
    noise = 4.0 * np.finfo(np.float32).eps * norm
    tied = np.flatnonzero(errors <= errors.min() * (1.0 + _TIE) + noise)
    return int(tied[np.argmin(preference[tied])])


def _displacement(gram: np.ndarray) -> float:
    """Largest squared distance of a snapshot to the target."""
    return float(np.diagonal(gram)[:-1].max())


def _preference(grid: FadeGrid, weights: np.ndarray) -> np.ndarray:
    """Integer operators first, then smaller weights: order of choice among equal errors."""
    listed = candidates(grid).params
    integer = (listed.alpha == 1.0) & (listed.lam == 0.0)
    return np.where(integer, 0.0, 1e6) + np.abs(weights).sum(-1)


def _cell(grid, pos, s, gram, amplitude):
    """``(errors, rho, weights, valid)`` of all candidates in one cell."""
    weights, valid = candidate_weights(pos, s, grid)
    rho = optimal_amplitude(gram, weights) if amplitude else np.ones(len(weights))
    return gram_errors(gram, rho[:, None] * weights), rho, weights, valid


def _params_at(grid: FadeGrid, index: np.ndarray, rho: np.ndarray) -> FadeParams:
    picked = FadeParams(*(column[index] for column in candidates(grid).params))
    return picked._replace(amplitude=rho)


def profile_fade(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    sampler: Sampler | None = None,
    site: str = "output",
    mode: str | None = None,
    guidance: float = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    grid: FadeGrid | None = None,
    amplitude: bool = False,
    drift: float = 1.0,
    bins: int | None = None,
) -> FadeLUT:
    r"""Profile FADE's table for one model, schedule and sampler on a batch of noise.

    One small batch is enough: the dynamics hardly differ between samples
    (``benchmarks/caching.py --only stability`` prints by how much).

    Args:
      denoiser, params, x, cond, timesteps, sampler, site, guidance, null_cond, cfg_channels,
        guidance_interval: as in :func:`~fadex.caching.cached_sample`; ``x`` is profiling noise,
        ``timesteps`` one grid for all samples.
      schedule: which steps are computed.
      mode: ``"open"`` fits each cell to the features of the full run. ``"closed"`` replays the
        cached run and fits each cell to a target that also undoes the drift of earlier skips
        (see :func:`~fadex.caching.replay`); only at the output. Default: closed at
        ``"output"``, open elsewhere.
      grid: candidates; :class:`FadeGrid` by default (568 parameter sets).
      amplitude: also fit a factor on each forecast, in closed form, clipped to [0.8, 1.25].
      drift: weight of the drift correction in closed mode, in [0, 1].
      bins: number of equal time bins; the table is then keyed by (bin, offset) instead of
        step, and cells in one bin share their parameters.

    Returns:
      A :class:`FadeLUT` for :func:`fade_plan`. In open mode no cell is worse on the profiling
      samples than TaylorSeer of order 1 or 2, or reuse (up to float32 rounding): all three are
      candidates.

    Raises:
      ValueError: a bad argument, closed mode inside the model, or a guidance per sample.
    """
    sampler = flow_euler() if sampler is None else sampler
    grid = FadeGrid() if grid is None else grid
    schedule.validate()
    check_site(denoiser, site)
    mode = ("closed" if site == "output" else "open") if mode is None else mode
    check_choice("mode", mode, ("open", "closed"))
    if mode == "closed" and site != "output":
        raise ValueError(f"mode: 'closed' needs site='output', got site={site!r}")
    drift = check_real("drift", drift, minimum=0.0, maximum=1.0)
    if np.ndim(guidance):
        raise ValueError(f"guidance: profile one value at a time, got shape {np.shape(guidance)}")
    guidance = float(guidance)
    if bins is not None:
        bins = check_int("bins", bins, minimum=1)
    shared = dict(
        timesteps=timesteps, schedule=schedule, sampler=sampler, guidance=guidance,
        null_cond=null_cond, cfg_channels=cfg_channels, guidance_interval=guidance_interval,
        history=HISTORY,
    )
    if np.ndim(timesteps) == 2:
        raise ValueError(
            f"timesteps: profile one grid at a time, got shape {np.shape(timesteps)}"
        )
    steps = schedule.num_steps
    if mode == "open":
        gram = profile_gram(denoiser, params, x, cond, site=site, **shared).gram
        index, rho, errors = _choose_open(grid, schedule, gram, amplitude)
    else:
        index, rho = np.zeros((steps, 1), np.int64), np.ones((steps, 1))
        errors = np.full((steps, 1), np.nan)

        def choose(s, pos, gram):
            cell, factor, weights, valid = _cell(grid, pos, s, gram, amplitude)
            best = _best(cell, _preference(grid, weights), valid, _displacement(gram))
            index[s, 0], rho[s, 0] = best, factor[best]
            errors[s, 0] = cell[best] / max(gram[-1, -1], 1e-30)
            return factor[best] * weights[best]

        gram = replay(denoiser, params, x, cond, choose=choose, drift=drift, **shared).gram
    times = np.asarray(timesteps, np.float64)
    axis = "step"
    if bins is not None:
        axis = "time"
        index, rho, errors = _choose_binned(grid, schedule, gram, amplitude, times, bins)
    return FadeLUT(
        params=_params_at(grid, index, rho),
        errors=errors,
        schedule=schedule,
        site=site,
        mode=mode,
        axis=axis,
        timesteps=times.astype(np.float32),
        guidance=guidance,
        model_hash=tree_hash(params),
        sampler=sampler_name(sampler),
        grid=grid,
        samples=int(np.shape(x)[0]),
    )


def _choose_open(grid, schedule, gram, amplitude):
    steps, sites = gram.shape[:2]
    index, rho = np.zeros((steps, sites), np.int64), np.ones((steps, sites))
    errors = np.full((steps, sites), np.nan)
    for s in schedule.skipped:
        pos = schedule.history(s, HISTORY)
        for g in range(sites):
            cell, factor, weights, valid = _cell(grid, pos, s, gram[s, g], amplitude)
            best = _best(
                cell, _preference(grid, weights), valid, _displacement(gram[s, g])
            )
            index[s, g], rho[s, g] = best, factor[best]
            errors[s, g] = cell[best] / max(gram[s, g, -1, -1], 1e-30)
    return index, rho, errors


def time_bin(t: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    """Index of the equal bin of ``[low, high]`` that holds ``t``."""
    return np.clip(((t - low) / (high - low) * bins).astype(int), 0, bins - 1)


def _choose_binned(grid, schedule, gram, amplitude, times, bins):
    """One parameter set for all cells with the same time bin, offset and site."""
    sites = gram.shape[1]
    cells: dict[tuple[int, int], list[int]] = {}
    where = time_bin(times[:-1], times.min(), times.max(), bins)
    for s in schedule.skipped:
        cells.setdefault((int(where[s]), s - schedule.history(s, 1)[0]), []).append(s)
    offsets = max([k for _, k in cells], default=1)
    shape = (bins, offsets, sites)
    index, rho, errors = np.zeros(shape, np.int64), np.ones(shape), np.full(shape, np.nan)
    for (b, k), members in cells.items():
        for g in range(sites):
            total, norm, moved = 0.0, 0.0, 0.0
            usable, factors, preference = True, [], 0.0
            for s in members:
                pos = schedule.history(s, HISTORY)
                cell, factor, weights, valid = _cell(grid, pos, s, gram[s, g], amplitude)
                total, norm = total + cell, norm + gram[s, g, -1, -1]
                moved += _displacement(gram[s, g])
                usable = usable & valid
                factors.append(factor)
                preference = np.maximum(preference, _preference(grid, weights))
            best = _best(total, preference, usable, moved)
            index[b, k - 1, g] = best
            rho[b, k - 1, g] = np.mean([factor[best] for factor in factors])
            errors[b, k - 1, g] = total[best] / max(norm, 1e-30)
    return index, rho, errors


def lut_params(lut: FadeLUT, index: tuple[int, ...]) -> FadeParams:
    """The scalar parameters of one cell."""
    p = FadeParams(*(column[index] for column in lut.params))
    return FadeParams(
        FORMS[int(p.form)], float(p.alpha), float(p.lam), int(p.order), int(p.window),
        float(p.amplitude),
    )


def fade_plan(
    lut: FadeLUT,
    schedule: CacheSchedule | None = None,
    *,
    timesteps: Any = None,
    guidance: float | None = None,
    params: Any = None,
    sampler: Sampler | None = None,
    site: str | None = None,
    strict: bool = True,
) -> ForecastPlan:
    """Weights from a profiled table, in float64 on the host.

    Args:
      lut: from :func:`profile_fade` or :func:`load_lut`.
      schedule: of the run to come; that of the table by default. A step table serves only its
        own schedule; a time table any number of steps at the same interval (give
        ``timesteps``); ``strict=False`` lets it serve shorter intervals.
      timesteps: of the run to come, checked against (step) or looked up in (time) the table.
      guidance: of the run to come; a difference of more than 25 % from the table's is refused.
      params: of the model to come; a different model is refused.
      sampler, site: of the run to come; others than the table's are refused.
      strict: False lets a differing guidance, model, sampler or time grid pass.

    Raises:
      ValueError: the table does not fit, saying in what.
    """
    schedule = lut.schedule if schedule is None else schedule.validate()
    if lut.axis == "step":
        if schedule.num_steps != lut.schedule.num_steps:
            raise ValueError(
                f"lut: profiled for num_steps={lut.schedule.num_steps}, the schedule has "
                f"num_steps={schedule.num_steps}"
            )
        if schedule.anchors != lut.schedule.anchors:
            raise ValueError(
                f"lut: profiled for anchors {lut.schedule.anchors}, the schedule has "
                f"{schedule.anchors}"
            )
        if schedule.breaks != lut.schedule.breaks:
            raise ValueError(
                f"lut: profiled for breaks {lut.schedule.breaks}, the schedule has "
                f"{schedule.breaks}"
            )
    if site is not None and site != lut.site:
        raise ValueError(f"site: the table was profiled at {lut.site!r}, the run uses {site!r}")
    elif strict and _interval(schedule) != _interval(lut.schedule):
        raise ValueError(
            f"schedule: the table was profiled at an interval of {_interval(lut.schedule)}, the "
            f"schedule has {_interval(schedule)}; profile again, or pass strict=False"
        )
    if strict:
        _check_match(lut, timesteps, guidance, params, sampler)
    sites = lut.params.alpha.shape[-1]
    weights = np.zeros((schedule.num_steps, sites, HISTORY))
    cells = _step_cells if lut.axis == "step" else _time_cells
    for s, cell in cells(lut, schedule, timesteps):
        pos = schedule.history(s, HISTORY)
        for g in range(sites):
            weights[s, g, : len(pos)] = fade_weights(pos, s, lut_params(lut, (*cell, g)))
    check_finite("plan.weights", weights)
    return ForecastPlan(schedule, weights if lut.site == "module" else weights[:, 0])


def _interval(schedule: CacheSchedule) -> int:
    """Longest gap between anchors, the end of the run included."""
    return int(np.max(np.diff([*schedule.anchors, schedule.num_steps])))


def _step_cells(lut, schedule, timesteps):
    del lut, timesteps
    return [(s, (s,)) for s in schedule.skipped]


def _time_cells(lut, schedule, timesteps):
    if timesteps is None and schedule.num_steps != lut.schedule.num_steps:
        raise ValueError(
            f"timesteps: a time table needs them for a schedule of {schedule.num_steps} steps "
            f"(it was profiled on {lut.schedule.num_steps})"
        )
    times = np.asarray(lut.timesteps if timesteps is None else timesteps, np.float64)
    if times.shape != (schedule.num_steps + 1,):
        raise ValueError(
            f"timesteps: expected num_steps + 1 = {schedule.num_steps + 1} values, got shape "
            f"{times.shape}"
        )
    bins, offsets, _ = lut.params.alpha.shape
    where = time_bin(times[:-1], lut.timesteps.min(), lut.timesteps.max(), bins)
    cells = []
    for s in schedule.skipped:
        k = s - schedule.history(s, 1)[0]
        if k > offsets:
            raise ValueError(
                f"schedule: skips {k} steps in a row, the table was profiled up to {offsets}"
            )
        # A bin without a skipped step at this offset borrows the nearest bin that has one.
        known = np.flatnonzero(np.isfinite(lut.errors[:, k - 1, 0]))
        nearest = known[np.argmin(np.abs(known - where[s]))]
        cells.append((s, (int(nearest), k - 1)))
    return cells


def _check_match(
    lut: FadeLUT, timesteps: Any, guidance: Any, params: Any, sampler: Sampler | None
) -> None:
    if sampler is not None and sampler_name(sampler) != lut.sampler:
        raise ValueError(
            f"sampler: the table was profiled with {lut.sampler!r}, the run uses "
            f"{sampler_name(sampler)!r}; profile again, or pass strict=False"
        )
    if guidance is not None:
        guidance = float(guidance)
        if abs(guidance - lut.guidance) > 0.25 * abs(lut.guidance):
            raise ValueError(
                f"guidance: the table was profiled at {lut.guidance}, the run uses {guidance}; "
                "profile again, or pass strict=False"
            )
    if timesteps is not None and lut.axis == "step":
        given = np.asarray(timesteps, np.float64)
        if given.shape != lut.timesteps.shape or not np.allclose(given, lut.timesteps, atol=1e-5):
            raise ValueError(
                "timesteps: differ from those the table was profiled on; profile again, or pass "
                "strict=False"
            )
    if params is not None and tree_hash(params) != lut.model_hash:
        raise ValueError(
            "params: not the model the table was profiled on; profile again, or pass "
            "strict=False"
        )


def lut_to_tree(lut: FadeLUT) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and JSON metadata of a table, e.g. for an Orbax checkpoint next to a model."""
    arrays = {f"params/{name}": value for name, value in lut.params._asdict().items()}
    arrays |= {"errors": lut.errors, "timesteps": lut.timesteps}
    metadata = {
        "format": "fadex.FadeLUT",
        "version": FORMAT_VERSION,
        "num_steps": lut.schedule.num_steps,
        "anchors": list(lut.schedule.anchors),
        "breaks": list(lut.schedule.breaks),
        "grid": lut.grid._asdict(),
    }
    for name in ("site", "mode", "axis", "guidance", "model_hash", "sampler", "samples"):
        metadata[name] = getattr(lut, name)
    return arrays, metadata


def lut_from_tree(arrays: dict[str, Any], metadata: dict[str, Any]) -> FadeLUT:
    """The inverse of :func:`lut_to_tree`; raises ValueError for anything else."""
    if metadata.get("format") != "fadex.FadeLUT":
        raise ValueError(f"lut: not a FADE table (format {metadata.get('format')!r})")
    if metadata.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"lut: format version {metadata.get('version')!r}, this library reads {FORMAT_VERSION}"
        )
    anchors, breaks = tuple(metadata["anchors"]), tuple(metadata.get("breaks", ()))
    schedule = CacheSchedule(metadata["num_steps"], anchors, breaks).validate()
    params = FadeParams(*(np.asarray(arrays[f"params/{name}"]) for name in FadeParams._fields))
    errors = np.asarray(arrays["errors"])
    want = (schedule.num_steps,) if metadata["axis"] == "step" else errors.shape[:-1]
    if any(column.shape != errors.shape for column in params) or errors.shape[:-1] != want:
        raise ValueError(
            f"lut: expected arrays of one shape over {schedule.num_steps} steps, got "
            f"{[column.shape for column in params]} and {errors.shape}"
        )
    timesteps = np.asarray(arrays["timesteps"])
    if timesteps.shape != (schedule.num_steps + 1,):
        raise ValueError(
            f"lut: expected {schedule.num_steps + 1} timesteps, got {timesteps.shape}"
        )
    for name in ("alpha", "lam", "amplitude"):
        check_finite(f"lut.params.{name}", getattr(params, name))
    grid = FadeGrid(*(tuple(metadata["grid"][name]) for name in FadeGrid._fields))
    return FadeLUT(
        params=params, errors=errors, schedule=schedule, timesteps=timesteps, grid=grid,
        **{name: metadata[name] for name in
           ("site", "mode", "axis", "guidance", "model_hash", "sampler", "samples")},
    )


def save_lut(lut: FadeLUT, path: str | Path) -> Path:
    """Write a table to ``path`` (``.npz``: arrays, metadata and a checksum); atomic."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path: expected a name ending in .npz, got {path}")
    arrays, metadata = lut_to_tree(lut)
    text = json.dumps(metadata, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp.npz")
    digest = _digest(arrays, text)
    np.savez(temporary, metadata=np.array(text), sha256=np.array(digest), **arrays)
    temporary.replace(path)
    return path


def load_lut(path: str | Path) -> FadeLUT:
    """Read a table written by :func:`save_lut`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a table, damaged, or of another format version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: no FADE table at {path}")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        text, digest = str(arrays.pop("metadata")), str(arrays.pop("sha256"))
        metadata = json.loads(text)
    except Exception as error:  # zip, npy and json each raise kinds of their own
        raise ValueError(f"path: {path} is not a readable FADE table ({error})") from error
    if digest != _digest(arrays, text):
        raise ValueError(f"path: {path} is damaged (its checksum does not match)")
    return lut_from_tree(arrays, metadata)


def _digest(arrays: dict[str, np.ndarray], text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        sha.update(f"{name}{value.dtype.str}{value.shape}".encode())
        sha.update(value.tobytes())
    return sha.hexdigest()
