"""A comparison as one JSON document. Fields are added in later versions, never changed or taken away.

format        "twinshard.plan", version 1
model, parameters, source      name, number of elements, where shapes and activation formulas come from
workload      batch, length (per device and microbatch), microbatches; the first one of several
memory        bytes of a device, or null
reserve       the share of ``memory`` that stays free
usable        bytes of a device without the reserve, or null
optimizer     name, moments (dtypes of the first and second, null for that of the main weights), offload (a share)
frozen        number of elements that are not trained
plans         a list, one for each policy, number of devices, workload and runtime:
  policy, runtime, devices, mesh {axis: size}, prefetch, workload
  attention     "fused" or "plain", which the activations are counted with; null where the model's own code says
  device        the one that ``at_rest`` speaks of: that which holds most
  at_rest       bytes of parameters by kind, "padding", and "total", their sum
  host          bytes of moments in CPU memory, not in ``at_rest``
  peak          "moment", "total", "terms" (bytes), "activations_known"; "lower_bound": whether ``total`` lacks
                something; "upper_bound": whether it counts activations that are not there (model axes, frozen layers);
                "least": bytes that a device needs for sure, those at rest
  traffic       a list by kind and axis: calls, bytes (whole buffers) and wire_bytes (sent by a device) in a step
  model_axes_counted  whether ``traffic`` has what model axes send; true where there are none
  other         all-reduces of the loss alone, not in ``traffic``
  wire_bytes    of all traffic
  padding       as a fraction of the parameters
  fits          whether the peak is within ``usable``; null without ``memory``, and where that is unknown: ``least`` is
                within it, and the total lacks something or is not
  units         a list of kinds of units: paths, parameters (elements of one; of cut parameters of one part), strategy,
                granularity, align, recompute, padding, at_rest (bytes of one) and traffic (of one), as above
  warnings      for people
cheapest      a list, for each number of devices and workload: devices, workload, policy (null when none is known to
              fit), unknown (policies of which that is not known); empty without ``memory``
refused       why policies were left out on numbers of devices

The command adds:

compiled      of --compile, a list: policy, devices, lines (what, planned, compiled, agrees)
search        of --search, or null; a list, one for each policy, number of devices and workload:
  policy, devices, workload, fits (null where unknown)
  largest_batch   by runtime: sequences a device and microbatch, 0 where one is too many, null where unknown
  more_may_fit    by runtime: whether more sequences may fit; false where none does
  fewest_devices  by runtime: devices (null where none of those tried is known to be enough), not_below (null, or the
                  fewest of which that is unknown)
  ways            policies with the fewest changes that fit in all runtimes, fewest bytes sent first: changes, peak,
                  wire_bytes, all_counted (whether all that is sent is in wire_bytes), largest_batch, policy (TOML)
  nearest         where nothing is known to fit: changes, peak, lower_bound, upper_bound, policy, fewest_devices of the
                  lowest peak; or null
  file            the policy file to use: as given where that fits, else the first of ``ways``; or null
targets       of --target, or null:
  rows          a list, one for each policy, target and engine:
    policy, target, engine, devices, mesh, device_memory, reserve (a share of it), fits (null where failed), failed
    peak          bytes of one device; a lower bound with "exhausted"
    temporary     of the program with the highest peak
    held          bytes of one device: weights, moments, gradients, batch, variables
    host          bytes of its moments in CPU memory, not in ``held``
    memory        by program (gradients, update): arguments, outputs, temporary, aliased, beside (alive, but not given
                  to it), peak = arguments + outputs + temporary - aliased + beside
    collectives   a list: program, kind, arrays (dtype, size in elements, full arrays), times in a step, bytes of all
                  times, overlaps (with a matrix product), name of the operation in the program
    seconds, versions, programs (paths of the compiled texts), cached, warnings
    unread        instead of collectives: why the compiled text cannot be read
    time          an estimate: total and its parts products, memory, exposed in seconds; communication (seconds, exposed
                  or not), flops of one device by class, product_peak (seconds at peaks), rate (tokens_per_second, mfu,
                  hfu, dollars of a million tokens; null where tokens are not known); or unknown, with the reason
    exhausted     instead of memory and collectives: the bytes for which the compiler refused the program
  cheapest      a list, for each target: target, policy, engine (both null when nothing fits)
  refused       why policies were left out on targets
"""

from __future__ import annotations

from typing import Any

from bridge.planning.answers.comparison import Comparison
from bridge.planning.cost.at_rest import AtRest
from bridge.planning.cost.cost import Plan, UnitPlan
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
        "frozen": sum(one.numel for one in first.model.parameters if not one.trainable),
        "plans": [_plan(plan, comparison.fits(plan)) for plan in comparison.plans],
        "cheapest": [{**vars(one), "workload": vars(one.workload)} for one in comparison.choices],
        "refused": comparison.refused,
    }


def _plan(plan: Plan, fits: bool | None) -> dict[str, Any]:
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
