"""What is expected of a step whose state lies in the host's memory, on GPUs and TPUs alike."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

from bridge.core.sharding import ShardingPolicy, UnitPolicy
from bridge.planning import Workload, make_plan, resolve_models
from bridge.planning.cost.moments import staged
from bridge.planning.cost.optimizers import Optimizer
from tests.support.compilers.setting import SIZES, Compiled, Setting


def assert_streamed(setting: Setting, compiled: Compiled, tiles: float = 1.0) -> None:
    """``tiles``: how much larger arguments may be for the compiler's tiles."""
    travelling, temporary = compiled.travelling, compiled.temporary
    assert setting.offload is not None
    whole = sum(travelling)
    assert whole <= compiled.host <= tiles * whole
    ins, outs = (
        [transfer for transfer in compiled.transfers if transfer.into == into] for into in (True, False)
    )
    # All of it, asynchronously, once each way.
    for direction in (ins, outs):
        assert sum(transfer.bytes for transfer in direction) >= 0.95 * whole
        assert sum(transfer.bytes for transfer in direction) <= tiles * whole
    # Two keys' moments, and half of one more.
    assert temporary <= 2.5 * max(travelling) + 2**16
    # Nothing overlaps the very first transfers; transfers of both directions overlap each other.
    overlapped = sum(transfer.bytes for transfer in ins if transfer.computes or transfer.against)
    assert overlapped >= 0.6 * whole
    assert sum(transfer.bytes for transfer in ins if transfer.computes) >= 0.3 * whole


def assert_planned(
    setting: Setting, compiled: Compiled, devices: int, folder: Path, tiles: float = 1.0
) -> None:
    """What lies on the device and on the host is what ``twinshard plan`` says."""
    policy = ShardingPolicy((UnitPolicy("layers.*"), UnitPolicy("")))
    sizes = folder / "sizes.toml"
    sizes.write_text(
        "[model]\n" + "".join(f"{key} = {value}\n" for key, value in SIZES[setting.size].items())
    )
    share = Fraction(setting.offload or 0).limit_denominator(1000)
    chosen = Optimizer("adamw", setting.moments, share)
    model = resolve_models(f"decoder:{sizes}", ["jax"])["jax"]
    plan = make_plan(model, policy, devices, "jax", Workload(1, 16), optimizer=chosen)
    rest = plan.at_rest
    assert rest.host == sum(compiled.travelling)
    gradients = rest.main_weights.allocated
    here = rest.main_weights.allocated + rest.moments.allocated + gradients
    # The step count and the loss are arguments, too.
    assert here < compiled.arguments <= tiles * here + 2**12
    assert compiled.temporary <= staged(chosen, plan.placed(), "jax", 0) + gradients + 2**16


def assert_units_travel(compiled: Compiled, plain: Compiled, units: int) -> None:
    """No weights are there at rest, and ``units`` units' shards in the program, beside what it has without offload."""
    shards = [4 * stored.size * stored.layers // math.prod(compiled.shards) for stored in compiled.stored]
    assert sum(shards) <= compiled.host <= 1.01 * sum(shards)
    assert compiled.arguments < 2**12
    assert compiled.temporary <= plain.temporary + units * max(shards)
    assert (units + 2) * max(shards) < sum(shards)


def assert_gradients_leave(compiled: Compiled, plain: Compiled) -> None:
    assert plain.results >= compiled.host
    assert compiled.results < 2**12
