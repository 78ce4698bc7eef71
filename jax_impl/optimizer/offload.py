"""``Offload`` chooses the arrays of a train state that are stored in host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax

from bridge.core.sharding.policy.optimizer_state import offloaded
from jax_impl.optimizer.in_turn import key_of
from jax_impl.optimizer.transformation import check_flag
from jax_impl.runtime.groups.memory_kinds import HOST
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Offload:
    """The part of a train state in host memory (``pinned_host``); a step copies it to the device and back.

    moments: the share of the optimizer state, from 0 to 1. The moments of one weight array (a unit; in the pjit engine
        a parameter) are picked together, in the plan's order, so that the picked arrays have this share of all elements
        to within half of the largest array. A stack of layers is one array. Step counts stay on the device.
    main_weights: whether host memory also stores the weights, including frozen ones.
    update: where the optimizer's update is computed. "host": on the host's processor, with all moments, main weights
        and step counts in its memory; a step recognizes this mode by the step counts. Only gradients travel to the
        host, and weights back for the next step, unit by unit (``docs/how-to/offload.md``). The optimizer must
        keep a step count and treat all elements alike; the devices compute a global norm of gradients (clipping).

    Raises ``ValueError`` for a share out of range, for an unknown ``update``, and for ``update="host"`` without
    ``moments=1.0, main_weights=True``; ``TypeError`` for wrong types.
    """

    moments: float = 1.0
    main_weights: bool = False
    update: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        if isinstance(self.moments, bool) or not isinstance(self.moments, int | float):
            raise TypeError(f"Offload: moments: expected a number from 0 to 1, got {self.moments!r}")
        check_flag("main_weights", self.main_weights, "Offload")
        if not 0 <= self.moments <= 1:
            raise ValueError(f"Offload: moments: expected a share from 0 to 1, got {self.moments}")
        if self.update not in ("device", "host"):
            raise ValueError(f"Offload: update: expected 'device' or 'host', got {self.update!r}")
        if self.update == "host" and (self.moments, self.main_weights) != (1, True):
            raise ValueError(
                "Offload: update='host': expected moments=1.0, main_weights=True, because the host updates both, got "
                f"moments={self.moments}, main_weights={self.main_weights}"
            )

    def kinds(self, plan: ShardingPlan, opt_state: Any) -> tuple[dict[str, str], Any]:
        """The kind of memory of each array of the weights and of ``opt_state``; "" is the device's own memory.

        Raises ``ValueError`` if the host should update a state without step counts.
        """
        picked: frozenset[str | None] = offloaded(_sizes(plan, opt_state), self.moments)
        if self.update == "host":
            if all(
                key_of(plan, path, leaf) is not None for path, leaf in jax.tree.leaves_with_path(opt_state)
            ):
                raise ValueError(
                    "Offload: update='host': expected an optimizer with a step count, whose memory tells a step "
                    "where to update: use an optimizer of jax_impl (main_weight_sgd), or wrap yours in "
                    "optax.inject_hyperparams"
                )
            picked |= {None}
        return dict.fromkeys(plan.arrays, HOST if self.main_weights else ""), jax.tree.map_with_path(
            lambda path, leaf: HOST if key_of(plan, path, leaf) in picked else "", opt_state
        )


def _sizes(plan: ShardingPlan, opt_state: Any) -> dict[str, int]:
    """Number of elements of the weight arrays that have moments, in the plan's order."""
    having = {key_of(plan, path, leaf) for path, leaf in jax.tree.leaves_with_path(opt_state)}
    return {key: math.prod(stored.shape) for key, stored in plan.arrays.items() if key in having}
