"""Lowered programs of a step whose state lies in host memory, and their transfers in scheduled order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.support.compilers.setting import Setting, Transfer

if TYPE_CHECKING:
    from jax_impl.runtime.groups.sharding_plan import ShardingPlan

_START = re.compile(r"%(\S+) = (.*?) (?:copy-start|dynamic-slice-start|fusion-start|async-start)\(")
_DONE = re.compile(r"%\S+ = .*? (?:copy-done|dynamic-slice-done|fusion-done|async-done)\(%([^\s,)]+)")
_ARRAY = re.compile(r"(?:f32|bf16|f16|f8e4m3fn|f8e5m2)\[([\d,]+)\](\{[^}]*\})?")
_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f8e5m2": 1}
# Smaller arrays are not moments but scales or single elements.
_LEAST = 1 << 16


def lowered_gradients(setting: Setting, plan: ShardingPlan, loss: Any, weights: Any, rows: Any) -> Any:
    """The program of a step's gradients with weights in host memory."""
    import jax

    from jax_impl.runtime.groups.memory_kinds import HOST, in_host
    from jax_impl.runtime.step.gradients import unchecked_gradients

    step = unchecked_gradients(plan, loss, setting.microbatches)

    def gradients(weights: Any, rows: Any) -> Any:
        return step(weights, rows, {}, (), to_host=setting.update == "host")

    if _is_tpu(setting):
        weights = {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))
            for key, x in weights.items()
        }
        return jax.jit(gradients).lower(weights, rows)
    lowered = jax.jit(lambda weights, rows: gradients(in_host(weights), rows)).lower(weights, rows)
    _written(lowered.compiler_ir("stablehlo"), [True] * len(weights))
    return lowered


def _is_tpu(setting: Setting) -> bool:
    return setting.target.startswith(("v4", "v5", "v6"))


def lowered_update(setting: Setting, plan: ShardingPlan) -> tuple[Any, list[int]]:
    """The program, and bytes on a device of the moments of each key that lie in the host's memory, in the plan's order.

    JAX gives GPUs that are not there no memory of the host: their sharding forgets its kind
    (``Device.addressable_memories()`` is empty). There the kind is written into the program.
    """
    import jax

    from jax_impl import Offload, abstract_state, main_weight_adamw, make_train_step
    from jax_impl.optimizer.in_turn import key_of
    from jax_impl.runtime.groups.memory_kinds import HOST, in_memory

    mu, nu = setting.moments
    optimizer = main_weight_adamw(1e-3, mu_dtype=mu, nu_dtype=nu)
    offload = Offload(setting.offload, setting.weights_on_host, setting.update)
    state = abstract_state(plan, optimizer, offload=offload)
    memories = offload.kinds(plan, state.opt_state)
    # Where the host updates, they have left for its memory.
    memory = HOST if setting.update == "host" and plan.brings_units else None
    gradients = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=in_memory(plan.sharding(key), memory))
        for key, x in state.weights.items()
    }
    loss = jax.ShapeDtypeStruct((), "float32", sharding=plan.replicated)
    step = make_train_step(plan, lambda model, rows: model(rows).sum(), optimizer)
    sizes = dict.fromkeys(plan.arrays, 0)
    for (path, leaf), memory in zip(
        jax.tree.leaves_with_path((state.opt_state, state.weights)),
        jax.tree.leaves(memories[::-1]),
        strict=True,
    ):
        if memory:
            shard = leaf.sharding.shard_shape(leaf.shape)
            sizes[key_of(plan, path, leaf) or ""] += math.prod(shard) * leaf.dtype.itemsize
    if _is_tpu(setting):
        return step._update(state).lower(state.weights, state.opt_state, gradients, loss), list(
            sizes.values()
        )

    def update(weights: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
        on_device = jax.tree.map(
            lambda x, memory: jax.device_put(x, jax.memory.Space.Host) if memory else x,
            (weights, opt_state),
            memories,
        )
        return step._update_state(*on_device, gradients, loss)

    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(state.weights, state.opt_state, gradients, loss)
    arguments = [memory == HOST for memory in jax.tree.leaves(memories)]
    _written(lowered.compiler_ir("stablehlo"), arguments)
    return lowered, list(sizes.values())


def _written(module: Any, on_host: list[bool]) -> None:
    """Place arguments in host memory that the program first moves there."""
    from jaxlib.mlir import ir

    with module.context:
        (main,) = (
            operation
            for operation in module.body.operations
            if operation.attributes["sym_name"].value == "main"
        )
        marked = []
        for number, attributes in enumerate(main.attributes["arg_attrs"]):
            named = {attribute.name: attribute.attr for attribute in attributes}
            lies = number < len(on_host) and on_host[number]
            named["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host" if lies else "device")
            marked.append(ir.DictAttr.get(named))
            if lies:
                argument = main.regions[0].blocks[0].arguments[number]
                (move,) = (use.owner for use in argument.uses)
                assert "pinned_host" in str(move), str(move)
                move.operation.results[0].replace_all_uses_with(argument)
                move.operation.erase()
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)


def read_transfers(text: str) -> Iterator[Transfer]:
    """Transfers of arrays of 64 KiB or more between host and device memory in a scheduled program."""
    entry = text[text.index("\nENTRY") :].splitlines()
    begun: dict[str, tuple[int, bool, int]] = {}
    transfers: list[tuple[int, int, bool, int]] = []
    for number, line in enumerate(entry):
        if match := _START.search(line):
            left = match[2]
            arrays = [(_nbytes(array), "S(5)" in (array[2] or "")) for array in _ARRAY.finditer(left)]
            on_host = [size for size, host in arrays if host]
            here = [size for size, host in arrays if not host]
            if not on_host or not here or max(here) < _LEAST:
                continue
            # The type of a copy begins with its result.
            into = "copy-start(" not in line or not _is_host(left)
            begun[match[1]] = (number, into, max(here))
        elif (match := _DONE.search(line)) and match[1] in begun:
            start, into, size = begun.pop(match[1])
            transfers.append((start, number, into, size))
    for start, done, into, size in transfers:
        between = entry[start + 1 : done]
        computes = any(_is_update(line) for line in between)
        against = any(a < done and start < b for a, b, other, _ in transfers if other != into)
        yield Transfer(into, size, computes, against)


def _is_host(left: str) -> bool:
    """Whether the first array of a type lies in host memory."""
    match = _ARRAY.search(left)
    return match is not None and "S(5)" in (match[2] or "")


def _is_update(line: str) -> bool:
    """A fusion of several operands that makes arrays as large as a moment."""
    left, mark, right = line.partition(" fusion(")
    return (
        bool(mark)
        and any(_nbytes(array) >= _LEAST for array in _ARRAY.finditer(left))
        and right.count("%") > 3
    )


def _nbytes(array: re.Match[str]) -> int:
    size = _SIZES[array[0].split("[")[0]]
    for dimension in array[1].split(","):
        size *= int(dimension)
    return size
