"""Modules of a user's model cut over model axes by a policy: what each style computes, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import seeded, whole
from torch_impl import ParallelPolicy, PolicyError, PrecisionPolicy, ShardingPolicy, UnitPolicy
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import FusedShard

WORLD = 4
WIDTH = 8
EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Attention(nn.Module):
    """Normalizes queries by head: a weight that is not cut, between modules that are."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qk = nn.Linear(WIDTH, 16)
        self.out = nn.Linear(8, WIDTH)
        self.head_norm = nn.LayerNorm(2)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.qk(self.before(x)).chunk(2, -1)
        heads = self.head_norm(q.unflatten(-1, (-1, 2))) * k.unflatten(-1, (-1, 2)).tanh()
        return x + self.out(self.gain * heads.flatten(-2))


class Experts(nn.Module):
    """Stacked weights, a router that all ranks have, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, 6) * 0.3)
        self.w2 = nn.Parameter(torch.randn(4, 6, WIDTH) * 0.3)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, add: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.router(x).softmax(-1)
        hidden = torch.einsum("bd,edf->bef", x, self.w1).tanh()
        y = torch.einsum("bef,efd,be->bd", hidden, self.w2, weights)
        return y * self.scale + add, weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, padding_idx=7)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.embed(tokens))
        x = x + self.mlp(x)
        x, weights = self.experts(x, add=x)
        return self.head(x) + weights


def net() -> Net:
    return seeded(Net).double()  # type: ignore[return-value]  # a module of that class


def tokens(step: int) -> torch.Tensor:
    """Of all ranks; 7 is the padding."""
    return torch.randint(0, 12, (8,), generator=torch.Generator().manual_seed(step))


def policy(*parallel: ParallelPolicy, units: tuple[str, ...] = (), **mesh: Any) -> ShardingPolicy:
    listed = tuple(UnitPolicy(match) for match in (*units, ""))
    return ShardingPolicy(listed, mesh or {"dp": 2, "tp": 2}, PrecisionPolicy("float64"), parallel=parallel)


CASES: dict[str, tuple[ParallelPolicy, ...]] = {
    "attention": (
        ParallelPolicy(("attention.qk",), "tp", "colwise", fused=(1, 1)),
        ParallelPolicy(("attention.out",), "tp", "rowwise"),
    ),
    "fused output made whole": (ParallelPolicy(("attention.qk",), "tp", "colwise", fused=(1, 1)),),
    "whole input": (ParallelPolicy(("attention.out", "mlp.3"), "tp", "rowwise"),),
    "sequential": (
        ParallelPolicy(("mlp.1",), "tp", "colwise"),
        ParallelPolicy(("mlp.3",), "tp", "rowwise"),
        ParallelPolicy(("head",), "tp", "colwise"),
    ),
    "embedding by columns": (ParallelPolicy(("embed",), "tp", "colwise"),),
    "embedding by rows": (ParallelPolicy(("embed",), "tp", "rowwise"),),
    "parameters": (ParallelPolicy(("experts.w?",), "tp", dimension=0),),
    "a dimension": (ParallelPolicy(("experts",), "tp", dimension=1),),
    "linear on DTensors": (ParallelPolicy(("mlp.1",), "tp", dimension=1),),
    "experts": (ParallelPolicy(("experts",), "ep", "expert"),),
    "two axes": (
        ParallelPolicy(("experts.w?",), "ep", dimension=0),
        ParallelPolicy(("experts.w1",), "tp", dimension=2),
        ParallelPolicy(("experts.w2",), "tp", dimension=1),
        ParallelPolicy(("mlp.1",), "tp", "colwise"),
        ParallelPolicy(("mlp.3",), "tp", "rowwise"),
    ),
}


def trains(name: str, folder: str) -> None:
    entries = CASES[name]
    axes = sorted({entry.axis for entry in entries}, reverse=True)
    mesh = {"dp": WORLD // 2 ** len(axes), **dict.fromkeys(axes, 2)}
    model, reference = net(), net()
    policy(*entries, units=("attention", "mlp"), **mesh).apply(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in (model, reference)]
    replicas = mesh["dp"]
    replica = dist.get_rank() // (WORLD // replicas)
    for step in range(3):
        model(tokens(step).chunk(replicas)[replica]).square().mean().backward()
        reference(tokens(step)).square().mean().backward()
        for (path, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                whole(param.grad), other.grad, msg=lambda m, p=path: f"{p}: {m}", **EXACT
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (path, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                whole(param), other.detach(), msg=lambda m, p=path: f"{p}: {m}", **EXACT
            )
    torch_impl.save_checkpoint(folder, model, optimizers[0])
    plain = net()
    torch_impl.load_checkpoint(folder, plain)
    for param, other in zip(plain.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, **EXACT)
    cuts = {path: sum(map(_cuts, param.placements)) for path, param in model.named_parameters()}
    assert sum(cuts.values()) > 0
    for path, param in model.named_parameters():
        held = torch.tensor(float(local_of(param).numel()))
        dist.all_reduce(held)
        # Rows are cut over data ranks, so each element is held once, but by all ranks of axes that do not cut.
        assert held.item() == param.numel() * WORLD // replicas // 2 ** cuts[path], path


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, Shard | FusedShard)


# The user's einsum of DTensors flattens dimensions of which the second one is cut.
FLATTENS = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13.0a0",
    reason="DTensor before torch 2.13 does not flatten such dimensions",
)


@pytest.mark.fast_cases("attention", "embedding by rows", "linear on DTensors")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FLATTENS if name in ("a dimension", "two axes") else ()) for name in CASES],
)
def test_every_style_trains_as_one_process_and_saves_whole_parameters(
    ranks: RankGroup, tmp_path: Path, name: str
) -> None:
    ranks.run(WORLD, trains, name, str(tmp_path / "saved"))


class Gated(nn.Module):
    """A gate from outside reaches the values between cut modules: its gradient would be a part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.inner = nn.Module()
        self.inner.up = nn.Linear(WIDTH, 6)
        self.inner.down = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.down(self.gate(x) * self.inner.up(x))


def gated() -> str:
    model = Gated().double()
    up, down = (
        ParallelPolicy(("inner.up",), "tp", "colwise"),
        ParallelPolicy(("inner.down",), "tp", "rowwise"),
    )
    policy(up, down).apply(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, WIDTH, dtype=torch.float64))
    return str(caught.value)


def test_a_whole_value_that_would_get_a_part_of_its_gradient_is_refused(ranks: RankGroup) -> None:
    for message in ranks.run(WORLD, gated):
        assert message.startswith(
            "inner.down: expected an input computed from the outputs of colwise modules"
        )


class GatedInside(nn.Module):
    """A gate beside the cut modules; what reaches the gate from outside gets a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 6, bias=False)
        self.gate = nn.Linear(WIDTH, 1)
        self.down = nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x) * self.up(x))


def gated_after_a_cut_module() -> str:
    model = nn.Sequential(GatedInside(), GatedInside()).double()
    # Then the first module has no trained parameter that is whole, by which the fault would show as well.
    model[0].gate.requires_grad_(False)
    up, down = ParallelPolicy(("*.up",), "tp", "colwise"), ParallelPolicy(("*.down",), "tp", "rowwise")
    policy(up, down).apply(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, WIDTH, dtype=torch.float64))
    return str(caught.value)


def test_the_output_of_a_cut_module_that_would_get_a_part_of_its_gradient_is_refused(
    ranks: RankGroup,
) -> None:
    for message in ranks.run(WORLD, gated_after_a_cut_module):
        assert message.startswith("1.down: expected an input computed from the outputs of colwise modules")
        assert "the whole output of another cut module" in message


def gated_twins() -> tuple[GatedInside, GatedInside]:
    """A model that a policy has cut, and one with the same weights that is whole on every rank."""
    model, reference = GatedInside().double(), GatedInside().double()
    reference.load_state_dict(model.state_dict())
    for param in (*model.parameters(), *reference.parameters()):
        dist.broadcast(param.detach(), 0)
    up, down = ParallelPolicy(("up",), "tp", "colwise"), ParallelPolicy(("down",), "tp", "rowwise")
    policy(up, down).apply(model)
    return model, reference


@on_ranks(WORLD)
def test_a_whole_parameter_that_is_unfrozen_later_gets_its_whole_gradient() -> None:
    model, reference = gated_twins()
    rows = torch.arange(8.0 * WIDTH, dtype=torch.float64).view(8, WIDTH).sin()
    for trained in (False, True, True):
        for module, x in (model, rows.chunk(2)[dist.get_rank() // 2]), (reference, rows):
            module.gate.requires_grad_(trained)
            module(x).square().mean().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, **EXACT)


@on_ranks(WORLD)
def test_a_parameter_that_is_added_later_gets_its_whole_gradient() -> None:
    model, reference = gated_twins()
    # The new gate belongs to no unit, as an adapter would, so the ranks of the data axis do not average its gradient.
    model.gate = copy.deepcopy(reference.gate)
    rows = torch.arange(8.0 * WIDTH, dtype=torch.float64).view(8, WIDTH).sin()
    for module, x in (model, rows.chunk(2)[dist.get_rank() // 2]), (reference, rows):
        module(x).square().mean().backward()
    for param, other in zip(model.gate.parameters(), reference.gate.parameters(), strict=True):
        grad = param.grad
        assert grad is not None
        # Both ranks of the model axis have the same gradient: the mean over all ranks is that over the data axis.
        dist.all_reduce(grad)
        torch.testing.assert_close(grad / WORLD, other.grad, **EXACT)


@on_ranks(WORLD)
def test_a_model_cut_by_torch_needs_no_entries() -> None:
    """A model that torch's own tensor parallelism has cut: the policy needs no entries."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = net(), net()
    parallelize_module(model.mlp, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    policy(units=("mlp",)).apply(model, mesh=mesh)
    model(tokens(0).chunk(2)[dist.get_rank() // 2]).square().mean().backward()
    reference(tokens(0)).square().mean().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, **EXACT)


def calls_outside() -> str:
    model = net()
    policy(ParallelPolicy(("head",), "tp", "colwise")).apply(model)
    with pytest.raises(RuntimeError) as caught:
        model.head(torch.zeros(2, WIDTH, dtype=torch.float64))
    assert model(tokens(0)).shape == (8, 4)
    return str(caught.value)


def test_a_cut_module_outside_of_its_unit_says_so(ranks: RankGroup) -> None:
    for message in ranks.run(WORLD, calls_outside):
        assert message.startswith("head: expected whole weights, got sharded ones")


def _tied() -> Net:
    model = net()
    model.head.weight = model.mlp[1].weight = nn.Parameter(torch.zeros(12, WIDTH, dtype=torch.float64))
    return model


def _sparse() -> Net:
    model = net()
    model.embed.sparse = True
    return model


COL, ROW = ("tp", "colwise"), ("tp", "rowwise")
REFUSED: dict[str, tuple[Callable[[], nn.Module], list[ParallelPolicy], str]] = {
    "nothing": (
        net,
        [],
        "[mesh] tp: nothing is cut over 'tp', so that its devices would all do the same work",
    ),
    "no match": (
        net,
        [ParallelPolicy(("heads",), *COL)],
        "modules or parameters that 'heads' matches, got none",
    ),
    "not linear": (
        net,
        [ParallelPolicy(("attention",), *COL)],
        "attention: expected an unmodified nn.Linear or nn.Embedding",
    ),
    "a parameter": (
        net,
        [ParallelPolicy(("head.weight",), *COL)],
        "head.weight: expected the path of a module",
    ),
    "no dimension": (
        net,
        [ParallelPolicy(("experts",), "tp", dimension=3)],
        "experts: expected parameters with",
    ),
    "of a parameter": (
        net,
        [ParallelPolicy(("experts.w1",), "tp", dimension=3)],
        "experts.w1 (4, 8, 6): expected a parameter with dimension 3, to cut it over 'tp', got 3",
    ),
    "scalar": (
        net,
        [ParallelPolicy(("attention",), "tp", "expert")],
        "attention.gain (): expected a parameter with",
    ),
    "uneven": (
        lambda: nn.Sequential(nn.Linear(4, 7)),
        [ParallelPolicy(("0",), *COL)],
        "0.weight (7, 4): expected dimension 0 to be cut over tp = 2 in equal parts, got 7",
    ),
    "twice": (
        net,
        [ParallelPolicy(("head",), "tp", dimension=0), ParallelPolicy(("head.weight",), "tp", dimension=1)],
        "head.weight (4, 8): expected one cut over 'tp', got several",
    ),
    "style and parameter": (
        net,
        [ParallelPolicy(("head",), *COL), ParallelPolicy(("head.weight",), "tp", dimension=1)],
        "head: expected a module that is cut either by a style or by its parameters, got both",
    ),
    "inside": (
        net,
        [ParallelPolicy(("attention",), "tp", dimension=0), ParallelPolicy(("attention.out",), *ROW)],
        "expected modules that are not nested, got 'attention.out' inside 'attention'",
    ),
    "tied": (
        _tied,
        [ParallelPolicy(("head",), *COL)],
        "head.weight: expected a parameter of one module, got one tied",
    ),
    "list": (
        lambda: nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])),
        [ParallelPolicy(("0",), "tp", dimension=0)],
        "0: expected a module with a forward, got ModuleList",
    ),
    "sparse": (_sparse, [ParallelPolicy(("embed",), *ROW)], "embed: expected an embedding without sparse"),
    "fused embedding": (
        net,
        [ParallelPolicy(("embed",), *ROW, fused=(1, 1))],
        "embed: fused: expected a linear",
    ),
    "fused experts": (
        net,
        [ParallelPolicy(("experts.w1",), "tp", dimension=0, fused=(1, 1))],
        "experts.w1: fused: expected a linear module that is cut by style, got Experts",
    ),
}


@on_ranks(WORLD)
def test_what_cannot_be_cut_is_refused_by_name_before_anything_is_changed() -> None:
    for name, (build, entries, message) in REFUSED.items():
        model = build().double()
        with pytest.raises(PolicyError) as caught:
            policy(*entries).apply(model)
        assert message in str(caught.value), name
        assert str(caught.value).startswith("policy: ")
        # As before, so that another policy may follow.
        assert not any(isinstance(module, torch_impl.FSDPModule) for module in model.modules())
        policy(dp=WORLD).apply(model)
    unnamed = init_device_mesh("cpu", (2, 2))
    with pytest.raises(PolicyError, match=r"\[mesh\]: expected a mesh of .*, got shape \(2, 2\), axes None"):
        policy(*CASES["sequential"]).apply(net(), mesh=unnamed)
    with pytest.raises(
        PolicyError, match=r"\[mesh\]: expected axes of 4 devices in all, got dp = 4 x tp = 2"
    ):
        policy(*CASES["sequential"], dp=4, tp=2).apply(net())
