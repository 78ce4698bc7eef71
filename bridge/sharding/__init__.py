"""The contract both runtimes and the planner share: layouts, strategies, policies. Pure Python, no framework."""

from bridge.sharding.alignment import DEFAULT_ALIGN, Align, check_align
from bridge.sharding.layout import Layout
from bridge.sharding.planner import plan_layout
from bridge.sharding.policy import PolicyError, PrecisionPolicy, ShardingPolicy, UnitPolicy
from bridge.sharding.rows import Box, row_boxes, rows_of
from bridge.sharding.slot import Granularity, Slot
from bridge.sharding.strategy import STRATEGIES, Placements, Strategy, check_axes, strategy_named

__all__ = [
    "DEFAULT_ALIGN",
    "STRATEGIES",
    "Align",
    "Box",
    "Granularity",
    "Layout",
    "Placements",
    "PolicyError",
    "PrecisionPolicy",
    "ShardingPolicy",
    "Slot",
    "Strategy",
    "UnitPolicy",
    "check_align",
    "check_axes",
    "plan_layout",
    "row_boxes",
    "rows_of",
    "strategy_named",
]
