"""Moments that were saved in another format are read as float32, then stored in this optimizer's format.

::

    checkpoint                                  read as                      this optimizer's
    opt_state/mu/<path>        float8      ->   opt_state/mu/<path>     ->   opt_state/mu/<path>        bfloat16
    opt_state/mu_scale/<path>  float32          float32
    opt_state/nu/<path>        float32                                       opt_state/nu/<path>        float8
                                                                             opt_state/nu_scale/<path>  float32

Moments that were saved in this optimizer's own format are kept byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridge.core.formats import Box, CheckpointError
from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.formats.tensors.scaled import decode, run_lengths, scale_box
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.checkpoint.matching import is_of_optimizer
from jax_impl.checkpoint.moments import SCALE
from jax_impl.checkpoint.names import ShapeDtype, state_tensors
from jax_impl.optimizer.moments import MomentFormat, Parts
from jax_impl.optimizer.plan_moments import ParameterMoments, PlanMoments
from jax_impl.optimizer.transformation import MainWeightTransformation
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

_VALUE = "/value"


class DecodedMoments(TreeReader):
    """A checkpoint as if its moments had been saved in float32. ``kept``: names of the moments that stay unchanged."""

    def __init__(self, reader: TreeReader, tree: str, kept: Collection[str] = ()) -> None:
        self._stored, self._reader, self._names = reader, reader._reader, reader._names
        self.path, self.format = reader.path, reader.format
        self._scales = scales_of(reader.tensors, tree)
        hidden = {scale for name, scale in self._scales.items() if not _is_of(name, kept)}
        self._decoded = {
            name
            for name, info in reader.tensors.items()
            if is_of_optimizer(name, tree) and _is_low(info.dtype) and not _is_of(name, kept)
        }
        self.tensors = {
            name: replace(info, dtype=np.dtype(np.float32)) if name in self._decoded else info
            for name, info in reader.tensors.items()
            if name not in hidden
        }

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        values = self._stored.read(name, box)
        if name not in self._decoded:
            return values
        if name not in self._scales:
            return values.astype(np.float32)
        scales = self._scales[name]
        shape = self._stored.tensors[name].shape
        runs = run_lengths(shape, self._stored.tensors[scales].shape)
        assert runs is not None
        box = Box.whole(shape) if box is None else box
        return decode(values, box, self._stored.read(scales, scale_box(box, runs)), runs)


def scales_of(tensors: Mapping[str, Any], tree: str) -> dict[str, str]:
    """The name of a moment's scales, by the moment's name; the scales may run along another axis (``scaled.py``)."""
    scales = {}
    for name, info in tensors.items():
        words = name.split("/")
        for position, word in enumerate(words):
            if not word.endswith(SCALE) or not is_of_optimizer(name, tree):
                continue
            moment = "/".join([*words[:position], word.removesuffix(SCALE), *words[position + 1 :]])
            if moment in tensors and run_lengths(tensors[moment].shape, info.shape) is not None:
                scales[moment] = name
    return scales


def _is_low(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def _is_of(name: str, moments: Collection[str]) -> bool:
    return any(f"/{moment}/" in f"/{name}" for moment in moments)


@dataclass(frozen=True)
class Conversion:
    """``reader`` and ``optimizer``: the tensors to read, and the optimizer that they fit. ``converted``: turns the
    state of this optimizer into the state of the requested one."""

    reader: TreeReader
    optimizer: optax.GradientTransformation
    converted: Callable[[Any], Any]


def conversion(
    reader: TreeReader,
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation,
    weights: dict[str, Any],
    opt_state: Any,
    tree: str,
) -> Conversion:
    """``weights``, ``opt_state``: the abstract weights and state of ``optimizer``."""
    expected = state_tensors(plan, weights, opt_state)
    if not isinstance(optimizer, MainWeightTransformation):
        # The values are cast when they are placed.
        kept = _kept_by_others(reader, plan, expected, tree)
        return Conversion(DecodedMoments(reader, tree, kept), optimizer, lambda state: state)
    kept = {name for name in optimizer.formats if _same_format(name, expected, reader.tensors, tree)}
    others = {name: moment_format for name, moment_format in optimizer.formats.items() if name not in kept}
    wide = optimizer.with_formats(
        {name: MomentFormat.of(moment_format.option, None) for name, moment_format in others.items()}
    )

    def converted(state: Any) -> Any:
        changed: dict[str, Any] = {}
        for name, moment_format in others.items():
            # Nothing else references these arrays, so each one is freed when it has been converted.
            values = getattr(state, name)
            changed[name], changed[name + SCALE] = _encoded(plan, moment_format, values, state.count)
        return replace(state, **changed)

    return Conversion(DecodedMoments(reader, tree, kept), wide, converted)


def _kept_by_others(
    reader: TreeReader, plan: ShardingPlan, expected: Mapping[str, ShapeDtype], tree: str
) -> set[str]:
    """Names of the moments with scales inside another optimizer's state; no other format can be converted to these."""
    scaled = set()
    for name in expected:
        words = name.split("/")
        for position, word in enumerate(words):
            if word.endswith(SCALE) and "/".join(words[position + 1 :]) in plan.parameters:
                scaled.add(word.removesuffix(SCALE))
    saved = {word for name in reader.tensors if is_of_optimizer(name, tree) for word in name.split("/")}
    kept = {name for name in scaled if _same_format(name, expected, reader.tensors, tree)}
    others = sorted((scaled - kept) & saved)
    if others:
        raise CheckpointError(
            f'{reader.path}: moments="convert": expected {", ".join(others)} in this '
            "optimizer's format, with the same dtype and the same scales, got another format. Conversion to a format "
            "with scales works only if main_weight_adamw, main_weight_sgd or main_weight_muon is the whole "
            "optimizer, not a part of another (optax.chain): load for that optimizer alone, or begin with fresh "
            'moments by moments="same", strict=False'
        )
    return kept


def _same_format(
    moment: str, expected: Mapping[str, ShapeDtype], stored: Mapping[str, TensorInfo], tree: str
) -> bool:
    """Whether a moment was saved completely in this optimizer's format."""
    saved = {
        name: ShapeDtype(info.shape, info.dtype)
        for name, info in stored.items()
        if is_of_optimizer(name, tree)
    }
    return _of_moment(moment, expected) == _of_moment(moment, saved)


def _of_moment(moment: str, tensors: Mapping[str, ShapeDtype]) -> dict[str, ShapeDtype]:
    """By the part of the name that follows the path of the optimizer's own state."""
    return {
        f"/{word}/" + rest.removesuffix(_VALUE): tensor
        for name, tensor in tensors.items()
        for word in (moment, moment + SCALE)
        if (rest := f"/{name}".partition(f"/{word}/")[2])
    }


def _encoded(
    plan: ShardingPlan, moment_format: MomentFormat, values: dict[str, Any], count: jax.Array
) -> tuple[Any, Any]:
    """The two trees of a moment. Consumes ``values``, which have the dtype of the weights."""
    # Muon stores its moments by path.
    arrays = PlanMoments(plan) if values.keys() <= plan.trainable else ParameterMoments(plan)
    shapes: dict[str, Any] = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in values.items()
    }
    parts: list[Parts] = []
    for number, rows in enumerate(arrays.rows(moment_format, shapes)):
        key = sorted(shapes)[number]
        shardings = {suffix: plan.sharding(key + suffix) for suffix in rows.suffixes}

        def encode(array: jax.Array, step: jax.Array, number: int = number, rows: Any = rows) -> Parts:
            def compute(held: Parts, values: jax.Array, step: jax.Array) -> Parts:
                return rows.encode(moment_format, values, step)

            return arrays.compute_on(number, shapes, compute, rows.zeros(moment_format), array, step)

        run = jax.jit(encode, out_shardings=shardings)
        parts.append(jax.block_until_ready(run(values.pop(key), count)))
    return arrays.join(moment_format, shapes, parts)
