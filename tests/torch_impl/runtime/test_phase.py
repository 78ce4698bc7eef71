"""The table of a unit's phases: what it documents is what it allows, and programs walk every row of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import assert_at_rest, seeded
from torch_impl.runtime.ground.phase import LEGAL, TABLE, Event, Phase, transitions_of
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.unit.unit import Unit
from torch_impl.runtime.weights.context import UnitContext

Step = tuple[Event, Phase, Phase]


class Row(NamedTuple):
    text: str
    steps: frozenset[Step]


def documented() -> list[Row]:
    """The rows of the module's table, each with the transitions that it means."""
    parsed = {row.strip(): transitions_of(row) for row in TABLE.strip().splitlines()[1:]}
    return [Row(text, frozenset((event, *pair) for pair in pairs)) for text, (event, pairs) in parsed.items()]


def test_every_event_has_a_row() -> None:
    assert all(LEGAL[event] for event in Event)


def unit_in(phase: Phase) -> Unit:
    """A unit without parameters."""
    context = UnitContext(torch.device("cpu"), prefetch=0)
    context.phase = phase
    return Unit([], context, MixedPrecisionPolicy(), None)


@pytest.mark.parametrize("row", documented(), ids=lambda row: " ".join(row.text.split()[:4]))
def test_each_documented_transition_is_walked(row: Row) -> None:
    for event, source, target in row.steps:
        unit = unit_in(source)
        unit._enter(event, target)
        assert unit.phase is target


def test_every_other_transition_raises_and_leaves_the_phase() -> None:
    illegal = 0
    for event, source, target in itertools.product(Event, Phase, Phase):
        if (source, target) not in LEGAL[event]:
            illegal += 1
            unit = unit_in(source)
            with pytest.raises(RuntimeError, match=f"from {source.name} to {target.name} on {event.name}"):
                unit._enter(event, target)
            assert unit.phase is source
    assert illegal > len(Event) * len(Phase) * 4


class Inner(nn.Module):
    """Computes once, or runs ``program(self, x)`` of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.program: Callable[[Inner, torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        program, self.program = self.program, None
        if program is not None:
            x = program(self, x)
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, call: Callable[[Inner, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.last(call(self.inner, self.first(x))).sum()


def plain(inner: Inner, x: torch.Tensor) -> torch.Tensor:
    return inner(x)


def reentrant(inner: Inner, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(inner, x, use_reentrant=True)


def not_reentrant(inner: Inner, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(inner, x, use_reentrant=False)


def not_followed(inner: Inner, x: torch.Tensor) -> torch.Tensor:
    """A backward runs the unit, which has no part in its graph, and makes no use of the output."""
    x = x * 1

    def hook(_: torch.Tensor) -> None:
        with torch.enable_grad():
            inner(ones())

    x.register_hook(hook)
    return x


def in_backward(
    action: Callable[[Inner], Any], before: bool
) -> Callable[[Inner, torch.Tensor], torch.Tensor]:
    """Run ``action`` in backward, after the unit's own or before it."""

    def call(inner: Inner, x: torch.Tensor) -> torch.Tensor:
        def hook(_: torch.Tensor) -> None:
            with torch.enable_grad():
                action(inner)

        if not before:
            x = x * 1
            x.register_hook(hook)
        y = inner(x)
        if before:
            y = y * 1
            y.register_hook(hook)
        return y

    return call


def while_running(
    action: Callable[[Inner, torch.Tensor], Any],
) -> Callable[[Inner, torch.Tensor], torch.Tensor]:
    """Run ``action`` in the unit's forward."""

    def call(inner: Inner, x: torch.Tensor) -> torch.Tensor:
        def program(this: Inner, x: torch.Tensor) -> torch.Tensor:
            action(this, x)
            return x

        inner.program = program
        return inner(x)

    return call


def ones() -> torch.Tensor:
    return torch.ones(2, 4)


def raises(*_: Any) -> Any:
    raise ValueError("planned")


def recursive_failure(inner: Inner, x: torch.Tensor) -> None:
    """An inner call of the same module raises, and the outer one goes on."""
    inner.program = raises
    with pytest.raises(ValueError, match="planned"):
        inner(x)


def failing_in_backward(inner: Inner) -> None:
    inner.program = raises
    with pytest.raises(ValueError, match="planned"):
        inner(ones())


def gradient_inside(inner: Inner, x: torch.Tensor) -> None:
    inputs = x.detach().requires_grad_()
    torch.autograd.grad(inner(inputs).sum(), inputs)


def recomputed_gradient_inside(inner: Inner) -> None:
    inner.program = lambda this, x: gradient_inside(this, x) or x
    inner(ones())


def failing_gradient_inside(inner: Inner, x: torch.Tensor) -> None:
    inputs = x.detach().requires_grad_()
    middle = inputs * 1
    middle.register_hook(raises)
    with pytest.raises(ValueError, match="planned"):
        torch.autograd.grad(inner(middle).sum(), inputs)
    inner(x)


def without_gradients(inner: Inner) -> None:
    with torch.no_grad():
        inner(ones())


def by_hand(inner: Inner) -> None:
    for _ in range(2):
        inner.unshard()
    inner.state_dict()
    inner.unshard()
    inner.reshard()
    inner.unshard()
    inner(ones())


def kept_after_forward(model: Outer) -> None:
    inner = model.inner
    inner.set_reshard_after_forward(False)
    inner(ones())
    # A backward that reaches a weight, and no output.
    inner.linear.weight.square().sum().backward()
    inner.state_dict()
    inner(ones())
    inner.unshard()
    inner.reshard()
    for _ in range(2):
        inner(ones())
    model(torch.randn(2, 4), lambda _, x: x).backward()
    inner.set_reshard_after_forward(True)
    model.zero_grad()
    assert_at_rest(model)


def walked() -> list[str]:
    """The rows that the inner unit of these programs walks."""
    model = seeded(Outer)
    torch_impl.fully_shard(model.inner)
    torch_impl.fully_shard(model)
    seen: set[Step] = set()
    before_and_after = [
        lambda inner: inner.unshard(),
        lambda inner: inner.reshard(),
        lambda inner: inner.state_dict(),
        without_gradients,
        lambda inner: inner(ones()),
        failing_in_backward,
        recomputed_gradient_inside,
    ]
    programs = [plain, reentrant, not_reentrant, not_followed, lambda inner, x: inner(inner(x))]
    programs += [in_backward(action, before) for action in before_and_after for before in (True, False)]
    running = [
        lambda inner, x: inner(x),
        lambda inner, x: inner.unshard(),
        lambda inner, x: inner.state_dict() and inner.unshard(),
        lambda inner, x: inner.reshard() or inner.unshard(),
        recursive_failure,
        gradient_inside,
        failing_gradient_inside,
    ]
    programs += [while_running(action) for action in running]
    with noted(model.inner, seen):
        by_hand(model.inner)
        for program in programs:
            model(torch.randn(2, 4), program).backward()
            model.zero_grad()
            assert_at_rest(model)
            assert model.inner._unit.phase is Phase.REST
        kept_after_forward(model)
        for program in (in_backward(raises, True), in_backward(raises, False)):
            with pytest.raises(ValueError, match="planned"):
                model(torch.randn(2, 4), program).backward()
            model(torch.randn(2, 4), plain).backward()
        with pytest.raises(ValueError, match="planned"):
            model(torch.randn(2, 4), while_running(raises))
    return [row.text for row in documented() if row.steps & seen]


@contextmanager
def noted(module: nn.Module, seen: set[Step]) -> Iterator[None]:
    unit = module._unit
    enter = unit._enter

    def noting(event: Event, phase: Phase) -> None:
        before = unit.phase
        enter(event, phase)
        seen.add((event, before, phase))

    unit._enter = noting  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        del unit._enter  # type: ignore[attr-defined]  # the instance's own


def test_programs_walk_every_row(ranks: RankGroup) -> None:
    seen = ranks.run(2, walked)[0]
    assert [row.text for row in documented() if row.text not in seen] == []
