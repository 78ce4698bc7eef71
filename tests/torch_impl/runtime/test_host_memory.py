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
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import Toy, batch, mse, sharded_toy
from torch_impl.comm.streams import CpuStreams, Step
from torch_impl.dtensor.local import local_of
from torch_impl.runtime import schedule

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

CASES = [
    ("optim_grads_params", "sync", HALF),
    ("optim_grads_params", "no_sync", {}),
    ("optim_grads", "last", HALF),
    ("no_shard", "last", {}),
    ("optim", "last", {"mp_policy": torch_impl.MixedPrecisionPolicy(grad_dtype=torch.bfloat16)}),
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


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_two_axes_with_sums_that_wait_on_the_host(ranks: RankGroup, strategy: str) -> None:
    for lanes in ranks.run(4, same_bits, strategy, "last", True, (2, 2), HALF):
        assert ("reduce", "send") in lanes
        # HFSDP keeps its part of the parameters on the device.
        assert (("gather",) in lanes) == (strategy == "hfsdp")


def test_the_twin_for_the_cpu_gives_the_same_bits(ranks: RankGroup) -> None:
    ranks.run(2, same_bits, "optim_grads_params", "last", False, (2,), {})


def kept_apart() -> None:
    model = sharded_toy(strategy="no_shard", **OFFLOAD)
    tokens, targets = batch(0, 1, 1)
    mse(model, tokens, targets).backward()
    for module in (*model.blocks, model):
        (group,) = module._unit.groups
        assert group.compute is not group.main
        homes = {local_of(param).untyped_storage().data_ptr() for param in group.params}
        assert homes == {group.main.flat.untyped_storage().data_ptr()}
        assert group.compute.flat.untyped_storage().data_ptr() not in homes
    # No gather is needed until the weights change, and then one is made.
    with torch.no_grad():
        before = model(tokens.reshape(-1)).clone()
        model.head.bias.add_(1.0)
        after = model(tokens.reshape(-1))
    torch.testing.assert_close(after, before + 1)


def test_weights_on_the_device_are_copies_also_where_nothing_is_sharded(ranks: RankGroup) -> None:
    ranks.run(1, kept_apart)


def from_meta() -> None:
    with torch.device("meta"):
        model = Toy()
    for block in model.blocks:
        torch_impl.fully_shard(block, **OFFLOAD)
    torch_impl.fully_shard(model, **OFFLOAD)
    model.to_empty(device="cpu")
    model.load_state_dict(Toy().state_dict())
    assert trained(model, "sync") == trained(sharded_toy(), "sync")


def test_weights_from_the_meta_device_get_their_memory_on_the_host(ranks: RankGroup) -> None:
    ranks.run(2, from_meta)


def exchanged(folder: str) -> None:
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


def test_checkpoints_are_those_of_no_offload(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, exchanged, str(tmp_path))


def refused() -> None:
    policy = torch_impl.MixedPrecisionPolicy(gather_dtype="mxfp8")
    with pytest.raises(
        NotImplementedError, match=r"CPUOffloadPolicy\(\) with gather_dtype='mxfp8' is not available"
    ):
        sharded_toy(mp_policy=policy, **OFFLOAD)
    model = sharded_toy(**OFFLOAD)
    with pytest.raises(TypeError, match="a sharded parameter stays"):
        model.to("meta")


def test_float8_gathers_and_moves_are_refused(ranks: RankGroup) -> None:
    ranks.run(1, refused)
