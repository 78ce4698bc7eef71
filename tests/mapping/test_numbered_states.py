"""Numbers of weights in torch's optimizer states: names only where one assignment is possible, or somebody says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping import MappingError, MappingTable, parse_mapping
from bridge.core.mapping.states.numbered_states import unnamed, with_named_states
from tests.support.bridge.memory_reader import MemoryReader

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def towers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3), "head": nn.Linear(3, 2)})


def rules(net: nn.ModuleDict) -> MappingTable:
    entries = "".join(
        f'[[rule]]\ntorch = "{n}.weight : o m"\njax = "{n}/kernel : m o"\n'
        f'[[rule]]\ntorch = "{n}.bias : o"\njax = "{n}/bias : o"\n'
        for n in net
    )
    return parse_mapping(entries, "towers.toml")


def saved(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    for _ in range(2):
        for weight in net.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def names(path: Path, order: str | None = None) -> set[str]:
    """Those of the weights that states are for; all tensors still have their bytes."""
    with open_checkpoint(path) as reader:
        named = with_named_states(reader, MappingTable("any", ()), order)
        assert {named.read(n).tobytes() for n in named.tensors} == {
            reader.read(n).tobytes() for n in reader.tensors
        }
        states = {n.rpartition(".")[0] for n in named.tensors if n.startswith("optimizer.state.")}
    return {name.removeprefix("optimizer.state.") for name in states}


def assert_right(out: Path, net: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    """Each weight has its own moment."""
    with open_checkpoint(out) as reader:
        for name, layer in net.items():
            moment = optimizer.state[layer.weight]["exp_avg"].numpy()
            assert np.array_equal(reader.read(f"opt_state/mu/{name}/kernel").T, moment)


@pytest.mark.parametrize("in_reverse", [False, True])
def test_where_all_shapes_differ_any_order_is_known(tmp_path: Path, in_reverse: bool) -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(4, 5)})
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW(weights[::-1] if in_reverse else weights)
    path = saved(tmp_path / "a.pt", net, optimizer)
    assert names(path) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    convert(path, tmp_path / "out", mapping=rules(net))
    assert_right(tmp_path / "out", net, optimizer)


def groups(net: nn.ModuleDict) -> list[dict[str, Any]]:
    """Weights that decay and biases that do not, as is usual."""
    weights = [w for w in net.parameters() if w.ndim > 1]
    biases = [w for w in net.parameters() if w.ndim == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def other_tower_first(net: nn.ModuleDict) -> Iterable[nn.Parameter]:
    return itertools.chain(*(net[name].parameters() for name in ("second", "first", "head")))


ORDERS = {
    "model": lambda net: net.parameters(),
    "groups": groups,
    "towers": other_tower_first,
    "frozen": lambda net: [*net["second"].parameters(), *net["head"].parameters()],
}


@pytest.mark.parametrize("order", ORDERS)
def test_equal_shapes_are_refused_with_what_would_decide(tmp_path: Path, order: str) -> None:
    net = towers()
    path = saved(tmp_path / "a.pt", net, torch.optim.AdamW(ORDERS[order](net)))
    assert all(name.isdecimal() for name in names(path))
    with pytest.raises(
        MappingError,
        match=r"numbers its \d weights.*first\.weight, second\.weight have one shape.*--optimizer-order model.*"
        r"--optimizer-order FILE.*named_parameters.*--weights-only",
    ) as error:
        convert(path, tmp_path / "out", mapping=rules(net))
    assert "match no rule" not in str(error.value)
    assert not (tmp_path / "out").exists()
    convert(path, tmp_path / "weights", mapping=rules(net), selection=Selection(weights_only=True))


@pytest.mark.parametrize("order", ["model", "groups"])
def test_the_models_order_is_taken_where_the_caller_says_so(tmp_path: Path, order: str) -> None:
    net = towers()
    optimizer = torch.optim.AdamW(ORDERS[order](net))
    path = saved(tmp_path / "a.pt", net, optimizer)
    convert(path, tmp_path / "out", mapping=rules(net), optimizer_order="model")
    assert_right(tmp_path / "out", net, optimizer)
    same = diff(path, tmp_path / "out", mapping=rules(net), optimizer_order="model")
    assert same.total.max_ulp == 0
    assert not same.missing
    assert not same.extra


def test_a_file_gives_any_order(tmp_path: Path) -> None:
    net = towers()
    optimizer = torch.optim.AdamW(other_tower_first(net))
    path = saved(tmp_path / "a.pt", net, optimizer)
    file = tmp_path / "order.txt"
    lines = [f"{name}.{leaf}" for name in ("second", "first", "head") for leaf in ("weight", "bias")]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")  # as editors on Windows save it
    convert(path, tmp_path / "out", mapping=rules(net), optimizer_order=str(file))
    assert_right(tmp_path / "out", net, optimizer)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["second.weight"], r"expected 6 different names .* got 1 names"),
        (["second.weight"] * 6, r"got 6 names, of which 1 differ"),
        (["x.weight", *"abcde"], r"expected names of weights .* got 'x\.weight'"),
        (
            ["head.weight", "second.bias", "first.weight", "first.bias", "second.weight", "head.bias"],
            r"optimizer\.state\.0 .* is assigned to head\.weight: expected a state of shape \(2, 3\), found \(3, 3\)",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    net = towers()
    path = saved(tmp_path / "a.pt", net, torch.optim.AdamW(net.parameters()))
    (tmp_path / "order.txt").write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message):
        convert(path, tmp_path / "out", mapping=rules(net), optimizer_order=str(tmp_path / "order.txt"))


def test_names_in_the_file_are_taken_in_any_order(tmp_path: Path) -> None:
    net = towers()
    pairs = [(n, w) for n, w in net.named_parameters()][::-1]
    optimizer = torch.optim.AdamW(pairs)
    path = saved(tmp_path / "a.pt", net, optimizer)
    convert(path, tmp_path / "out", mapping=rules(net))
    assert_right(tmp_path / "out", net, optimizer)


def test_a_buffer_of_a_weights_shape_leaves_two_ways(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    assert names(saved(tmp_path / "a.pt", net, torch.optim.AdamW(net.parameters()))) == {"0.weight"}
    net.register_buffer("table", torch.zeros(3, 4))
    assert names(saved(tmp_path / "b.pt", net, torch.optim.AdamW(net.parameters()))) == {"0"}


def test_momentum_alone_tells_shapes_too(tmp_path: Path) -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(3, 2, bias=False)})
    optimizer = torch.optim.SGD(list(net.parameters())[::-1], 0.1, momentum=0.9)
    assert names(saved(tmp_path / "a.pt", net, optimizer)) == {"a.weight", "b.weight"}


TIED = """
[[rule]]
torch = "embed.weight : v m"
jax = "embed/kernel : v m"
[[rule]]
torch = "head.weight : v m"
jax = "head/kernel : m v"
optional = true
tied_to = "embed.weight"
[[rule]]
torch = "a.weight : o m"
jax = "a/kernel : m o"
"""


@pytest.mark.parametrize("root", ["", "module."])
def test_a_tied_head_has_no_number_of_its_own(tmp_path: Path, root: str) -> None:
    layers = {
        "embed": nn.Embedding(7, 4),
        "a": nn.Linear(4, 5, bias=False),
        "head": nn.Linear(4, 7, bias=False),
    }
    net = nn.ModuleDict(layers)
    net["head"].weight = net["embed"].weight
    optimizer = torch.optim.AdamW(net.parameters())
    saved(tmp_path / "a.pt", net, optimizer)
    mapping = parse_mapping(TIED, "tied.toml")

    def named(head: torch.Tensor) -> set[str]:
        model = {root + name: w for name, w in {**net.state_dict(), "head.weight": head}.items()}
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "b.pt")
        with open_checkpoint(tmp_path / "b.pt") as reader:
            named = with_named_states(reader, mapping)
            return {n.removeprefix("optimizer.state.") for n in named.tensors if n.endswith(".exp_avg")}

    weight = net["embed"].weight.detach()
    assert named(weight) == {f"{root}embed.weight.exp_avg", f"{root}a.weight.exp_avg"}
    # Another weight, or one that has a number of its own.
    assert named(weight + 1) == {"0.exp_avg", "1.exp_avg"}
    optimizer = torch.optim.AdamW([*net.parameters(), nn.Parameter(weight.clone())])
    for own in optimizer.param_groups[0]["params"]:
        own.grad = torch.ones_like(own)
    optimizer.step()
    assert named(weight) == {"0.exp_avg", "1.exp_avg", "2.exp_avg"}


def test_a_file_names_the_weights_of_several_optimizers(tmp_path: Path) -> None:
    net = towers()
    first = torch.optim.AdamW([*net["second"].parameters(), *net["head"].parameters()])
    second = torch.optim.AdamW(net["first"].parameters())
    saved(tmp_path / "a.pt", net, first)
    saved(tmp_path / "a.pt", net, second)
    both = {"model": net.state_dict(), "optimizer": [first.state_dict(), second.state_dict()]}
    torch.save(both, tmp_path / "a.pt")
    lines = [f"{name}.{leaf}" for name in ("second", "head", "first") for leaf in ("weight", "bias")]
    (tmp_path / "order.txt").write_text("\n".join(lines))
    convert(
        tmp_path / "a.pt", tmp_path / "out", mapping=rules(net), optimizer_order=str(tmp_path / "order.txt")
    )
    first.state |= second.state
    assert_right(tmp_path / "out", net, first)


def numbered() -> MemoryReader:
    """Number 1 has no state. The averages have the shapes of the weights."""
    shapes = {"model.first.weight": (3, 3), "model.second.weight": (3, 3), "model.head.weight": (2, 3)}
    shapes |= {"averages.first.weight": (3, 3), "averages.head.weight": (2, 3)}
    shapes |= {
        f"optimizer.state.{n}.{moment}": s for n, s in ((0, (3, 3)), (2, (2, 3))) for moment in ("m", "v")
    }
    params: dict[tuple[str | int, ...], object] = {("optimizer", "param_groups", 0, "params"): [0, 1, 2]}
    return MemoryReader("dcp", {name: np.zeros(shape) for name, shape in shapes.items()}, params)


def test_a_file_names_numbers_without_a_state_too(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("second.weight\nfirst.weight\nhead.weight\n")
    named = with_named_states(numbered(), MappingTable("any", ()), str(order))
    states = [name.removeprefix("optimizer.state.") for name in named.tensors if name.startswith("opt")]
    assert states == ["second.weight.m", "second.weight.v", "head.weight.m", "head.weight.v"]
    assert [*named.objects.values()] == [["second.weight", "first.weight", "head.weight"]]
    order.write_text("second.weight\nsecond.weight\n")
    with pytest.raises(CheckpointError) as refused:
        with_named_states(numbered(), MappingTable("any", ()), str(order))
    assert str(refused.value) == (
        "expected 3 different names for the numbers of optimizer.state in memory, got 2 names, of which 1 differ"
    )


def test_numbers_that_nothing_names_are_told_with_the_weights_of_one_shape() -> None:
    assert unnamed(numbered(), ("optimizer",)) == (
        "optimizer.state of memory numbers its 2 weights, and nothing tells which number belongs to which weight: "
        "first.weight, second.weight have one shape. If the optimizer has all of model.parameters(), or groups that "
        "each follow the model's order, say so (--optimizer-order model). Otherwise give a file with the name of one "
        "weight on each line, in the optimizer's order (--optimizer-order FILE), or save the optimizer with names "
        "(model.named_parameters() in torch 2.6 and later), or leave its state out (--weights-only)"
    )
