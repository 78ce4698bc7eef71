"""The contract both runtimes and the planner share: layouts, strategies, policies. Pure Python, no framework."""

from bridge.core.sharding.layout.alignment import DEFAULT_ALIGN, Align, check_align
from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.layout.planner import plan_layout
from bridge.core.sharding.layout.rows import Box, row_boxes, rows_of
from bridge.core.sharding.layout.slot import Granularity, Slot
from bridge.core.sharding.policy.parallel import Cut, ParallelPolicy, check_cuts, local_ranges, local_shape
from bridge.core.sharding.policy.policy import ShardingPolicy
from bridge.core.sharding.policy.policy_error import PolicyError
from bridge.core.sharding.policy.precision_policy import PrecisionPolicy
from bridge.core.sharding.policy.strategy import (
    ENGINES,
    STRATEGIES,
    Engine,
    Placements,
    Strategy,
    StrategyName,
    check_axes,
    strategy_named,
)
from bridge.core.sharding.policy.unit_policy import UnitPolicy

__all__ = [
    "DEFAULT_ALIGN", "ENGINES", "STRATEGIES", "Align", "Box", "Cut", "Engine", "Granularity", "Layout",
    "ParallelPolicy", "Placements", "PolicyError", "PrecisionPolicy", "ShardingPolicy", "Slot", "Strategy",
    "StrategyName", "UnitPolicy", "check_align", "check_axes", "check_cuts", "local_ranges", "local_shape",
    "plan_layout", "row_boxes", "rows_of", "strategy_named",
]  # fmt: skip
