"""Parameters that say what is gathered of them (FSDP2's extensions) train as with FSDP2 and as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_impl
from bridge.core.formats import CheckpointError
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.extended import Bytes, Halved
from tests.support.torch_impl.toy import whole
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.runtime.weights.extension import zeros_on


class Rounded(torch.autograd.Function):
    """What computing with bfloat16 copies of float32 weights is, in one process."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Layer(nn.Module):
    """``rounds``: the weight is plain here and used as if it were gathered in bfloat16."""

    def __init__(self, inputs: int, outputs: int, rounds: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Rounded.apply(self.inner.weight) if self.rounds else self.inner.weight
        return torch.tanh(F.linear(x, weight, self.inner.bias))


def model_of(variant: str, seed: int = 0, device: str = "cpu") -> nn.Sequential:
    """Rows of 7 and 3: uneven on two, three and four ranks, and none for the last of four."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with torch.device(device):
            model = nn.Sequential(Layer(5, 7, variant == "plain"), Layer(7, 3, variant == "plain"))
    if variant == "halved":
        for layer in model:
            layer.inner.weight = nn.Parameter(Halved(layer.inner.weight.detach()))
    return model


def sharded(variant: str, shard: Callable[..., Any], **options: Any) -> nn.Sequential:
    model = model_of(variant)
    for layer in model:
        shard(layer, **options)
    shard(model, **options)
    return model


def rows(step: int) -> torch.Tensor:
    """Two for each of four ranks."""
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def trained(
    model: nn.Module, x: Callable[[int], torch.Tensor], steps: int = 3, build: Any = None
) -> list[float]:
    build = build or (lambda params: torch.optim.AdamW(params, lr=0.02))
    optimizer = build(model.parameters())
    losses = []
    for step in range(steps):
        loss = (model(x(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.item())
    return losses


def own(step: int) -> torch.Tensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    return rows(step)[: 2 * world][2 * rank : 2 * rank + 2]


def everyone(step: int) -> torch.Tensor:
    return rows(step)[: 2 * dist.get_world_size()]


def values_of(param: torch.Tensor) -> torch.Tensor:
    values = whole(param)
    return values.values if isinstance(values, Halved) else values


def assert_trained_alike(model: nn.Module, reference: nn.Module) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            values_of(param), reference.get_parameter(name).detach(), rtol=2e-4, atol=2e-6
        )


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world")
def test_weights_gathered_by_their_own_say_train_as_with_fsdp2() -> None:
    reference = model_of("plain")
    trained(reference, everyone)
    frees: list[bool | None] = [True, False, None]
    for reshard in frees:
        Halved.calls.clear()
        model = sharded("halved", torch_impl.fully_shard, reshard_after_forward=reshard)
        weight = model[0].inner.weight
        assert type(weight) is RowDTensor
        assert type(weight.to_local()) is Halved
        losses = trained(model, own)
        # Two layers, and a second gather in backward where they were freed.
        gathers = 2 * 3 * (1 if reshard is False else 2)
        assert Halved.calls == {"pre": gathers, "post": 2, "post again": gathers - 2}
        assert_trained_alike(model, reference)
        assert type(local_of(weight)) is Halved
        memory = [tensor for group in model[0]._unit.groups for tensor in group.weights.compute_tensors]
        assert sum(tensor.untyped_storage().nbytes() for tensor in memory) == 0
        # FSDP2 computes another gradient of uneven rows that were freed.
        theirs = sharded("halved", fsdp.fully_shard, reshard_after_forward=False)
        torch.testing.assert_close(losses, trained(theirs, own))
    for strategy in ("optim", "optim_grads"):
        model = sharded("halved", torch_impl.fully_shard, strategy=strategy)
        trained(model, own)
        assert_trained_alike(model, reference)


@contextmanager
def unpadded() -> Iterator[None]:
    """For rank processes, which serve other tests."""
    Halved.pads = False
    try:
        yield
    finally:
        Halved.pads = True


@on_ranks(4)
def test_rows_that_the_class_does_not_pad_are_padded() -> None:
    reference = model_of("plain")
    trained(reference, everyone)
    with unpadded():
        model = sharded("halved", torch_impl.fully_shard)
        trained(model, own)
    assert_trained_alike(model, reference)


@on_ranks(4)
def test_programs_of_all_kinds_use_such_weights() -> None:
    """Meta device, microbatches, two axes, CPU offload, optimizers of this package, evaluation first."""
    reference = model_of("plain")
    trained(reference, everyone)

    model = model_of("halved", device="meta")
    for layer in model:
        torch_impl.fully_shard(layer)
    torch_impl.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model.to_empty(device="cpu")
    assert type(local_of(model[0].inner.weight)) is Halved
    for param in model.parameters():
        nn.init.trunc_normal_(param)
    plain = model_of("plain")
    assert not torch.equal(values_of(model[0].inner.weight), plain[0].inner.weight)
    model.load_state_dict({name: value.detach() for name, value in plain.state_dict().items()})
    trained(model, own, build=lambda _: optimizer)
    assert_trained_alike(model, reference)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
    for options in ({"mesh": mesh}, {"offload_policy": fsdp.CPUOffloadPolicy()}, {"prefetch": 0}):
        model = sharded("halved", torch_impl.fully_shard, **options)
        with torch.inference_mode():
            model(own(0))
        trained(model, own)
        assert_trained_alike(model, reference)

    for build, plain_build in (
        (
            lambda params: torch_impl.MainWeightAdamW(params, lr=0.02),
            lambda params: torch.optim.AdamW(params, lr=0.02),
        ),
        (
            lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
            lambda params: torch.optim.AdamW(params, lr=0.02),
        ),
        (
            lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, foreach=True),
            lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        ),
    ):
        plain, model = model_of("plain"), sharded("halved", torch_impl.fully_shard)
        trained(plain, everyone, build=plain_build)
        trained(model, own, build=build)
        assert_trained_alike(model, plain)

    model = sharded("halved", torch_impl.fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        for microbatch in range(2):
            model.set_is_last_backward(microbatch == 1)
            ((model(own(step)[microbatch : microbatch + 1]) - 1).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(model, reference)
    assert torch_impl.memory_overlaps(model, optimizer) == ()
    assert torch_impl.find_nonfinite(model) == ()
    report = model.memory_report(optimizer)
    held = [local_of(param) for param in model.parameters()]
    assert report.main_weights - report.padding == sum(4 * part.numel() for part in held)


@on_ranks(2)
def test_backwards_through_older_weights_raise() -> None:
    """A backward through older weights raises, also where the class hides its writes; unchanged ones may come again."""
    model = sharded("halved", torch_impl.fully_shard, reshard_after_forward=False)
    x = own(0).requires_grad_()
    loss = model(x).square().mean()
    model.reshard()
    for layer in model:
        layer.reshard()
    loss.backward()
    loss = model(x).square().mean()
    with torch.no_grad():
        for param in model.parameters():
            local_of(param).values.mul_(2) if isinstance(local_of(param), Halved) else param.mul_(2)
    model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Adapted(nn.Module):
    """A frozen weight in bytes and a trained adapter, as in QLoRA."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = nn.Parameter(Bytes.of(torch.randn(7, 5)), requires_grad=False)
            self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.dequantize()) + self.up(self.down(x))


@on_ranks(2)
def test_frozen_bytes_are_gathered_as_they_are(tmp_path: Path) -> None:
    path = str(tmp_path / "refused")
    plain = Adapted(1)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.02)
    before = plain.base.dequantize().clone()
    for step in range(3):
        (plain(everyone(step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        for step in range(3):
            (model(own(step)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copies", "shard"))
    for options in ({}, {"mesh": mesh}, {"reshard_after_forward": False}):
        model = torch_impl.fully_shard(Adapted(1), **options)
        train(model)
        model.unshard()
        model.reshard()
        with torch_impl.count_collectives() as counts:
            model.unshard()
        # Four rows of each rank, padded: 5 bytes and a float32 scale each.
        (adapter,) = [group for group in model._unit.groups if group.params[0].requires_grad]
        reports = torch_impl.layout_report(model).units[0].groups
        assert counts.nbytes["all_gather"] == sum(group.gather_bytes for group in reports)
        assert [group.gather_dtype for group in reports] == ["fsdp_pre_all_gather", "float32"]
        assert counts.nbytes["all_gather"] == 2 * 4 * (5 + 4) + 4 * adapter.layout.padded_size
        assert torch.equal(model.base.dequantize(), before)
        model.reshard()
        assert type(local_of(model.base)) is Bytes
        for name, param in model.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(
                    whole(param), plain.get_parameter(name).detach(), rtol=2e-4, atol=2e-6
                )
    # Rows of 4 and 3: FSDP2 refuses what does not pad them itself.
    kept = model.state_dict()
    assert type(local_of(kept["base"])) is Bytes
    other = torch_impl.fully_shard(Adapted(2))
    other.load_state_dict(kept)
    other.unshard()
    assert torch.equal(other.base.dequantize(), before)
    with pytest.raises(
        RuntimeError, match=r"a parameter of shape \(7, 5\) is a Bytes, which stores its values in"
    ):
        model.base.full_tensor()
    with pytest.raises(
        CheckpointError, match=r"base: a parameter of shape .* is a Bytes, which stores its values in"
    ):
        torch_impl.save_checkpoint(path, model)


class Coded(Bytes):
    """``payload`` times ``scale``, one number that all parts share, not gathered, as NF4's table of codes is."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Coded:
        return Coded(inner["payload"], inner["scale"])

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return self.payload * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *others = args
        if func is torch.ops.aten.copy_.default:
            first.payload.copy_(others[0].payload)
            return first
        made = func(first.payload, *others, **(kwargs or {}))
        return [cls(part, first.scale) for part in made] if isinstance(made, list) else cls(made, first.scale)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.payload,), self.scale

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return None if out is not None else (Coded(*gathered, metadata), gathered)


class Product(torch.autograd.Function):
    """Saves the weight as it is, as torchao's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        result: torch.Tensor = x @ weight.dequantize().T
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.dequantize(), None


class Quantized(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            codes = torch.randint(-127, 127, (7, 5), dtype=torch.int8)
            self.base = nn.Parameter(Coded(codes, torch.tensor([0.01])), requires_grad=False)
            self.down = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Product.apply(self.down(x), self.base)
        return result


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_class_may_share_tensors_between_shards_and_whole_weights(reshard: bool) -> None:
    """Freeing the whole weight changes no main weight, and what is changed counts."""
    plain = Quantized(1)
    model = nn.Sequential(torch_impl.fully_shard(Quantized(1), reshard_after_forward=reshard))
    torch_impl.fully_shard(model)
    pairs = [(plain, everyone), (model, own)]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m, _ in pairs]
    for step in range(3):
        for (module, batch), optimizer in zip(pairs, optimizers, strict=True):
            (module(batch(step)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            for module, _ in pairs:
                base = module.base if isinstance(module, Quantized) else module[0].base
                local_of(base.data).scale.mul_(2)
    for name, param in plain.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(
                whole(model.get_parameter(f"0.{name}")), param.detach(), rtol=2e-4, atol=2e-6
            )


class Leaving(Bytes):
    """``empty_like`` leaves the scale where it is, as that of torchao's NF4 leaves some of its tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.empty_like.default
        return Leaving(func(args[0].payload, **kwargs), args[0].scale)


def test_all_parts_of_a_class_leave_the_meta_device() -> None:
    on_meta = Leaving(torch.empty(4, 3, dtype=torch.int8, device="meta"), torch.empty(4, device="meta"))
    made = zeros_on(on_meta, torch.device("cpu"))
    assert type(made) is Leaving
    assert torch.equal(made.payload, torch.zeros(4, 3, dtype=torch.int8))
    assert torch.equal(made.scale, torch.zeros(4))


def two_tensors() -> None:
    """Unsharded parameters of the class too, and the first form of the method."""

    def pre(self: Any, mesh: Any) -> Any:
        return (self.a, self.b), None

    def post(self: Any, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        a, b = gathered
        if out is None:
            return TwoTensor(a, b).to(dtype), (a, b)
        if a.dtype != dtype:
            out.a.copy_(a)
            out.b.copy_(b)
        return None

    def build(shard: Callable[..., Any], **options: Any) -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 6, bias=False))
        for layer in model:
            values = layer.weight.detach()
            layer.weight = nn.Parameter(TwoTensor(values, values.clone()))
            shard(layer, **options)
        shard(model, **options)
        return model

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, foreach=True)
        losses = []
        for step in range(3):
            loss = model(own(step)).square().mean()
            assert isinstance(loss, TwoTensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.a.item(), loss.b.item()]
        return losses

    TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = pre, post
    try:
        for reshard in (True, False):
            ours = build(torch_impl.fully_shard, reshard_after_forward=reshard)
            theirs = build(fsdp.fully_shard, reshard_after_forward=reshard)
            torch.testing.assert_close(train(ours), train(theirs), rtol=1e-6, atol=0)
            for mine, stock in zip(ours.parameters(), theirs.parameters(), strict=True):
                a, b = local_of(mine), local_of(stock)
                assert type(a) is type(b) is TwoTensor
                torch.testing.assert_close(a.a, b.a)
                torch.testing.assert_close(a.b, b.b)
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def test_a_class_of_two_tensors_stays_one_in_forward(ranks: RankGroup) -> None:
    ranks.run(2, two_tensors)


@on_ranks(2)
def test_checkpoints_hold_the_values(tmp_path: Path) -> None:
    """A wrapper of its own values is saved and loaded as these."""
    path = str(tmp_path / "checkpoint")
    model = sharded("halved", torch_impl.fully_shard)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.02)
    trained(model, own, build=lambda _: optimizer)
    torch_impl.save_checkpoint(path, model, optimizer)
    again = sharded("halved", torch_impl.fully_shard)
    other = torch_impl.MainWeightAdamW(again.parameters(), lr=0.02)
    torch_impl.load_checkpoint(path, again, other)
    assert type(local_of(again[0].inner.weight)) is Halved
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(values_of(mine), values_of(theirs))
    assert trained(again, own, build=lambda _: other) == trained(model, own, build=lambda _: optimizer)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, x = model_of("plain"), rows(0)[:4]
    layer = model_of("plain")[0].inner
    part = DTensor.from_local(
        Halved(layer.weight.detach()[:6].chunk(2)[mesh.get_local_rank("tp")].clone()), mesh["tp"], [Shard(0)]
    )
    module = nn.Linear(5, 6, bias=False)
    module.weight = nn.Parameter(part)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, module.weight.to_local())

    module.forward = forward  # type: ignore[method-assign]
    torch_impl.fully_shard(module, mesh=mesh["dp"])
    here = mesh.get_local_rank("dp")
    for _ in range(2):
        module(x[2 * here : 2 * here + 2]).square().mean().backward()
    weight = Rounded.apply(reference[0].inner.weight)[:6].chunk(2)[mesh.get_local_rank("tp")]
    (2 * F.linear(x, weight).square().mean()).backward()
    grad = local_of(module.weight.grad)
    at = 3 * mesh.get_local_rank("tp") + 2 * here
    torch.testing.assert_close(grad, reference[0].inner.weight.grad[at : at + len(grad)])


def test_parts_of_tensor_parallel_weights_may_be_of_such_a_class(ranks: RankGroup) -> None:
    ranks.run(4, tensor_parallel)


def stacks() -> None:
    """Three dimensions: slices of dimension 0 stay whole, and a sharded tensor holds rows of a matrix."""

    class Stack(nn.Module):
        def __init__(self, rounds: bool) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(6)
                values = torch.randn(3, 2, 5)
            self.rounds, self.stack = rounds, nn.Parameter(values if rounds else Halved(values))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bi,eoi->beo", x, Rounded.apply(self.stack) if self.rounds else self.stack)

    plain, model = Stack(True), torch_impl.fully_shard(Stack(False))
    assert model.stack.placements[0].bounds == (0, 4, 6)
    trained(plain, everyone)
    trained(model, own)
    assert_trained_alike(model, plain)


def test_stacks_are_cut_between_slices(ranks: RankGroup) -> None:
    ranks.run(2, stacks)


class Fickle(Halved):
    """Rank 1 gathers something else."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (torch.zeros(3 + dist.get_rank()),), None


class Half(torch.Tensor):
    """With one of the two methods."""

    fsdp_pre_all_gather = Halved.fsdp_pre_all_gather


class Third(Halved):
    """Of a signature that is neither."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        return (self.values,), None


class Forgetful(Halved):
    """Its rows are of another class."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return Halved(out.values) if func is torch.ops.aten.new_zeros.default else out


@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name() -> None:
    values = torch.ones(4, 3)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    unnamed = init_device_mesh("cpu", (1, 2))
    policy = torch_impl.MixedPrecisionPolicy
    cases: list[tuple[type[Exception], str, torch.Tensor, dict[str, Any]]] = [
        (ValueError, "weight: .*fsdp_post_all_gather, got a TwoTensor", TwoTensor(values, values), {}),
        (
            ValueError,
            "weight: expected both fsdp_pre_all_gather and fsdp_post_all_gather in a Half",
            Half(values),
            {},
        ),
        (ValueError, r"weight: expected fsdp_pre_all_gather\(mesh\) or .*, got \(mesh", Third(values), {}),
        (ValueError, "weight: expected rows of a Forgetful to be a Forgetful of", Forgetful(values), {}),
        (ValueError, r"weight: expected a Halved with rows, .* got shape \(\)", Halved(torch.ones(())), {}),
        (
            NotImplementedError,
            "weight: strategy 'no_shard' is not available for a Halved",
            Halved(values),
            {"strategy": "no_shard"},
        ),
        (
            NotImplementedError,
            "weight: strategy 'hfsdp' is not available for a Halved",
            Halved(values),
            {"strategy": "hfsdp", "mesh": mesh},
        ),
        (ValueError, "weight: expected a mesh with axis names", Halved(values), {"mesh": unnamed}),
        (
            NotImplementedError,
            "weight: store_param_remainders=True is not available for a Halved",
            Halved(values),
            {
                "strategy": "optim",
                "mp_policy": policy(param_dtype=torch.bfloat16, store_param_remainders=True),
            },
        ),
    ]
    for error, message, tensor, options in cases:
        module = nn.Linear(3, 4, bias=False)
        module.weight = weight = nn.Parameter(tensor)
        with pytest.raises(error, match=message):
            torch_impl.fully_shard(module, **options)
        assert type(module) is nn.Linear
        assert module.weight is weight
    # Known only when it is called: on all ranks together, and by name.
    module = nn.Linear(3, 4, bias=False)
    module.weight = nn.Parameter(Fickle(values))
    torch_impl.fully_shard(module)
    with pytest.raises(
        RuntimeError, match=r"weight: expected .* equal sizes on all ranks, .*\(4,\), 'torch.float32'"
    ):
        module(torch.ones(1, 3))
