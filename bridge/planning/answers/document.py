"""A comparison as one JSON document, whose fields ``docs/reference/plan-json.md`` names."""

from __future__ import annotations

from typing import Any

from bridge.planning.answers.comparison import Comparison
from bridge.planning.cost.at_rest import AtRest
from bridge.planning.cost.cost import CostPlan, UnitPlan
from bridge.planning.cost.traffic import KINDS, Traffic

FORMAT, VERSION = "twinshard.plan", 1


def document(comparison: Comparison) -> dict[str, Any]:
    """See above."""
    first = comparison.plans[0]
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": first.model.name,
        "parameters": first.model.numel,
        "source": first.model.source,
        "workload": vars(first.workload),
        "memory": comparison.memory,
        "reserve": float(comparison.reserve),
        "usable": comparison.usable,
        "optimizer": {**first.optimizer.to_json(), "offload": float(first.optimizer.offload)},
        "frozen": sum(parameter.numel for parameter in first.model.parameters if not parameter.trainable),
        "plans": [_plan(plan, comparison.fits(plan)) for plan in comparison.plans],
        "cheapest": [{**vars(choice), "workload": vars(choice.workload)} for choice in comparison.choices],
        "refused": comparison.refused,
    }


def _plan(plan: CostPlan, fits: bool | None) -> dict[str, Any]:
    mesh, peak = plan.mesh, plan.peak
    return {
        "policy": plan.policy,
        "runtime": plan.runtime,
        "devices": mesh.devices,
        "mesh": mesh.all_axes,
        "prefetch": plan.prefetch,
        "attention": plan.model.attention,
        "workload": vars(plan.workload),
        "device": plan.device,
        "at_rest": _at_rest(plan.at_rest),
        "host": plan.at_rest.host,
        "peak": {
            "moment": peak.moment,
            "total": peak.total,
            "terms": dict(peak.terms),
            "activations_known": bool(plan.model.activations),
            "lower_bound": not peak.complete,
            "least": plan.least,
            "upper_bound": plan.peak_is_upper_bound,
        },
        "traffic": _traffic(plan.traffic, tuple(mesh.all_axes)),
        "model_axes_counted": plan.exchanges is not None,
        "other": plan.traffic.loss,
        "wire_bytes": plan.traffic.wire_bytes(),
        "padding": plan.overhead,
        "fits": fits,
        "units": [_unit(unit, mesh.names) for unit in plan.units],
        "warnings": plan.warnings(),
    }


def _unit(unit: UnitPlan, axes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "paths": unit.paths,
        "parameters": unit.numel,
        "strategy": unit.kind.strategy.name,
        "granularity": unit.kind.granularity,
        "align": unit.kind.align,
        "recompute": unit.kind.recompute,
        "padding": unit.overhead,
        "at_rest": _at_rest(unit.at_rest),
        "traffic": _traffic(Traffic(unit.calls), axes),
    }


def _at_rest(rest: AtRest) -> dict[str, int]:
    return {**rest.by_kind(), "total": rest.total}


def _traffic(traffic: Traffic, axes: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "axis": axis,
            "calls": traffic.count(kind, axis),
            "bytes": traffic.nbytes(kind, axis),
            "wire_bytes": traffic.wire_bytes(kind, axis),
        }
        for kind in KINDS
        for axis in axes
        if traffic.count(kind, axis)
    ]
