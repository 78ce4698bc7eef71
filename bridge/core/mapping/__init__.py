"""Translation of checkpoint trees between a torch model and a jax model, by a table of rules."""

from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import load_mapping, parse_mapping
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.plan.plan import PlannedTensor
from bridge.core.mapping.plan.plan import TranslationPlan as Plan
from bridge.core.mapping.plan.translation import make_plan

__all__ = [
    "MappingError",
    "MappingTable",
    "Plan",
    "PlannedTensor",
    "load_mapping",
    "make_plan",
    "parse_mapping",
]
