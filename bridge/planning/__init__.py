"""Memory and traffic of a sharded model before a device exists: start reading in
``bridge/planning/cost/cost.py``.

::

    from bridge.planning import Workload, make_plan

    plan = make_plan("llama3-8b", "fsdp", 64, "jax", Workload(batch=1, length=4096))
    print(plan.at_rest.total, plan.traffic.wire_bytes())
"""

from bridge.planning.cost.cost import CostPlan, Workload, load_policy, make_plan, parse_policy
from bridge.planning.models.errors import PlanError
from bridge.planning.models.models import resolve_models

__all__ = ["CostPlan", "PlanError", "Workload", "load_policy", "make_plan", "parse_policy", "resolve_models"]
