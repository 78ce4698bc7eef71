"""Main weights and gradients in the host's memory: the same bits, whatever the order of copies that the waits allow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import torch_impl
from bridge.core.text import human_bytes
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, batch, local_loss, mse, sharded_toy
from torch_impl.comm.streams import CpuStreams, Step
from torch_impl.dtensor.local import local_of
from torch_impl.runtime.gradients.gradient import GroupGradient
from torch_impl.runtime.unit.memory_report import HostMemory
from torch_impl.runtime.weights import schedule

OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
HALF = {"mp_policy": torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


class LateTransfer:
    """Does nothing before it is finished."""

    only_waits = False

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    def finish(self) -> None:
        for _, step in self._steps:
            step(False)


class LateStreams:
    """Every step as late as the waits allow; ``lanes`` are those of each transfer."""

    lanes: ClassVar[list[tuple[str, ...]]] = []
    copies = False

    def start(self, steps: Sequence[Step]) -> LateTransfer:
        self.lanes.append(tuple(lane for lane, _ in steps))
        return LateTransfer(steps)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


def trained(model: Toy, accumulate: str, steps: int = 3) -> list[float]:
    """Losses of this rank, two microbatches a step, with gradients of the last step left."""
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.05)
    world, rank = dist.get_world_size(), dist.get_rank()
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step != 1)
        tokens, targets = batch(step, world, 2)
        for number in range(2):
            if accumulate == "no_sync":
                model.set_requires_gradient_sync(number == 1)
            elif accumulate == "last":
                model.set_is_last_backward(number == 1)
            loss = mse(model, tokens[rank, number], targets[rank, number])
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses


def mesh_of(shape: tuple[int, ...]) -> dict[str, Any]:
    return {} if len(shape) == 1 else {"mesh": init_device_mesh("cpu", shape)}


def same_bits(
    strategy: str, accumulate: str, late: bool, shape: tuple[int, ...], options: dict[str, Any]
) -> list[tuple[str, ...]]:
    options = {"strategy": strategy, **options, **mesh_of(shape)}
    plain = sharded_toy(**options)
    expected = trained(plain, accumulate)
    LateStreams.lanes.clear()
    schedule.streams_for = lambda device: LateStreams() if late else CpuStreams()  # type: ignore[assignment]
    try:
        model = sharded_toy(**options, **OFFLOAD)
        assert trained(model, accumulate) == expected
    finally:
        schedule.streams_for = streams_for
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_of(param), local_of(want))
        assert param.placements == want.placements
        assert torch.equal(local_of(param.grad), local_of(want.grad))
    return list(LateStreams.lanes)


streams_for = schedule.streams_for


def float8(gather: str) -> dict[str, Any]:
    policy = torch_impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype=gather)
    return {"mp_policy": policy}


CASES = [
    ("optim_grads_params", "sync", HALF),
    ("optim_grads_params", "no_sync", {}),
    ("optim_grads", "last", HALF),
    ("no_shard", "last", {}),
    ("optim", "last", {"mp_policy": torch_impl.MixedPrecisionPolicy(grad_dtype=torch.bfloat16)}),
    ("optim_grads_params", "last", float8("mxfp8")),
    ("optim_grads", "sync", float8("float8_e4m3fn")),
]


@pytest.mark.parametrize(("strategy", "accumulate", "options"), CASES)
def test_weights_gradients_and_losses_are_those_of_no_offload(
    ranks: RankGroup, strategy: str, accumulate: str, options: dict[str, Any]
) -> None:
    for lanes in ranks.run(2, same_bits, strategy, accumulate, True, (2,), options):
        gathers = [each for each in lanes if "gather" in each]
        assert gathers
        assert all(each[0] == "fetch" for each in gathers)
        reductions = [each for each in lanes if "reduce" in each]
        assert reductions
        assert all(each[-1] == "send" for each in reductions)


@pytest.mark.fast_cases("hfsdp")
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_two_axes_with_sums_that_wait_on_the_host(ranks: RankGroup, strategy: str) -> None:
    for lanes in ranks.run(4, same_bits, strategy, "last", True, (2, 2), HALF):
        assert ("reduce", "send") in lanes
        # HFSDP keeps its part of the parameters on the device.
        assert (("gather",) in lanes) == (strategy == "hfsdp")


@pytest.mark.fast_cases("mxfp8")
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
def test_float8_pieces_that_stay_on_the_device(ranks: RankGroup, gather: str) -> None:
    for lanes in ranks.run(4, same_bits, "hfsdp", "last", True, (2, 2), float8(gather)):
        # Gathered and dequantized, with nothing fetched.
        assert ("gather", "gather") in lanes


def test_the_twin_for_the_cpu_gives_the_same_bits(ranks: RankGroup) -> None:
    ranks.run(2, same_bits, "optim_grads_params", "last", False, (2,), {})


@on_ranks(1)
def test_weights_on_the_device_are_copies_also_where_nothing_is_sharded() -> None:
    model = sharded_toy(strategy="no_shard", **OFFLOAD)
    tokens, targets = batch(0, 1, 1)
    mse(model, tokens, targets).backward()
    for module in (*model.blocks, model):
        (group,) = module._unit.groups
        assert group.weights.compute is not group.weights.main
        homes = {local_of(param).untyped_storage().data_ptr() for param in group.params}
        assert homes == {group.weights.main.flat.untyped_storage().data_ptr()}
        assert group.weights.compute.flat.untyped_storage().data_ptr() not in homes
    # No gather is needed until the weights change, and then one is made.
    with torch.no_grad():
        before = model(tokens.reshape(-1)).clone()
        model.head.bias.add_(1.0)
        after = model(tokens.reshape(-1))
    torch.testing.assert_close(after, before + 1)


@on_ranks(2)
def test_a_memory_report_tells_the_host_from_the_device() -> None:
    model = sharded_toy(**HALF, **OFFLOAD)
    plain = sharded_toy(**HALF)
    optimizers = [
        torch_impl.MainWeightAdamW(model.parameters()),
        torch_impl.MainWeightAdamW(plain.parameters(), offload_fraction=1.0),
    ]
    for module, optimizer in zip((model, plain), optimizers, strict=True):
        local_loss(module).backward()
        optimizer.step()
    mine, other = (m.memory_report(o) for m, o in zip((model, plain), optimizers, strict=True))
    groups = [unit.groups[0] for unit in {module._unit for module in (*model.blocks, model)}]
    shards = sum(group.weights.main.flat.numel() for group in groups)
    own = sum(local_of(param).numel() for param in model.parameters())
    # With a flag for each parameter.
    gradients = 4 * (shards + len(list(model.parameters())))
    assert (mine.main_weights, mine.gradients, mine.moments, mine.padding) == (0, 0, 0, 0)
    assert mine.on_host == HostMemory(4 * shards, gradients, 8 * own, 4 * (shards - own))
    assert (mine.compute_weights, mine.total) == (other.compute_weights, other.compute_weights)
    assert (other.main_weights, other.gradients, other.moments) == (4 * shards, gradients, 0)
    assert other.on_host == HostMemory(moments=8 * own)
    assert mine.host == 4 * shards + gradients + 8 * own
    assert f"in host memory      {mine.host:>16,} B" in str(mine)
    device, host = human_bytes(mine.total), human_bytes(mine.host)
    assert repr(mine) == f"<MemoryReport: {device} on this rank's device, and {host} in host memory>"
    assert "in host memory" not in str(plain.memory_report())


def collected_elsewhere(accumulate: str) -> list[int]:
    """How often sums that wait on the host were fetched, and how often they were sent there whole."""
    model = sharded_toy(**OFFLOAD)
    groups = {
        id(module._unit.groups[0].gradient): module._unit.groups[0] for module in (*model.blocks, model)
    }
    counts = [0, 0]

    def homes(gradient: GroupGradient) -> set[int]:
        grads = [param.grad for param in groups[id(gradient)].params]
        return {local_of(grad).untyped_storage().data_ptr() for grad in grads if grad is not None}

    make_buffer, leave = GroupGradient._make_buffer, GroupGradient.leave_unreduced

    def noted_make_buffer(gradient: GroupGradient, keeps: bool) -> None:
        before = homes(gradient)
        make_buffer(gradient, keeps)
        assert gradient._whole.untyped_storage().data_ptr() not in before
        counts[0] += bool(before)

    def noted_leave(gradient: GroupGradient) -> None:
        whole = gradient._whole
        leave(gradient)
        if whole is None:
            return
        assert whole.untyped_storage().data_ptr() not in homes(gradient)
        counts[1] += 1

    GroupGradient._make_buffer, GroupGradient.leave_unreduced = noted_make_buffer, noted_leave
    try:
        trained(model, accumulate, steps=1)
    finally:
        GroupGradient._make_buffer, GroupGradient.leave_unreduced = make_buffer, leave
    return counts


def test_gradients_are_collected_on_the_device_and_wait_on_the_host(ranks: RankGroup) -> None:
    assert ranks.run(2, collected_elsewhere, "no_sync") == [[3, 3], [3, 3]]


@on_ranks(2)
def test_weights_from_the_meta_device_get_their_memory_on_the_host() -> None:
    with torch.device("meta"):
        model = Toy()
    for block in model.blocks:
        torch_impl.fully_shard(block, **OFFLOAD)
    torch_impl.fully_shard(model, **OFFLOAD)
    model.to_empty(device="cpu")
    model.load_state_dict(Toy().state_dict())
    assert trained(model, "sync") == trained(sharded_toy(), "sync")


@on_ranks(2)
def test_checkpoints_are_those_of_no_offload(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name, first, second in (("in", OFFLOAD, {}), ("out", {}, OFFLOAD)):
        model = sharded_toy(**first)
        trained(model, "sync")
        optimizer = torch_impl.MainWeightAdamW(model.parameters())
        torch_impl.save_checkpoint(f"{folder}/{name}", model, optimizer)
        other = Toy(seed=5)
        for block in other.blocks:
            torch_impl.fully_shard(block, **second)
        torch_impl.fully_shard(other, **second)
        restored = torch_impl.MainWeightAdamW(other.parameters())
        torch_impl.load_checkpoint(f"{folder}/{name}", other, restored)
        assert trained(other, "last") == trained(model, "last")


@on_ranks(1)
def test_moves_are_refused() -> None:
    model = sharded_toy(**OFFLOAD)
    with pytest.raises(TypeError, match="a sharded parameter stays"):
        model.to("meta")
