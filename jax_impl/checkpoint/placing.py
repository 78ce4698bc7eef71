"""Read stored tensors into a plan's arrays: each device's boxes, one shard at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from bridge.core.formats import Box
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.checkpoint.names import key_impl, parts_of
from jax_impl.runtime.groups.memory_kinds import move
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan


@dataclass(frozen=True)
class Tensors:
    """``names``: the stored name of each plan tensor that the checkpoint contains."""

    reader: TreeReader
    plan: ShardingPlan
    names: Mapping[str, str]

    def weights(self, expected: Buffers, initial: Buffers | None, memory: Mapping[str, str]) -> Buffers:
        """Arrays that replace the abstract ones; ``initial`` supplies the parameters that are not stored."""
        lacking = {
            info.key for path, info in self.plan.parameters.items() if f"params/{path}" not in self.names
        }
        return {
            key: move(
                self.array("params", key, array.dtype, initial[key] if initial and key in lacking else None),
                memory[key],
            )
            for key, array in expected.items()
        }

    def array(self, name: str, key: str, dtype: np.dtype, fresh: jax.Array | None = None) -> jax.Array:
        """The array ``key`` of ``name``; ``fresh`` supplies the values that are not stored."""
        stored, sharding = self.plan.stored(key), self.plan.sharding(key)
        devices: defaultdict[str, list[jax.Device]] = defaultdict(list)
        indices: dict[jax.Device, Any] = dict(sharding.addressable_devices_indices_map(stored.shape))
        for device, index in indices.items():
            devices[repr(index)].append(device)
        shards = {repr(shard.index): shard for shard in ([] if fresh is None else fresh.addressable_shards)}
        placed = []
        for shown, index in {repr(index): index for index in indices.values()}.items():
            own = np.asarray(shards[shown].data) if shown in shards else None
            kept = {} if own is None else {(p.path, p.offsets): p.values for p in stored.pieces(index, own)}
            values = stored.shard(index, dtype, partial(self._box, name, kept))
            # Wait, so that the host's copy of one shard is freed before the next shard is read.
            placed += jax.block_until_ready([jax.device_put(values, device) for device in devices[shown]])
        return jax.make_array_from_single_device_arrays(stored.shape, sharding, placed)

    def optimizer(self, opt_state: Any, fresh: Any, memory: Any) -> Any:
        """Arrays that replace the abstract ones of ``opt_state``; ``fresh``: the same tree with values, or None.

        ``memory``: the same tree with kinds of memory.
        """
        spaces = jax.tree.leaves(memory)
        news: list[Any] = (
            [None] * len(jax.tree.leaves(opt_state)) if fresh is None else jax.tree.leaves(fresh)
        )
        leaves = []
        for number, (keys, leaf) in enumerate(jax.tree.leaves_with_path(opt_state)):
            # Free a fresh array when a loaded array replaces it.
            new, news[number] = news[number], None
            leaves.append(move(self._moment(keys, leaf, new), spaces[number]))
        return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)

    def variable(self, path: str, impls: Mapping[str, str]) -> jax.Array:
        array = self._replicated(f"variables/{path}", impls.get(path))
        return array if path in impls else jax.device_put(array, self.plan.variable_sharding(path))

    def _moment(self, keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, fresh: jax.Array | None) -> Any:
        located = self.plan.locate_buffer(keys, leaf)
        if located is None:
            name = "/".join(parts_of(keys))
            return self._replicated(name, key_impl(leaf)) if name in self.names else fresh
        key, rest = located
        name = "/".join(parts_of(rest))
        held = [path for path in self.plan.parameters if self.plan.holding({key: leaf}, path) is not None]
        lacking = [path for path in held if f"{name}/{path}" not in self.names]
        if held and lacking == held:
            return fresh
        return self.array(name, key, leaf.dtype, fresh if lacking else None)

    def _box(
        self,
        name: str,
        kept: Mapping[tuple[str, tuple[int, ...]], np.ndarray],
        path: str,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> np.ndarray:
        source = self.names.get(f"{name}/{path}")
        return kept[path, offsets] if source is None else self.reader.read(source, Box(offsets, sizes))

    def _replicated(self, name: str, impl: str | None) -> jax.Array:
        """``impl``: the algorithm of a random key, whose data is stored."""
        values, whole = self.reader.read(self.names[name]), self.plan.replicated
        # Not device_put, because device_put makes all processes compare their values by a collective.
        array = jax.make_array_from_callback(values.shape, whole, lambda index: np.asarray(values[index]))
        wrap = partial(jax.random.wrap_key_data, impl=impl)
        return array if impl is None else jax.jit(wrap, out_shardings=whole)(array)
