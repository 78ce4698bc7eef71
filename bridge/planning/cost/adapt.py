"""A policy for another model or machine, and a model with frozen parameters.

A policy may get other layer names and another number of devices in a node.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import replace

from bridge.core.sharding import PolicyError, ShardingPolicy
from bridge.core.text import first_of
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model


def with_units(policy: ShardingPolicy, patterns: Sequence[str]) -> ShardingPolicy:
    """The policy with its one pattern in addition to the root's replaced by ``patterns``; unchanged without patterns.

    Raises ``PlanError`` for a policy with none or several such patterns, and for patterns that a policy cannot have.
    """
    if not patterns:
        return policy
    inner = [unit for unit in policy.units if unit.match]
    if len(inner) != 1:
        listed = ", ".join(repr(unit.match) for unit in inner) or "none"
        raise PlanError(
            f"--units: expected a policy with one [[unit]] in addition to the root's, got {listed} in {policy.source}; "
            "write the patterns into a policy file"
        )
    if "" in patterns:
        raise PlanError("--units: expected patterns such as 'blocks.*', got '': the root is always a unit")
    root = [unit for unit in policy.units if not unit.match]
    try:
        units = [replace(inner[0], match=pattern) for pattern in dict.fromkeys(patterns)]
        return replace(policy, units=(*units, *root))
    except PolicyError as error:
        raise PlanError(f"--units: {error}") from error


def with_node(
    policies: Sequence[ShardingPolicy], node: int | None, counts: Sequence[int]
) -> list[ShardingPolicy]:
    """The policies with the ``node`` devices of a node on their model axes and the inner one of two data-parallel axes.

    Unchanged if ``node`` is None.

    Raises ``PlanError`` if ``node`` does not divide one of ``counts``, if the outer axis is not "all", and if no policy
    has two axes.
    """
    if node is None:
        return list(policies)
    if all(len(policy.data_axes) == 1 for policy in policies):
        raise PlanError("--node: expected a policy with two mesh axes, such as hsdp or hfsdp, got none")
    uneven = [count for count in counts if count % node]
    if uneven:
        raise PlanError(
            f"--node: expected numbers of devices that {node} divides, got {', '.join(map(str, uneven))}"
        )
    return [policy if len(policy.data_axes) == 1 else _with_inner(policy, node) for policy in policies]


def _with_inner(policy: ShardingPolicy, node: int) -> ShardingPolicy:
    (outer, size), (inner, _), *model = policy.axes
    if size != "all":
        raise PlanError(f'--node: expected {outer} = "all" in [mesh] of {policy.source}, got {size!r}')
    # Model axes are innermost: they stay within a node.
    model_devices = math.prod(int(ranks) for _, ranks in model)
    if node % model_devices:
        raise PlanError(
            f"--node: expected a multiple of the {model_devices} devices on model axes of {policy.source}, got {node}"
        )
    return replace(policy, mesh={outer: size, inner: node // model_devices, **dict(model)})


def with_frozen(model: Model, patterns: Sequence[str]) -> Model:
    """The model with frozen parameters, as ``frozen=`` of ``jax_impl`` and ``requires_grad=False`` make them.

    patterns: for whole paths of parameters, with dots or slashes: ``embed.*``, ``*/norm/*``; ``*`` matches both.

    Raises ``PlanError`` for a pattern that matches no parameter, and if no parameter is left to train.
    """
    paths = [parameter.path for parameter in model.parameters]
    frozen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(paths, pattern.replace("/", "."))
        if not matching:
            raise PlanError(
                f"--frozen: expected patterns of parameter paths, but {pattern!r} matches none of "
                f"{first_of(paths)}"
            )
        frozen.update(matching)
    parameters = tuple(
        replace(parameter, trainable=parameter.trainable and parameter.path not in frozen)
        for parameter in model.parameters
    )
    if not any(parameter.trainable for parameter in parameters):
        raise PlanError(f"--frozen: expected some parameters to train, got none left in {model.name}")
    return replace(model, parameters=parameters)
