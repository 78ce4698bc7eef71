"""After any backward, and without one, modules are at rest; what comes too late for its weights is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import rank_inputs, seeded, whole
from torch_impl.runtime.ground.autograd import explain_late_backward


@dataclass
class Answer:
    logits: torch.Tensor
    cache: None = None


class Gate(nn.Module):
    """Keeps a loss of its own, which a program may add to its loss, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = nn.Linear(5, 5), nn.Linear(5, 5)
        self.own_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        output = self.linear(hidden)
        self.own_loss = self.linear(torch.sin(hidden)).square().mean()
        return output


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(2))
        self.output = nn.LSTM(5, 3, batch_first=True)
        self.answers = "tensor"

    def forward(self, x: torch.Tensor) -> Any:
        for gate in self.gates:
            x = gate(x)
        logits = self.output(x)[0]
        answers = {"tensor": logits, "dict": {"a": [None, logits]}, "detached": logits.detach()}
        return Answer(logits) if self.answers == "dataclass" else answers[self.answers]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def failing(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return Failing.apply(output)


def sharded(inner: bool = True, **options: Any) -> Gated:
    model = seeded(Gated).double()
    for gate in model.gates if inner else ():
        torch_impl.fully_shard(gate)
    return torch_impl.fully_shard(model, **options)


def thrown_away(model: Gated, x: torch.Tensor) -> None:
    model(x).mean().backward()
    model(2 * x)


def without_gradients(model: Gated, x: torch.Tensor) -> None:
    model(x).mean().backward()
    with torch.no_grad():
        model(2 * x)


def raised_in_forward(model: Gated, x: torch.Tensor) -> None:
    model(x).mean().backward()
    hook = model.gates[1].inner.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()


def raised_in_backward(model: Gated, x: torch.Tensor) -> None:
    model(x).mean().backward()
    # A plain model keeps what was added until the error.
    if isinstance(model, torch_impl.FSDPModule):
        hook = model.gates[0].register_forward_hook(failing)
        with pytest.raises(ArithmeticError):
            model(x).mean().backward()
        hook.remove()


def raised_in_a_backward_of_a_forward(model: Gated, x: torch.Tensor) -> None:
    model(x).mean().backward()

    def differentiate(*_: Any) -> None:
        inputs = x.clone().requires_grad_()
        with pytest.raises(ArithmeticError):
            torch.autograd.grad(model.gates[1](Failing.apply(model.gates[0](inputs))).sum(), inputs)

    hook = model.output.register_forward_hook(differentiate)
    model(x)
    hook.remove()


def differentiated_in_forward(model: Gated, x: torch.Tensor) -> None:
    def penalize(module: nn.Module, args: Any, output: Any) -> Any:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model.gates[0](inputs).square().sum(), inputs, create_graph=True)
        return output[0] + slope.square().mean(), output[1]

    hook = model.output.register_forward_hook(penalize)
    model(x).mean().backward()
    hook.remove()


def kept_loss(model: Gated, x: torch.Tensor) -> None:
    """No backward through the output; weights of the root only, whose unit does not reshard."""
    model(x)
    functional.linear(x, model.output.weight_ih_l0).square().mean().backward()


def added_loss(model: Gated, x: torch.Tensor) -> None:
    (model(x).mean() + sum(gate.own_loss for gate in model.gates)).backward()


def in_answers(container: str) -> Callable[[Gated, torch.Tensor], None]:
    def run(model: Gated, x: torch.Tensor) -> None:
        model.answers = container
        answer = model(x)
        logits = answer.logits if container == "dataclass" else answer["a"][1]
        logits.square().mean().backward()

    return run


def to_some_inputs(model: Gated, x: torch.Tensor) -> None:
    params = list(model.parameters())
    model(x).square().mean().backward(inputs=[params[0], params[-1]])


def by_its_own_parameters(model: Gated, x: torch.Tensor) -> None:
    params = dict(model.named_parameters())
    torch.func.functional_call(model, params, (x,)).square().mean().backward()


PROGRAMS: dict[str, Callable[[Gated, torch.Tensor], None]] = {
    "thrown away": thrown_away,
    "without gradients": without_gradients,
    "raised in forward": raised_in_forward,
    "raised in backward": raised_in_backward,
    "raised in a backward of a forward": raised_in_a_backward_of_a_forward,
    "differentiated in forward": differentiated_in_forward,
    "kept loss": kept_loss,
    "dataclass": in_answers("dataclass"),
    "dict": in_answers("dict"),
    "given inputs": to_some_inputs,
    "functional_call": by_its_own_parameters,
}


def at_rest_after(name: str, options: dict[str, Any]) -> None:
    world, everyone = dist.get_world_size(), [x.double().view(2, 2, 5) for x in rank_inputs()]
    model, reference = sharded(**options), seeded(Gated).double()
    averages = [param.detach().clone() for param in reference.parameters()]
    own_averages = [whole(param) for param in model.parameters()]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, reference)]
    for _ in range(2):
        PROGRAMS[name](model, everyone[dist.get_rank()])
        for x in everyone:
            PROGRAMS[name](reference, x)
        for param in reference.parameters():
            if param.grad is not None:
                param.grad /= world
        assert all(isinstance(param, DTensor) for param in model.parameters())
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 1e-2) for module in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mean, param in zip(own_averages, model.parameters(), strict=True):
            mean.lerp_(whole(param), 0.5)
        for mean, param in zip(averages, reference.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.5)
    for have, want in zip(own_averages, averages, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", PROGRAMS)
def test_clipping_averages_and_optimizers_see_main_weights(ranks: RankGroup, name: str) -> None:
    ranks.run(2, at_rest_after, name, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_with_other_options(ranks: RankGroup, name: str) -> None:
    for options in ({"inner": False}, {"reshard_after_forward": False}, {"strategy": "optim"}):
        ranks.run(2, at_rest_after, name, options)
    ranks.run(4, at_rest_after, name, {})


def refused(run: Callable[[], Any], *words: str) -> None:
    """The words are in the error or in its notes; the model then trains on."""
    with pytest.raises(RuntimeError) as caught:
        run()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for word in words:
        assert word in text, text


@on_ranks(2)
def test_a_backward_that_comes_too_late_is_refused_by_name() -> None:
    x = rank_inputs()[dist.get_rank()].double().view(2, 2, 5)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freed = (
        "modified by an inplace operation",
        "torch_impl: expected a weight",
        "'linear.weight' of unit 'gates.1'",
    )

    # A loss that a unit keeps, whose backward reaches no output of the unit: its weights were freed.
    model(x)
    refused(lambda: model.gates[1].own_loss.backward(), *freed, "set_reshard_after_forward(False)")

    # Weights that a loss read between forward and backward, before the next step of the program.
    hidden = x.clone().requires_grad_()
    model(x)
    early = functional.linear(hidden, model.output.weight_ih_l0).mean()
    model(x).mean().backward()
    refused(early.backward, "torch_impl: expected a weight", "'output.weight_ih_l0' of unit 'root'")

    # The program freed them itself.
    model(x)
    early = functional.linear(hidden, model.output.weight_ih_l0).mean()
    model.reshard()
    refused(early.backward, "torch_impl: expected a weight", "of unit 'root'")

    # Other values than those that the forward has read.
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    model(x)
    refused(loss.backward, "torch_impl: expected a weight")

    # The same errors of tensors that are no weights are torch's alone.
    own = x.clone().requires_grad_()
    square = (doubled := own * 2).square().sum()
    doubled.add_(1)
    with pytest.raises(RuntimeError, match="inplace") as caught:
        square.backward()
    assert not getattr(caught.value, "__notes__", [])
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_gradients_of_parameters_have_no_graph() -> None:
    x = rank_inputs()[dist.get_rank()].double().view(2, 2, 5)
    model = sharded()
    params = list(model.parameters())
    refused(lambda: model(x).mean().backward(create_graph=True), "create_graph=True", "of unit 'root'")
    for options in ({}, {"allow_unused": True}):
        refused(
            lambda options=options: torch.autograd.grad(model(x).mean(), params, **options),
            "backward(inputs=...)",
        )
    # Of a function of the sharded parameters themselves, gradients are had as ever.
    (gradient,) = torch.autograd.grad(params[0].square(), params[:1], torch.ones_like(params[0]))
    torch.testing.assert_close(whole(gradient), 2 * whole(params[0]))
    assert torch.autograd.grad(x.clone().requires_grad_().sum(), params[:1], allow_unused=True) == (None,)

    others = {name: param.detach().clone() for name, param in model.named_parameters()}
    model(x)
    for _ in range(2):
        refused(lambda: torch.func.functional_call(model, others, (x,)), "functional_call takes")
        model.zero_grad()
    model(x).mean().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


class FourByFive:
    """A group of weights of one shape, none of which an operation in place has changed."""

    unit_name = "blocks.0"

    def __init__(self, count: int) -> None:
        self.names = [f"w{number}" for number in range(count)]

    def whole_weights(self) -> Any:
        return [(name, torch.zeros(4, 5)) for name in self.names]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, "'w0' of unit 'blocks.0', but"),
        (4, "'w2' of unit 'blocks.0' or 'w3' of unit 'blocks.0', but"),
        (5, "'w3' of unit 'blocks.0' or 1 more of this shape, but"),
        (7, "'w3' of unit 'blocks.0' or 3 more of this shape, but"),
    ],
)
def test_four_weights_are_named_and_the_others_of_their_shape_counted(count: int, names: str) -> None:
    error = RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "[torch.FloatTensor [5, 4]], which is output 0 of TBackward0, is at version 0; expected version 1"
    )
    group: Any = FourByFive(count)
    explain_late_backward(error, [group], to_parameters=False)
    (note,) = error.__notes__
    assert names in note
    assert f"'w{min(count, 4)}'" not in note
