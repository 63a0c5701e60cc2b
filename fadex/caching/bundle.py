"""Model, plan and table in one checkpoint: what a cached run needs, under one manifest.

A bundle is a :mod:`fadex.core.checkpoint` folder (Orbax arrays, one manifest with the SHA-256
of every file) whose tree has up to three parts, ``params``, ``plan`` and ``table``. The static
side (schedules, what a table was profiled on) lies in the manifest's metadata.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fadex.caching.fade_table import FadeLUT, lut_from_tree, lut_to_tree
from fadex.caching.fuca import FucaTables
from fadex.caching.fuca_profile import FucaPlan
from fadex.caching.plan import ForecastPlan, check_plan
from fadex.caching.schedule import CacheSchedule
from fadex.core import checkpoint
from fadex.core.checks import check_finite
from fadex.core.pytree import tree_hash

_FORMAT, _VERSION = "fadex.bundle", 1


class Bundle(NamedTuple):
    """What :func:`load_bundle` gives back.

    Attributes:
      params: the model's parameters.
      plan: the :class:`~fadex.caching.ForecastPlan` or :class:`~fadex.caching.FucaPlan`, or None.
      table: the :class:`~fadex.caching.FadeLUT`, or None.
      metadata: what the caller added, as JSON gives it back.
    """

    params: Any
    plan: ForecastPlan | FucaPlan | None
    table: FadeLUT | None
    metadata: Any


def save_bundle(
    path: str | os.PathLike[str],
    *,
    params: Any,
    plan: ForecastPlan | FucaPlan | None = None,
    table: FadeLUT | None = None,
    metadata: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write model, plan and table as one checkpoint folder, complete or not at all.

    Args:
      path: the folder to create.
      params: parameters, any pytree that :func:`fadex.core.checkpoint.save` takes.
      plan: from :func:`~fadex.caching.make_plan` and its like, or
        :func:`~fadex.caching.place_fuca` (``FucaPlan(schedule, tables)`` for tables made apart).
        Stored bit for bit (weights keep their dtype, float64 on the host), like ``table``.
      table: from :func:`~fadex.caching.profile_fade`.
      metadata: anything that JSON can hold.
      overwrite: replace a checkpoint that is at ``path``.

    Returns:
      The folder's absolute path.

    Raises:
      ValueError: the parts do not belong together (other numbers of steps or anchors, a table
        of another model), or the plan's weights do not fit its schedule. Nothing was written.
      TypeError: ``plan`` is neither kind. Forecasters hold functions; rebuild or export those.
      FileExistsError: ``path`` exists and ``overwrite`` is false, or is not a checkpoint.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from fadex.caching import (load_bundle, make_plan, save_bundle, taylorseer,
      ...                            uniform_schedule)
      >>> plan = make_plan(uniform_schedule(20, 4), taylorseer(1))
      >>> folder = save_bundle(tempfile.mkdtemp() + "/bundle", params={"w": jnp.ones(3)}, plan=plan)
      >>> load_bundle(folder).plan.schedule == plan.schedule
      True
    """
    _check_parts(params, plan, table)
    tree = {"params": params}
    about: dict[str, Any] = {
        "format": _FORMAT, "version": _VERSION, "plan": None, "table": None, "user": metadata,
    }
    if plan is not None:
        tree["plan"], about["plan"] = _plan_to_tree(plan)
    if table is not None:
        tree["table"], about["table"] = lut_to_tree(table)
    return checkpoint.save(path, tree, metadata=about, overwrite=overwrite)


def load_bundle(
    path: str | os.PathLike[str], *, params_target: Any = None, sharding: Any = None
) -> Bundle:
    """Verify a bundle and read it back.

    Args:
      path: a folder that :func:`save_bundle` wrote.
      params_target: gives the parameters their types (an ``nnx.State``, say) and checks their
        names and shapes, as the ``target`` of :func:`fadex.core.checkpoint.restore`; without it
        they come as nested dicts.
      sharding: where the parameters go, as there.

    Raises:
      ValueError: no bundle, a missing part, damage to any file, parameters that differ from
        ``params_target``, or parts that do not belong together (``CheckpointError`` where the
        checkpoint itself is at fault).
    """
    manifest = checkpoint.read_manifest(path)
    about = manifest["metadata"]
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise ValueError(f"path: {path} is a checkpoint, but not a bundle")
    if about.get("version") != _VERSION:
        raise ValueError(
            f"path: bundle version {about.get('version')!r}, this library reads {_VERSION}"
        )
    structure = {entry["path"].split("/")[0] for entry in manifest["leaves"]}
    for part in ("plan", "table"):
        if (about.get(part) is None) != (part not in structure):
            raise ValueError(f"path: {path} has lost its {part}")
    target = None
    if params_target is not None:
        target = {"params": params_target}
        for entry in manifest["leaves"]:
            part, _, name = entry["path"].partition("/")
            if part != "params":
                target.setdefault(part, {})[name] = _like(entry)
    places = None if sharding is None else {
        part: sharding if part == "params" else None for part in ("params", *sorted(structure))
    }
    tree = checkpoint.restore(path, target, sharding=places)
    plan = table = None
    if about["plan"] is not None:
        plan = _plan_from_tree(tree["plan"], about["plan"], path)
    if about["table"] is not None:
        table = lut_from_tree(tree["table"], about["table"])
    params = tree.get("params", {})
    _check_parts(params, plan, table)
    return Bundle(params, plan, table, about["user"])


def _like(entry: dict[str, Any]) -> Any:
    """A stand-in of the kind (jax or numpy) that was saved."""
    import jax

    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    return np.empty(shape, dtype) if entry["kind"] == "numpy" else \
        jax.ShapeDtypeStruct(shape, dtype)


def _plan_to_tree(plan: ForecastPlan | FucaPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and JSON metadata of a plan."""
    schedule = plan.schedule
    about: dict[str, Any] = {
        "num_steps": schedule.num_steps, "anchors": list(schedule.anchors),
        "breaks": list(schedule.breaks),
    }
    if isinstance(plan, ForecastPlan):
        return {"weights": plan.weights}, about
    fields = plan.tables._asdict()
    arrays = {name: value for name, value in fields.items() if hasattr(value, "dtype")}
    plain = {name: _pack(value) for name, value in fields.items() if name not in arrays}
    return arrays, about | {"kind": "fuca", "plain": plain}


def _plan_from_tree(arrays: Any, about: dict[str, Any], path: Any) -> ForecastPlan | FucaPlan:
    steps, *rest = (about[name] for name in ("num_steps", "anchors", "breaks"))
    schedule = CacheSchedule(steps, *(tuple(part) for part in rest))
    if "kind" not in about:
        return ForecastPlan(schedule, arrays["weights"])
    fields = dict(arrays) | {name: _unpack(value) for name, value in about["plain"].items()}
    try:
        return FucaPlan(schedule, FucaTables(**fields))
    except TypeError as error:
        raise ValueError(f"path: {path} has FuCa tables of another version ({error})") from error


def _pack(value: Any) -> Any:
    """JSON in which tuples stay tuples; floats come back bit for bit as they are."""
    return {"tuple": [_pack(part) for part in value]} if isinstance(value, tuple) else value


def _unpack(value: Any) -> Any:
    return tuple(_unpack(part) for part in value["tuple"]) if isinstance(value, dict) else value


def _check_fuca(plan: FucaPlan) -> None:
    """Raise ValueError for tables whose rows do not fit the schedule."""
    schedule, tables = plan.schedule.validate(), plan.tables
    bounds = (*schedule.anchors, schedule.num_steps)
    count, size = schedule.nfe, np.shape(tables.predictor)[-1]
    widest = max(np.diff(bounds))
    shapes = {
        "scale": (count,), "predictor": (count, size), "corrector": (count, size + 1),
        "slope": (count,), "path_scale": (count, widest), "path": (count, widest, size + 1),
        "tail_scale": (widest,), "tail": (widest, size),
    }
    for name, want in shapes.items():
        rows = getattr(tables, name)
        if np.shape(rows) != want:
            raise ValueError(
                f"plan.tables.{name}: expected shape {want} for {count} anchors of "
                f"{schedule.num_steps} steps, got {np.shape(rows)}"
            )
        check_finite(f"plan.tables.{name}", rows)
    if (tables.anchors, tables.breaks) != (schedule.anchors, schedule.breaks):
        raise ValueError(
            f"plan.tables: made for anchors {tables.anchors} and breaks {tables.breaks}, the "
            f"schedule has {schedule.anchors} and {schedule.breaks}"
        )


def _check_parts(
    params: Any, plan: ForecastPlan | FucaPlan | None, table: FadeLUT | None
) -> None:
    if isinstance(plan, FucaPlan):
        _check_fuca(plan)
    elif isinstance(plan, ForecastPlan):
        check_plan(plan)
    elif plan is not None:
        raise TypeError(
            f"plan: expected a ForecastPlan or a FucaPlan, got {type(plan).__name__}"
        )
    if table is None:
        return
    # A table over time serves any number of steps; a table by step only its own schedule.
    if plan is not None and table.axis == "step" and plan.schedule != table.schedule:
        ours, theirs = plan.schedule, table.schedule
        raise ValueError(
            f"plan: made for num_steps={ours.num_steps}, anchors {ours.anchors} and breaks "
            f"{ours.breaks}; the table was profiled for num_steps={theirs.num_steps}, anchors "
            f"{theirs.anchors} and breaks {theirs.breaks}"
        )
    if tree_hash(params) != table.model_hash:
        raise ValueError("table: profiled on another model than params")
