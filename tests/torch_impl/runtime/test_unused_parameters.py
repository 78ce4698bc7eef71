"""Parameters of a used unit that take no part in a step: no gradient on any rank, unless some rank used them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_same_weights, counted, seeded, whole

WORLD = 4
# By step and microbatch, the towers that each rank uses.
EVERYONE, NOBODY = ["abc"] * WORLD, ["a"] * WORLD
STEPS: list[list[list[str]]] = [
    [EVERYONE],
    [NOBODY],
    [["a", "a", "a", "ab"]],
    [["ab", "ac", "a", "a"], NOBODY],
    [["a", "b", "b", "b"], NOBODY, ["c", "a", "a", "a"]],
    [EVERYONE, NOBODY],
    [NOBODY, NOBODY],
]
ONE_AXIS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
SHAPES = [((4,), strategy) for strategy in ONE_AXIS] + [
    ((2, 2), strategy) for strategy in ("hsdp", "hfsdp", "no_shard", "optim")
]
MARKS = ["set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce"]


class Towers(nn.Module):
    """Towers a, b, c of uneven shapes; a single element lies on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.scale = nn.ParameterDict({key: nn.Parameter(torch.tensor([0.9])) for key in "abc"})

    def forward(self, x: torch.Tensor, route: str) -> torch.Tensor:
        for key in route:
            x = x + self.scale[key] * torch.tanh(getattr(self, key)(x))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Towers() for _ in range(2))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, route: str) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, route)
        return self.head(x)


def sharded(api: ModuleType | Any = torch_impl, **options: Any) -> Model:
    model = seeded(Model)
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def inputs(step: int, microbatches: int) -> torch.Tensor:
    return torch.randn(microbatches, WORLD, 4, 5, generator=torch.Generator().manual_seed(step))


def expected_step(reference: Model, step: int, microbatches: Sequence[Sequence[str]]) -> None:
    """Gradients of the mean over ranks, None where no rank used a parameter."""
    everyone = inputs(step, len(microbatches))
    for k, routes in enumerate(microbatches):
        for rank, route in enumerate(routes):
            (reference(everyone[k, rank], route).square().mean() / WORLD).backward()


def own_step(model: Model, step: int, microbatches: Sequence[Sequence[str]], mark: str) -> None:
    rank, everyone = dist.get_rank(), inputs(step, len(microbatches))
    for k, routes in enumerate(microbatches):
        getattr(model, mark)(k == len(microbatches) - 1)
        model(everyone[k, rank], routes[rank]).square().mean().backward()


def assert_gradients(model: nn.Module, reference: nn.Module, step: int, tolerance: float = 1e-5) -> None:
    """The reference's, up to a fraction of the largest element of each, and None where the reference has None."""
    expected = {name: param.grad for name, param in reference.named_parameters()}
    for name, param in model.named_parameters():
        want = expected[name]
        assert (param.grad is None) == (want is None), (step, name)
        if want is not None:
            difference = (whole(param.grad) - want).abs().max()
            assert difference <= tolerance * want.abs().max(), (step, name)


def trained(shape: tuple[int, ...], strategy: str, mark: str, main: bool, **options: Any) -> None:
    model, reference = sharded(mesh=mesh_of(shape), strategy=strategy, **options), seeded(Model)
    ours = torch_impl.MainWeightAdamW if main else torch.optim.AdamW
    optimizer = ours(model.parameters(), lr=1e-2, weight_decay=0.3)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.3)
    for step, microbatches in enumerate(STEPS):
        expected_step(reference, step, microbatches)
        own_step(model, step, microbatches, mark)
        assert_gradients(model, reference, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    assert_same_weights(model, reference)


@pytest.mark.fast_cases(
    "shape0-no_shard-set_is_last_backward",
    "shape5-hfsdp-set_requires_gradient_sync",
    "shape1-optim-set_is_last_backward",
)
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("shape", "strategy"), SHAPES)
def test_gradients_are_there_where_any_rank_used_a_parameter(
    ranks: RankGroup, shape: tuple[int, ...], strategy: str, mark: str
) -> None:
    ranks.run(WORLD, trained, shape, strategy, mark, mark == "set_is_last_backward")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
@on_ranks(WORLD)
def test_also_with_main_weights_on_the_host(strategy: str) -> None:
    policy = torch_impl.CPUOffloadPolicy()
    trained((2, 2), strategy, "set_is_last_backward", False, offload_policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "strategy"), [((4,), "optim_grads_params"), ((2, 2), "hsdp"), ((4,), "no_shard")]
)
@on_ranks(WORLD)
def test_flags_survive_low_precision_and_divisors(
    reduce: torch.dtype, shape: tuple[int, ...], strategy: str
) -> None:
    """Gradients that vanish by their divisor still are gradients; those that nobody computed are none."""
    policy = torch_impl.MixedPrecisionPolicy(reduce_dtype=reduce)
    options = {"mesh": mesh_of(shape), "strategy": strategy, "mp_policy": policy}
    model, tiny, reference = sharded(**options), sharded(grad_divisor=1e9, **options), seeded(Model)
    for step, microbatches in enumerate(STEPS):
        expected_step(reference, step, microbatches)
        for module in (model, tiny):
            own_step(module, step, microbatches, "set_is_last_backward")
        assert_gradients(model, reference, step, tolerance=0.02)
        for name, param in tiny.named_parameters():
            assert (param.grad is None) == (reference.get_parameter(name).grad is None), (step, name)
        for module in (model, tiny, reference):
            module.zero_grad()


def noted(calls: list[str], name: str, _: torch.Tensor) -> None:
    calls.append(name)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_weights_and_hooks_are_those_of_fsdp2(set_to_none: bool) -> None:
    """The same program with FSDP2, in which ranks use the same parameters."""
    runs = []
    for api in (fsdp, torch_impl):
        model = sharded(api)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
        steps: list[Any] = []
        calls: list[str] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(functools.partial(noted, calls, name))
        for step, route in enumerate(["abc", "a", "ab", "a"]):
            calls.clear()
            model(inputs(step, 1)[0, dist.get_rank()], route).square().mean().backward()
            hooked = sorted(calls)
            before = {name: param.full_tensor() for name, param in model.named_parameters()}
            missing = [name for name, param in model.named_parameters() if param.grad is None]
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            after = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
            still = [name for name in after if torch.equal(before[name], after[name])]
            steps.append((missing, still, hooked, after))
        runs.append(steps)
    for (missing, still, hooked, after), (our_missing, our_still, our_hooked, ours) in zip(
        *runs, strict=True
    ):
        assert (our_missing, our_still, our_hooked) == (missing, still, hooked)
        for name, value in after.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)
    assert bool(runs[0][1][0]) == bool(runs[0][1][1]) == set_to_none


def collectives_and_bytes(strategy: str, shape: tuple[int, ...]) -> list[dict[str, int]]:
    model, calls = sharded(mesh=mesh_of(shape), strategy=strategy), []
    for microbatches in STEPS[:3]:
        with counted() as counts:
            own_step(model, 0, microbatches, "set_is_last_backward")
        calls.append(dict(counts))
    return calls


@pytest.mark.parametrize(
    ("shape", "strategy"), [((4,), "optim_grads_params"), ((2, 2), "hsdp"), ((4,), "no_shard")]
)
def test_no_collective_is_added(ranks: RankGroup, shape: tuple[int, ...], strategy: str) -> None:
    for all_used, *others in ranks.run(WORLD, collectives_and_bytes, strategy, shape):
        assert others == [all_used] * 2
        assert sum(all_used[collective] for collective in ("reduce_scatter", "all_reduce")) == 3 * len(shape)


class WritesGradient(torch.autograd.Function):
    """Linear whose gradient of the weight a kernel adds to ``main_grad``, without a placeholder."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight, (x,) = ctx.weight, ctx.saved_tensors
        written = grad.t() @ x
        weight.main_grad.copy_(written) if weight.overwrite_main_grad else weight.main_grad.add_(written)
        weight.overwrite_main_grad, weight.grad_added_to_main_grad = False, True
        return grad @ weight, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, route: str) -> torch.Tensor:
        for key in route:
            x = torch.tanh(WritesGradient.apply(x, getattr(self, key)))
        return x


@on_ranks(2)
def test_also_where_kernels_write_gradients() -> None:
    model, reference = torch_impl.fully_shard(seeded(Fused)), seeded(Fused)
    model.set_main_gradients(True)
    everyone = inputs(0, 1)[0]
    for routes in (["b", "b"], ["b", "bc"], ["c", "b"]):
        mine = everyone[dist.get_rank()].clone().requires_grad_(True)
        model(mine, routes[dist.get_rank()]).square().mean().backward()
        for rank, route in enumerate(routes):
            x = everyone[rank]
            for key in route:
                x = torch.tanh(x @ reference.get_parameter(key).t())
            (x.square().mean() / 2).backward()
        assert_gradients(model, reference, 0)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(WORLD)
def test_also_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = seeded(Model)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        for key in "abc":
            parallelize_module(block, mesh["tp"], {key: ColwiseParallel(output_layouts=Replicate())})
        torch_impl.fully_shard(block, mesh=mesh["dp"])
    torch_impl.fully_shard(model, mesh=mesh["dp"])
    everyone, here = inputs(0, 1)[0], mesh.get_coordinate()[0]
    for routes in (["a", "a"], ["ab", "a"]):
        model(everyone[here], routes[here]).square().mean().backward()
        for rank, route in enumerate(routes):
            (reference(everyone[rank], route).square().mean() / 2).backward()
        assert_gradients(model, reference, 0)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
def test_checkpoints_without_moments_of_what_was_never_used(tmp_path: Any) -> None:
    """A parameter that was never used has no moments, and a run goes on from its checkpoint as without a break."""
    path = str(tmp_path / "saved")
    model, again, reference = sharded(), sharded(), seeded(Model)
    optimizers = [torch_impl.MainWeightAdamW(module.parameters(), lr=1e-2) for module in (model, again)]
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step, route in enumerate(["ab", "a", "abc", "c"]):
        if step == 2:
            torch_impl.save_checkpoint(path, model, optimizers[0], {"step": step})
            assert torch_impl.load_checkpoint(path, again, optimizers[1]) == {"step": step}
        for module in (model, again) if step > 1 else (model,):
            module(inputs(step, 1)[0, dist.get_rank()], route).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (reference(inputs(step, 1)[0, rank], route).square().mean() / dist.get_world_size()).backward()
        for opt in (*optimizers, expected):
            opt.step()
            opt.zero_grad()
    for module in (model, again):
        assert_same_weights(module, reference)
