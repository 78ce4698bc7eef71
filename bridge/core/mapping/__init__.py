"""Translation of checkpoint trees between a torch model and a jax model, by a table of rules."""

from bridge.mapping.errors import MappingError
from bridge.mapping.plan import Plan, PlannedTensor
from bridge.mapping.rules import load_mapping, parse_mapping
from bridge.mapping.table import MappingTable
from bridge.mapping.translation import make_plan

__all__ = [
    "MappingError",
    "MappingTable",
    "Plan",
    "PlannedTensor",
    "load_mapping",
    "make_plan",
    "parse_mapping",
]
