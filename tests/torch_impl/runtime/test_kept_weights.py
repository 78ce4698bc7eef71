"""After a forward that does not reshard, modules show plain weights, as with FSDP2: what programs do with them."""

from __future__ import annotations

import copy
import io
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    assert_at_rest,
    assert_same_weights,
    counted,
    rank_inputs,
    seeded,
    whole,
)
from torch_impl.runtime.ground.phase import Phase


class Model(nn.Module):
    """Returns what its output layer would be applied to; makes no use of what the layer ``skip`` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.output = nn.Linear(5, 7, bias=False)

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            x = x if k == skip else y
        return x


def sharded(api: ModuleType | Any = torch_impl, inner: bool | None = None, **options: Any) -> Model:
    """``inner``: whether layers reshard."""
    model = seeded(Model)
    for layer in model.layers:
        api.fully_shard(layer, reshard_after_forward=inner)
    return api.fully_shard(model, **options)


def fused(model: Model, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(model(x), model.output.weight).square().mean()


def in_parts(model: Model, x: torch.Tensor, sync: bool) -> torch.Tensor:
    """A loss whose parts run backward one by one, so that logits are there for one part at a time."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
    for part in leaf.chunk(2):
        (functional.linear(part, model.output.weight).square().mean() / 2).backward()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(True)
    # So that the sum of what each backward computes is the gradient of the loss.
    return (hidden * leaf.grad.detach()).sum()


def shown(model: nn.Module) -> list[str]:
    return [
        name for name, _ in model.named_parameters() if not isinstance(model.get_parameter(name), DTensor)
    ]


def program(api: ModuleType | Any, parts: bool, options: dict[str, Any]) -> list[Any]:
    model = sharded(api, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    names, seen = [name for name, _ in model.named_parameters()], []
    for step in range(3):
        x = rank_inputs()[dist.get_rank()] * (step + 1)
        loss = in_parts(model, x, sync=step != 1) if parts else fused(model, x)
        seen.append(shown(model))
        assert [name for name, _ in model.named_parameters()] == names
        loss.backward()
        seen.append(shown(model))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict()
        seen.append([name for name, value in state.items() if not isinstance(value, DTensor)])
    values = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    return [*seen, values]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"inner": False},
    {"inner": False, "reshard_after_forward": True},
    {"inner": True, "reshard_after_forward": False},
]


def beside_fsdp2(parts: bool, options: dict[str, Any]) -> None:
    (*theirs, weights), (*ours, our_weights) = (program(api, parts, options) for api in (fsdp, torch_impl))
    for their, our in zip(theirs, ours, strict=True):
        assert our == (pytest.approx(their, rel=1e-5) if isinstance(their, float) else their)
    for name, value in weights.items():
        torch.testing.assert_close(our_weights[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [False, True])
def test_a_loss_may_use_the_output_layers_weights_as_with_fsdp2(ranks: RankGroup, parts: bool) -> None:
    for options in OPTIONS:
        # Where the root reshards, its weights are not to be had after its forward, with either.
        if not options.get("reshard_after_forward"):
            ranks.run(2, beside_fsdp2, parts, options)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_gradients_of_shown_weights_alone_are_reduced(strategy: str) -> None:
    """A head that is trained on what a model has computed: no output of the model has a backward."""
    model, reference = sharded(strategy=strategy), seeded(Model)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (model, reference)]
    for step in range(2):
        everyone = [x * (step + 1) for x in rank_inputs()]
        for part in (0, 1):
            hidden = model(everyone[dist.get_rank()] + part).detach()
            functional.linear(hidden, model.output.weight).square().mean().backward()
            for x in everyone:
                loss = (
                    functional.linear(reference(x + part).detach(), reference.output.weight).square().mean()
                )
                (loss / len(everyone)).backward()
        model.reshard()
        assert [name for name, param in model.named_parameters() if param.grad is not None] == [
            "output.weight"
        ]
        torch.testing.assert_close(whole(model.output.weight.grad), reference.output.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, reference)


def registered(api: ModuleType | Any, options: dict[str, Any]) -> list[list[str]]:
    model, x, names = sharded(api, **options), rank_inputs()[dist.get_rank()], []
    for forwards in (1, 2):
        for _ in range(forwards):
            hidden = model(x, skip=1)
        names.append(shown(model))
        # The layer that backward does not reach shows its sharded weights, too.
        hidden.sum().backward()
        names.append(shown(model))
    model(x)
    model.reshard()
    names.append(shown(model))
    return names


def registered_by_both(options: dict[str, Any]) -> list[list[list[str]]]:
    return [registered(api, options) for api in (fsdp, torch_impl)]


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_registered_when_is_as_with_fsdp2(ranks: RankGroup, options: dict[str, Any]) -> None:
    for theirs, ours in ranks.run(2, registered_by_both, options):
        assert ours == theirs


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(3)
def test_fused_losses_train_as_on_one_process(strategy: str) -> None:
    model, reference = sharded(strategy=strategy), seeded(Model)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        everyone = [x * (step + 1) for x in rank_inputs()]
        with counted() as counts:
            fused(model, everyone[dist.get_rank()]).backward()
        for x in everyone:
            (fused(reference, x) / len(everyone)).backward()
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
        assert_at_rest(model)
        if strategy == "optim_grads_params":
            # The root is gathered once, and layers twice.
            assert counts == {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 0}
    assert_same_weights(model, reference)


@on_ranks(2)
def test_what_programs_do_before_the_backward(tmp_path: Any) -> None:
    """What programs do between a forward and its backward, or after a forward without one."""
    path = str(tmp_path / "saved")
    x = rank_inputs()[dist.get_rank()]
    model = sharded(inner=False)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    fused(model, x).backward()
    optimizer.step()
    for set_to_none in (True, False):
        loss = fused(model, x)
        assert shown(model)
        # The sharded parameters hold the gradients of the step before.
        model.zero_grad(set_to_none)
        loss.backward()
        once = {name: whole(param.grad) for name, param in model.named_parameters()}
        model.zero_grad()
        fused(model, x).backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param.grad), once[name])
    model.zero_grad()
    # Weights that change while whole ones are shown are seen by the next forward.
    before = model(x)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(2)
    after = model(x)
    assert not torch.allclose(before, after)
    twice = seeded(Model)
    twice.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    torch.testing.assert_close(after, twice(x))
    # Checkpoints, reports and conversions speak of the sharded parameters.
    for action in (
        lambda: torch_impl.save_checkpoint(path, model, optimizer, {"step": 1}),
        lambda: torch_impl.parameter_norms(model),
        lambda: torch_impl.layout_report(model),
        lambda: model.to("cpu"),
        lambda: torch_impl.find_nonfinite(model),
    ):
        model(x)
        assert shown(model) == [name for name, _ in model.named_parameters()]
        action()
    assert torch_impl.layout_report(model).ignored == ()
    # Whole weights that are shown are not taken for plain ones, which to_empty() would give other memory.
    values = model(x)
    model.to_empty(device="cpu")
    assert shown(model) == []
    torch.testing.assert_close(model(x), values, rtol=0, atol=0)
    model(x)
    with pytest.raises(TypeError, match="a sharded parameter stays"):
        model.half()
    # Frozen as the sharded parameters are, whatever was shown when they were frozen.
    model(x)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.requires_grad_(False)
    assert not model(x).requires_grad
    model.reshard()
    model.requires_grad_(True)
    model.unshard()
    model.layers[0].reshard()
    model(x).sum().backward()
    assert_at_rest(model)


def loaded(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    read: nn.Module = torch.load(stream, weights_only=False)
    return read


def replaced(model: Model, how: str) -> None:
    if how == "assigned":
        model.output.weight = nn.Parameter(torch.zeros(7, 5))
    elif how == "deleted":
        del model.output.weight
    elif how == "weight_norm":
        nn.utils.parametrizations.weight_norm(model.output)
    elif how == "load_state_dict":
        model.output.load_state_dict({"weight": torch.zeros(7, 5)}, assign=True)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_what_reads_a_module_between_forward_and_backward(strategy: str) -> None:
    x = rank_inputs()[dist.get_rank()]
    model = sharded(strategy=strategy)
    loss = fused(model, x)
    for duplicate in (copy.deepcopy, loaded, lambda module: pickle.loads(pickle.dumps(module))):
        made = duplicate(model.output)
        (param,) = made.parameters()
        assert made.weight is param
        assert isinstance(param, DTensor)
        torch.testing.assert_close(whole(param), model.output.weight.detach())
    # What a program gives instead is what the module computes with, and it ends with the call.
    replacements = {"weight": torch.randn(7, 5, requires_grad=True)}
    weight, hidden = model.output.weight, torch.randn(2, 5)
    output = torch.func.functional_call(model.output, replacements, (hidden,))
    torch.testing.assert_close(output, functional.linear(hidden, replacements["weight"]))
    assert model.output.weight is weight
    assert shown(model) == ["output.weight"]
    assert all(isinstance(param, DTensor) for param in model.parameters())
    own = dict(model.output.named_parameters())
    torch.testing.assert_close(
        torch.func.functional_call(model.output, own, (hidden,)), functional.linear(hidden, weight)
    )
    # A program may ask for this rank's gradient of whole weights, as losses that balance their parts do.
    (gradient,) = torch.autograd.grad(loss, model.output.weight, retain_graph=True)
    loss.backward()
    assert_at_rest(model)
    dist.all_reduce(gradient)
    torch.testing.assert_close(whole(model.output.weight.grad), gradient / dist.get_world_size())

    for how in ("assigned", "deleted", "load_state_dict", "weight_norm"):
        model = sharded(strategy=strategy)
        model(x)
        replaced(model, how)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'output\.weight' was replaced"):
            model(x)


class Box:
    """What no search for tensors looks into."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


class Odd(nn.Module):
    """Its outputs have no hook that could tell of their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: torch.Tensor, hidden: bool) -> torch.Tensor | Box:
        return Box(x @ self.weight.t()) if hidden else self.weight


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_weights_that_no_backward_would_hide_are_not_kept(strategy: str) -> None:
    everyone = rank_inputs()
    x = everyone[dist.get_rank()]
    for hidden in (True, False):
        model = torch_impl.fully_shard(seeded(Odd), strategy=strategy, reshard_after_forward=False)
        reference = seeded(Odd)
        output = model(x, hidden)
        # Of weights that a reshard frees the output is a copy, whose backward hides them.
        assert shown(model) == ([] if hidden or strategy == "optim" else ["weight"])
        output = output.content if hidden else output
        output.square().sum().backward()
        assert shown(model) == []
        for rows in everyone:
            of_rank = reference(rows, hidden)
            ((of_rank.content if hidden else of_rank).square().sum() / len(everyone)).backward()
        torch.testing.assert_close(whole(model.weight.grad), reference.weight.grad)

    # A forward in a backward, as that of a second model in a hook, is nobody's to go on with.
    inner, outer = (torch_impl.fully_shard(seeded(Odd), reshard_after_forward=False) for _ in range(2))
    seen: list[list[str]] = []

    def evaluate(_: torch.Tensor) -> None:
        with torch.no_grad():
            inner(x, True)
        seen.append(shown(inner))

    output = outer(x.clone().requires_grad_(), True).content
    output.register_hook(evaluate)
    output.sum().backward()
    assert seen == [[]]


@on_ranks(2)
def test_evaluation() -> None:
    """Without gradients the root reshards by default, and keeps plain weights if it is told not to reshard."""
    x = rank_inputs()[dist.get_rank()]
    for option, kept in ((None, False), (True, False), (False, True)):
        model = sharded(reshard_after_forward=option)
        with torch.no_grad():
            model(x)
        assert shown(model) == (["output.weight"] if kept else [])
        assert model._unit.phase is (Phase.KEPT if kept else Phase.REST)
        loss = model(x).sum()
        loss.backward()
        assert_at_rest(model)
