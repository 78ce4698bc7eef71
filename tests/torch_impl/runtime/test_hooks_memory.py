"""All that hooks of the program, and collectives, read of a gradient buffer was written: torch.empty is NaN here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torch_impl
from tests.support.ranks import RankGroup
from torch_impl.comm import collectives


class Model(nn.Module):
    """Sizes that no shard holds evenly, a scalar, and a layer that is used on odd ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.gain
        return self.last(self.rare(x) if rank % 2 else x)


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """New memory is filled with NaN, as torch does for deterministic programs."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def finite_collectives() -> Iterator[list[str]]:
    """What collectives are given that is not finite."""
    nonfinite: list[str] = []
    reduce_scatter, all_reduce, all_gather = (
        collectives.reduce_scatter,
        collectives.all_reduce,
        collectives.all_gather,
    )

    def check(name: str, tensors: list[torch.Tensor]) -> None:
        nonfinite.extend(
            name for tensor in tensors if tensor.is_floating_point() and not tensor.isfinite().all()
        )

    def checked_scatter(shards, values, *args, **kwargs):  # type: ignore[no-untyped-def]
        check("reduce_scatter", values)
        return reduce_scatter(shards, values, *args, **kwargs)

    def checked_reduce(values, *args, **kwargs):  # type: ignore[no-untyped-def]
        check("all_reduce", [values])
        return all_reduce(values, *args, **kwargs)

    def checked_gather(outputs, shards, *args, **kwargs):  # type: ignore[no-untyped-def]
        check("all_gather", shards)
        return all_gather(outputs, shards, *args, **kwargs)

    collectives.reduce_scatter, collectives.all_reduce, collectives.all_gather = (
        checked_scatter,
        checked_reduce,
        checked_gather,
    )
    try:
        yield nonfinite
    finally:
        collectives.reduce_scatter, collectives.all_reduce, collectives.all_gather = (
            reduce_scatter,
            all_reduce,
            all_gather,
        )


def policy(name: str) -> torch_impl.MixedPrecisionPolicy:
    return {
        "float32": torch_impl.MixedPrecisionPolicy(),
        "bfloat16": torch_impl.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16),
        "float16": torch_impl.MixedPrecisionPolicy(reduce_dtype=torch.float16),
        "mxfp8": torch_impl.MixedPrecisionPolicy(gather_dtype="mxfp8"),
        "float8": torch_impl.MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn),
    }[name]


def seen_by_hooks(strategy: str, precision: str, offload: bool, microbatches: int) -> None:
    """A hook that scales by the largest magnitude, as an all-reduce in int8 does, sees gradients and zeros only."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shape = (2, world // 2) if strategy in ("hsdp", "hfsdp") else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    options = {"offload_policy": torch_impl.CPUOffloadPolicy(pin_memory=False)} if offload else {}
    torch.manual_seed(0)
    model, largest = Model(), list[float]()

    def scaling(sums: torch.Tensor) -> None:
        largest.append(sums.abs().max().item())

    with memory_of_nan(), finite_collectives() as nonfinite:
        for module in (model.first, model.last, model):
            torch_impl.fully_shard(
                module, mesh=mesh, strategy=strategy, mp_policy=policy(precision), **options
            )
            module.set_all_reduce_hook(scaling)
        # Some steps, so that memory of the pool is used again.
        for step in range(4):
            for k in range(microbatches):
                model.set_is_last_backward(k == microbatches - 1)
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + 10 * k + rank))
                (1e-3 * model(x, rank).square().mean()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.isfinite()
            model.zero_grad()
    assert not nonfinite, nonfinite
    # Gradients are small: a flag would be 1, the number of ranks or more.
    assert max(largest) < 0.5, largest


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "mxfp8", "float8"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.each_value
def test_hooks_and_collectives_read_what_was_written(
    ranks: RankGroup, strategy: str, precision: str, offload: bool, microbatches: int
) -> None:
    ranks.run(2, seen_by_hooks, strategy, precision, offload, microbatches, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("precision", ["float32", "mxfp8"])
def test_also_over_two_axes(ranks: RankGroup, strategy: str, precision: str) -> None:
    ranks.run(4, seen_by_hooks, strategy, precision, False, 2, timeout=60)


def replicas_that_use_others(logs: bool) -> str:
    """Of two replicas that only a hook knows, one uses a layer. ``logs``: a hook of one rank changes nothing."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "dp"))
    model = torch_impl.fully_shard(Model(), mesh=mesh["dp"])
    if not logs:
        model.set_all_reduce_hook(lambda sums: dist.all_reduce(sums, group=mesh.get_group("replica")))
    elif rank == 0:
        model.set_all_reduce_hook(lambda sums: sums.norm())
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    try:
        model(x, rank // 2).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    # Unused ones have no gradient on any rank of a mesh.
    used = {grad is not None for grad in (model.rare.weight.grad, model.rare.bias.grad)}
    assert used == {rank // 2 == 1}
    if logs or rank // 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return ""


def test_what_only_another_replica_used_is_refused_by_name(ranks: RankGroup) -> None:
    said = ranks.run(4, replicas_that_use_others, False, timeout=60)
    assert any("parameter 'rare." in text and "was used on no rank of this mesh" in text for text in said[:2])
    assert said[2:] == ["", ""]


def test_a_hook_of_one_rank_changes_no_collective(ranks: RankGroup) -> None:
    assert ranks.run(4, replicas_that_use_others, True, timeout=60) == [""] * 4


def hooked(strategy: str, microbatches: int) -> None:
    """Rows of an embedding that do not train, a scaled bias, and two hooks of one weight, by ``register_hook``."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)).double()

    def register(model: nn.Module) -> None:
        table, (first, second) = model[0].weight, model[1:]
        trains = torch.arange(7).remainder(2).double()[:, None].expand(7, 5).contiguous()
        if isinstance(table, DTensor):
            mask = torch.zeros_like(table)
            mask.copy_(trains)
            trains = mask
        table.register_hook(lambda grad: grad * trains)
        first.bias.register_hook(lambda grad: 0.5 * grad)
        second.weight.register_hook(lambda grad: 3 * grad)
        second.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        first.weight.register_hook(lambda grad: None)

    def tokens(rank: int, step: int) -> torch.Tensor:
        return (torch.arange(6) * (3 + rank) + step) % 7

    model, reference = made(), made()
    for layer in model:
        torch_impl.fully_shard(layer, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    for module in (model, reference):
        register(module)
    for step in range(2):
        for k in range(microbatches):
            model.set_is_last_backward(k == microbatches - 1)
            (model(tokens(rank, 5 * step + k)).square().mean() / microbatches).backward()
        losses = [
            reference(tokens(r, 5 * step + k)).square().mean()
            for r in range(world)
            for k in range(microbatches)
        ]
        (torch.stack(losses).sum() / len(losses)).backward()
        for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, rtol=1e-11, atol=1e-13)
        if microbatches > 1 and step == 1:
            model.set_is_last_backward(False)
            with pytest.raises(RuntimeError, match=r"has a hook .* call zero_grad"):
                model(tokens(rank, 0)).sum().backward()
            model.set_is_last_backward(True)
        if microbatches > 1:
            model.zero_grad()
            reference.zero_grad()
    wrong = model[0].weight.register_hook(lambda grad: grad.to_local())
    with pytest.raises((TypeError, ValueError), match=r"expected .* placed like the parameter"):
        model(tokens(rank, 0)).sum().backward()
    wrong.remove()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.pairwise
def test_hooks_of_gradients_are_called_with_the_reduced_ones(
    ranks: RankGroup, strategy: str, microbatches: int
) -> None:
    ranks.run(3, hooked, strategy, 1 if strategy == "optim_grads_params" else microbatches)
