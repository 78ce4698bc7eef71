"""Variables of a model that are not parameters: batch statistics, random streams, counters, caches.

Every device holds them whole, except variables with one row per row of the batch. Within a step each device has its own
values: statistics of its own rows, and its own random numbers, because its index is folded into every random key. After
a step, the shard_map engine combines the values by the variable's rule::

    rule      one value from several                          default for
    mean      mean over the devices                           nnx.BatchStat
    sum       the old value plus all devices' increments
    max       the largest over all devices
    rows      each device keeps its rows, as of a batch       nnx.Cache with rows that the devices divide
    none      devices must have equal values                  all others: counters, flags

``fully_shard(..., variables={"codebook/counts": "sum"})`` sets a rule. A step does not change random keys. Four things
are refused before anything is compiled: a variable without a rule that depends on rows of the batch; a "sum" that is
not the old value plus a term independent of it; "rows" that are read and whose number does not fit the batch; and a
count by ``x.shape[0]``, which counts only one device's rows. The pjit engine sees all rows, so it combines nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jax_impl.comm.collectives import fence
from jax_impl.comm.mesh import DataParallelMesh
from jax_impl.modules.device_values import DeviceValue, variables_after
from jax_impl.modules.module_tree import VariableInfo

Variables = dict[str, jax.Array]
Infos = Mapping[str, VariableInfo]
Rules = Mapping[str | type[nnx.Variable], str]
T = TypeVar("T")

RULES = ("mean", "sum", "max", "rows")
_NEEDED: Mapping[str, tuple[Any, str]] = {
    "mean": (jnp.inexact, "a floating-point variable"),
    "sum": (jnp.number, "a variable of numbers"),
}


def with_rules(infos: Infos, asked: Rules, stacks: Sequence[str], ranks: int) -> dict[str, VariableInfo]:
    """The variables with their rules. ``asked``: rules by pattern of paths, or by type; the last match counts.

    ``stacks``: paths of modules with a leading axis over layers. ``ranks``: the number of parts into which rows are
    cut. Raises ``ValueError`` for an unknown rule, for a key that matches nothing, and for rows that ``ranks`` does not
    divide; ``TypeError`` for a key that is neither a pattern nor a type.
    """
    chosen: dict[str, str] = {}
    for key, name in asked.items():
        if name not in RULES:
            raise ValueError(f"variables: expected one of {', '.join(RULES)} for {key!r}, got {name!r}")
        if not isinstance(key, str | type):
            raise TypeError(f"variables: expected patterns of paths or types of nnx variables, got {key!r}")
        matching = [path for path, info in infos.items() if _matches(path, info, key)]
        if not matching:
            raise ValueError(
                f"variables: expected patterns of variables' paths or their types, but {key!r} matches none of "
                f"{list(infos)[:12]}"
            )
        chosen.update(dict.fromkeys(matching, name))
    ruled = {}
    for path, info in infos.items():
        rows = int(any(path == stack or path.startswith(f"{stack}/") for stack in stacks))
        divides = len(info.shape) > rows and info.shape[rows] > 0 and info.shape[rows] % ranks == 0
        rule = chosen.get(path, _usual(info, divides))
        dtypes, words = _NEEDED.get(rule or "", (None, ""))
        if dtypes is not None and not jnp.issubdtype(info.dtype, dtypes):
            raise ValueError(f"variable {path!r}: rule {rule!r}: expected {words}, got {info.dtype}")
        if rule == "rows" and not divides:
            raise ValueError(
                f"variable {path!r}: rule 'rows': expected rows, as dimension {rows}, that {ranks} devices divide, got "
                f"shape {info.shape}"
            )
        ruled[path] = replace(info, rule=rule, rows=rows)
    return ruled


def _matches(path: str, info: VariableInfo, key: str | type) -> bool:
    return fnmatch.fnmatchcase(path, key) if isinstance(key, str) else issubclass(info.cls, key)


def _usual(info: VariableInfo, divides: bool) -> str | None:
    if issubclass(info.cls, nnx.BatchStat) and jnp.issubdtype(info.dtype, jnp.inexact):
        return "mean"
    if issubclass(info.cls, nnx.Cache) and divides:
        return "rows"
    # All devices draw from a stream equally often, or only some devices draw from it.
    return "max" if issubclass(info.cls, nnx.RngState) else None


def spec_of(info: VariableInfo, axes: DataParallelMesh) -> PartitionSpec:
    """The spec of a variable."""
    return PartitionSpec(*[None] * info.rows, *axes.batch_spec) if info.rule == "rows" else PartitionSpec()


def check_variables(
    infos: Infos,
    after: Mapping[str, DeviceValue],
    axes: DataParallelMesh,
    with_more_rows: Callable[[], Any] | None,
) -> None:
    """Raise ``ValueError`` if a rule cannot combine the values that a traced step leaves on each device.

    ``with_more_rows``: returns the jaxpr of the step for more rows; None if a step sees the rows of all devices.
    """
    for path, value in after.items():
        info = infos[path]
        if info.rule is None and value.axes:
            raise ValueError(
                f"variable {path!r} ({info.cls.__name__}): expected the same value on all devices, or a rule that "
                "combines the devices' values, got a value that depends on rows of the batch and no rule: use "
                f"fully_shard(..., variables={{{path!r}: 'mean'}}), or 'sum' (of the increments from rows), 'max' or "
                "'rows' (one row per row of the batch); or make the value equal in the model "
                f"(jax.lax.psum(x, {axes.names[::-1]!r})); or use engine='pjit'"
            )
        if info.rule == "sum" and value.base != path:
            raise ValueError(
                f"variable {path!r}: rule 'sum': expected the old value plus an increment from the batch, got a value "
                "that depends on the old value in another way, such as decay * counts + batch_counts: sum the "
                f"batch's part over the devices in the model (jax.lax.psum(batch_counts, {axes.names[::-1]!r})), and "
                "remove the rule; or use engine='pjit'"
            )
    if with_more_rows is not None:
        _check_row_counts(infos, after, axes, with_more_rows)


def _check_row_counts(
    infos: Infos, after: Mapping[str, DeviceValue], axes: DataParallelMesh, with_more_rows: Callable[[], Any]
) -> None:
    """Raise ``ValueError`` if a variable without a rule uses one device's number of rows as the number of all rows."""
    counters = [
        path for path, value in after.items() if infos[path].rule is None and value.numbers and not value.same
    ]
    if not counters:
        return
    try:
        later, _ = variables_after(with_more_rows())
    except Exception:
        # The model accepts only this number of rows, so no other number can be traced.
        return
    for path in counters:
        if after[path].numbers != later[path].numbers:
            raise ValueError(
                f"variable {path!r} ({infos[path].cls.__name__}): expected a change that does not depend on the "
                "number of rows, or that comes from the rows of all devices, got a change that depends on the number "
                "of rows of one device, which is x.shape[0] inside a step: count the rows of all devices by "
                f"jax.lax.psum(jnp.sum(jnp.ones_like(x[:, 0])), {axes.names[::-1]!r}); or use engine='pjit'"
            )


def check_rows(infos: Infos, read: Collection[str], rows: int) -> None:
    """Raise ``ValueError`` for variables with rule "rows" that do not fit the ``rows`` of a call of the loss."""
    for path in sorted(read):
        info = infos[path]
        if info.rule == "rows" and info.shape[info.rows] % rows:
            raise ValueError(
                f"variable {path!r} ({info.cls.__name__}): rule 'rows', which gives each device a part of the "
                f"variable: expected rows for the {rows} rows of the batch, got shape {info.shape}: if all rows share "
                f"the variable, use fully_shard(..., variables={{{path!r}: 'max'}}), which keeps it whole on each "
                "device; or use engine='pjit'"
            )


def of_this_device(variables: Mapping[str, jax.Array], axes: DataParallelMesh) -> Variables:
    """Inside ``shard_map``: the values with which this device starts a step."""
    # Fold in the rank, or all devices would drop the same elements of their rows.
    rank = lax.axis_index(axes.names[::-1])
    return {
        path: jax.vmap(lambda key: jax.random.fold_in(key, rank))(value.reshape(-1)).reshape(value.shape)
        if is_key(value)
        else value
        for path, value in variables.items()
    }


def of_all_devices(
    infos: Infos,
    before: Mapping[str, jax.Array],
    after: Mapping[str, jax.Array],
    axes: DataParallelMesh,
    last: T,
) -> tuple[Variables, T]:
    """Combine each device's values into one; the collectives wait for ``last`` and then for each other."""
    merged: Variables = {}
    for path, value in after.items():
        rule = infos[path].rule
        if is_key(value):
            merged[path] = before[path]
        elif rule in (None, "rows"):
            merged[path] = value
        else:
            # Fences before and after: the collective waits for the previous one, and the next one waits for this one.
            value, last = fence((value, last))
            merged[path], last = fence((_merged(rule, before[path], value, axes.names), last))
    return merged, last


def _merged(rule: str | None, before: jax.Array, after: jax.Array, names: Sequence[str]) -> jax.Array:
    if rule == "sum":
        return before + lax.psum(after - before, names)
    if rule == "mean":
        return lax.pmean(after, names)
    number: Any = after.astype(jnp.int32) if after.dtype == jnp.bool_ else after
    return lax.pmax(number, names).astype(after.dtype)


def is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))
