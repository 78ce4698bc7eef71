"""A policy that shards JAX models, with the mesh and the units that it names."""

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
    """A policy that shards JAX models; ``bridge.core.sharding.policy.policy`` describes the fields of a policy."""

    def apply(
        self, model: nnx.Module | Tree, *, mesh: Mesh | None = None, **options: Unpack[ShardingOptions]
    ) -> tuple[ShardingPlan, Buffers]:
        """``fully_shard(model, mesh, self, **options)``: the sharding plan and the main weights.

        mesh: has this policy's axes; None: a mesh over all devices of JAX. options: the options that
            ``ShardingOptions`` allows with a policy. ``model`` is not changed.
        """
        return fully_shard(model, mesh, self, **options)
