"""A policy that shards JAX models: the mesh it asks for, and its units."""

from __future__ import annotations

from typing import Unpack

from flax import nnx
from jax.sharding import Mesh

import bridge.core.sharding
from jax_impl.api import fully_shard
from jax_impl.modules.tree_model import Tree
from jax_impl.options import ShardingOptions
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan


class ShardingPolicy(bridge.core.sharding.ShardingPolicy):
    """A policy that shards JAX models; what a policy says is in ``bridge.core.sharding.policy.policy``."""

    def apply(
        self, model: nnx.Module | Tree, *, mesh: Mesh | None = None, **options: Unpack[ShardingOptions]
    ) -> tuple[ShardingPlan, Buffers]:
        """``fully_shard(model, mesh, self, **options)``: the sharding plan, and the main weights in it.

        mesh: of this policy's axes; None: made over all devices of JAX. options: those that ``ShardingOptions`` allows
            with a policy. ``model`` is not changed.
        """
        return fully_shard(model, mesh, self, **options)
