"""Values of DCP and torch.save that are no plain data: read where they stand for one, else told together.

No selection leaves weights out because they cannot be read, and what messages advise is tried.
"""

from __future__ import annotations

import argparse
import io
import shlex
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Any]


class Weights(dict[str, Any]):
    """A mapping of tensors of a class that is not known here."""


class Quantized:
    """An object with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.payload = {"data": [tensor]}


class Codes(torch.Tensor):
    """A subclass of tensors."""


class Tensors(list[Any]):
    """A list of tensors of a class that is not known here."""


def save_torch(state: State, path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_dcp(state: State, path: Path) -> Path:
    dcp.save(state, checkpoint_id=path)
    return path


SAVES = {"torch": save_torch, "dcp": save_dcp}
HIDDEN: dict[str, Callable[[], Any]] = {
    "a tensor of another class": lambda: torch.ones(3).as_subclass(Codes),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "an object with a tensor": lambda: Quantized(torch.ones(3)),
    "a mapping of another class": lambda: Weights(w=torch.ones(3)),
    "a list of another class": lambda: Tensors([torch.ones(3)]),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.parametrize("root", ["model", "state_dict", ""])
def test_weights_that_cannot_be_read_are_not_left_out_in_silence(
    tmp_path: Path, case: str, root: str
) -> None:
    weights = {"hidden.weight": HIDDEN[case](), "scale": torch.ones(1)}
    source = save_torch({root: weights, "epoch": 3} if root else {**weights, "epoch": 3}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weights that can be read.*hidden\.weight.*--drop") as caught:
        convert(source, tmp_path / "o", to="dcp", selection=Selection(weights_only=True))
    assert not (tmp_path / "o").exists()
    with pytest.raises(CheckpointError, match=r"hidden\.weight"):
        diff(source, source, selection=Selection(weights_only=True))
    # Neither does the message of a whole conversion advise it, and what it advises works.
    with pytest.raises(CheckpointError) as whole:
        convert(source, tmp_path / "o", to="dcp")
    assert "--weights-only" not in str(whole.value)
    for error, more in ((caught, True), (whole, False)):
        options = str(error.value).partition("(--drop ")[2].partition(")")[0].split(" --drop ")
        drop = tuple(text for option in options for text in shlex.split(option))
        out = tmp_path / f"o{more}"
        convert(source, out, to="dcp", selection=Selection(drop=drop, weights_only=more))
        with open_checkpoint(out) as reader:
            assert [*reader.tensors] == [f"{root}.scale" if root else "scale"]


def test_tensors_in_a_tuple_of_dcp_are_weights_too(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "pair": (torch.ones(3), 1), "table": np.arange(3)}}
    save_dcp(state, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'model\.pair' .*'model\.table' \(an array of NumPy\)"):
        convert(tmp_path / "a", tmp_path / "o", selection=Selection(weights_only=True))


@pytest.mark.parametrize("format", SAVES)
def test_values_without_tensors_are_still_left_out_by_weights_only(tmp_path: Path, format: str) -> None:
    state = {"w": torch.ones(2), "args": argparse.Namespace(lr=1.0), "seen": {1, 2}, "raw": io.BytesIO(b"x")}
    source = SAVES[format](state, tmp_path / "a")
    with pytest.raises(CheckpointError, match="--weights-only"):
        convert(source, tmp_path / "o", to="dcp")
    convert(source, tmp_path / "o", to="safetensors", selection=Selection(weights_only=True))
    with open_checkpoint(tmp_path / "o") as reader:
        assert ([*reader.tensors], [*reader.objects]) == (["w"], [])


@pytest.mark.parametrize("format", SAVES)
def test_values_that_cannot_be_read_are_told_together_with_advice_that_works(
    tmp_path: Path, format: str
) -> None:
    odd = {
        "args": argparse.Namespace(lr=1.0),
        "seen": {1, 2},
        "frozen": frozenset({1}),
        "a b[0]*": Path("x"),
        "it's": io.BytesIO(b"x"),
        "date": complex(1, 2),
        "slice": slice(3),
    }
    source = SAVES[format]({"model": {"w": torch.ones(2)}, "step": 3, **odd}, tmp_path / "a")
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "o"), "--to", "orbax"])
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert f"found {len(odd)} that cannot" in message
    assert "(a set)" in message
    assert "and 2 more" in message
    advice = shlex.split(message.partition("is not needed (")[2].partition("), or")[0])
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "o"), "--to", "orbax", *advice])
    assert result.exit_code == 0, result.output
    with open_checkpoint(tmp_path / "o") as reader:
        assert dict(reader.objects) == {"step": 3}
    # The other way out.
    convert(source, tmp_path / "o2", to="orbax", selection=Selection(weights_only=True))


@pytest.mark.parametrize("format", SAVES)
def test_values_that_stand_for_plain_data_are_read(tmp_path: Path, format: str) -> None:
    values = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "nested": {"lr": np.float64(0.1), "size": torch.Size([1]), "n": np.int32(7), "b": np.bool_(True)},
        "ordered": OrderedDict([("x", 1), ("y", [np.float32(0.5), ml_dtypes.bfloat16(1.5)])]),
    }
    # As one value each: DCP and torch.save go into mappings otherwise.
    source = SAVES[format]({"w": torch.ones(2), **{n: (v, "x") for n, v in values.items()}}, tmp_path / "a")
    summary = inspect(source)
    assert not summary.unreadable
    plain = {name: value for name, value in summary.objects.items() if not name.endswith(".1")}
    if format == "dcp":
        assert plain == {
            "size": ((2, 3), "x"),
            "dtype": ("torch.bfloat16", "x"),
            "device": ("cuda:1", "x"),
            "nested": ({"lr": 0.1, "size": (1,), "n": 7, "b": True}, "x"),
            "ordered": ({"x": 1, "y": [0.5, 1.5]}, "x"),
        }
        numbers = plain["nested"][0]  # type: ignore[index]
        assert [type(number) for number in numbers.values()] == [float, tuple, int, bool]
    convert(source, tmp_path / "o", to="orbax")
    assert diff(source, tmp_path / "o").same


def test_one_value_that_cannot_be_read_is_told_with_its_file(tmp_path: Path) -> None:
    source = save_dcp({"w": torch.ones(2), "seen": {1}}, tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp: object 'seen': expected a plain value, found a set; leave"
    ):
        convert(source, tmp_path / "o")
