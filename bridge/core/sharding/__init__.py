"""The contract both runtimes and the planner share: layouts, strategies, policies. Pure Python, no framework."""

from bridge.sharding.alignment import DEFAULT_ALIGN, Align, check_align
from bridge.sharding.layout import Layout
from bridge.sharding.parallel import Cut, ParallelPolicy, check_cuts, local_ranges, local_shape
from bridge.sharding.planner import plan_layout
from bridge.sharding.policy import ShardingPolicy
from bridge.sharding.policy_error import PolicyError
from bridge.sharding.precision_policy import PrecisionPolicy
from bridge.sharding.rows import Box, row_boxes, rows_of
from bridge.sharding.slot import Granularity, Slot
from bridge.sharding.strategy import STRATEGIES, Placements, Strategy, check_axes, strategy_named
from bridge.sharding.unit_policy import UnitPolicy

__all__ = [
    "DEFAULT_ALIGN",
    "STRATEGIES",
    "Align",
    "Box",
    "Cut",
    "Granularity",
    "Layout",
    "ParallelPolicy",
    "Placements",
    "PolicyError",
    "PrecisionPolicy",
    "ShardingPolicy",
    "Slot",
    "Strategy",
    "UnitPolicy",
    "check_align",
    "check_axes",
    "check_cuts",
    "local_ranges",
    "local_shape",
    "plan_layout",
    "row_boxes",
    "rows_of",
    "strategy_named",
]
