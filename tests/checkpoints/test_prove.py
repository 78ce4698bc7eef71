"""``convert --prove``: right conversions are proven by stock libraries, and twenty wrong ones are not."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from bridge import CheckpointError, ConvertOptions, Selection, convert, prove
from bridge.checkpoints.prove.proof import Proof
from bridge.commands.main import app
from bridge.core.formats import Box, create_checkpoint
from bridge.examples.write import write_example
from tests.support.bridge.torch_layouts import LAYOUTS
from tests.support.bridge.trainings import CHAINS, MAPPING, OptaxTraining, TorchTraining

BY_NAME = {str(chain): chain for chain in CHAINS}
NAMES = {
    "name": "other names",
    "convention": {"mine": {"weights": "model.{w}"}, "yours": {"weights": "model.{w}"}},
    "rule": [
        {"mine": "first.weight : o m", "yours": "a.kernel : m o"},
        {"mine": "first.bias", "yours": "a.bias"},
        {"mine": "last.weight : o m", "yours": "b.kernel : m o"},
        {"mine": "last.bias", "yours": "b.bias"},
    ],
}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def to_optax(folder: Path, chain: str) -> ConvertOptions:
    """A torch training at ``folder/source``, converted to ``folder/result``."""
    side = TorchTraining(BY_NAME[chain], seed=1)
    side.train(0, 3)
    LAYOUTS[0].write(side.model, side.optimizer, folder / "source")
    OptaxTraining(BY_NAME[chain], side.weights()).save(folder / "own")
    convert(folder / "source", folder / "result", mapping=MAPPING, like=folder / "own")
    return ConvertOptions(mapping=MAPPING, like=folder / "own")


def to_torch(folder: Path, chain: str) -> ConvertOptions:
    """The same between two conventions of torch."""
    side = TorchTraining(BY_NAME[chain], seed=1)
    side.train(0, 3)
    LAYOUTS[0].write(side.model, side.optimizer, folder / "source")
    convert(folder / "source", folder / "result", to="dcp", mapping=NAMES, into="yours", from_="mine")
    return ConvertOptions("dcp", NAMES, "yours", "mine")


@pytest.mark.parametrize("chain", ["adamw", "clip, adamw(schedule)", "MultiSteps", "decay of kernels", "sgd"])
def test_a_right_conversion_is_proven(chain: str, tmp_path: Path) -> None:
    proof = prove(tmp_path / "source", tmp_path / "result", to_optax(tmp_path, chain))
    assert proof, proof.summary()
    assert sum(state.weights for state in proof.states) == 4
    assert max(state.largest for state in proof.states) < 1e-12
    assert {library.split()[0] for library in proof.libraries} == {"orbax", "torch"}


@pytest.mark.parametrize("chain", ["adamw", "decay of kernels", "sgd"])
def test_a_right_conversion_between_conventions_of_torch_is_proven(chain: str, tmp_path: Path) -> None:
    proof = prove(tmp_path / "source", tmp_path / "result", to_torch(tmp_path, chain))
    assert proof, proof.summary()
    assert [library.split()[0] for library in proof.libraries] == ["torch"]


def scaled(*keys: Any, by: float) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = tree[keys[-1]] * by

    return change


def _count(by: int) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        tree["opt_state"][0]["count"] = tree["opt_state"][0]["count"] + by

    return change


def _exchanged(tree: Any) -> None:
    state = tree["opt_state"][0]
    state["mu"], state["nu"] = state["nu"], state["mu"]


def _transposed(tree: Any) -> None:
    mu = tree["opt_state"][0]["mu"]["first"]
    mu["kernel"] = mu["kernel"].T.reshape(mu["kernel"].shape)


def _reversed(tree: Any) -> None:
    nu = tree["opt_state"][0]["nu"]["first"]
    nu["bias"] = nu["bias"][::-1]


OPTAX: dict[str, Callable[[Any], None]] = {
    "first moment times 1.001": scaled("opt_state", 0, "mu", "first", "kernel", by=1.001),
    "first moment of a bias times -1": scaled("opt_state", 0, "mu", "last", "bias", by=-1),
    "second moment times 4": scaled("opt_state", 0, "nu", "last", "kernel", by=4),
    "no second moment": scaled("opt_state", 0, "nu", "first", "kernel", by=0),
    "transposed moment": _transposed,
    "reversed moment": _reversed,
    "exchanged moments": _exchanged,
    "count one more": _count(1),
    "count one less": _count(-1),
    "no count": _count(-3),
    "weight times 1.001": scaled("params", "last", "kernel", by=1.001),
}


@pytest.mark.parametrize("wrong", OPTAX)
def test_a_wrong_state_of_optax_is_seen(wrong: str, tmp_path: Path) -> None:
    options = to_optax(tmp_path, "adamw")
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "result")
    OPTAX[wrong](tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "wrong", tree)
    assert_wrong(prove(tmp_path / "source", tmp_path / "wrong", options))


def assert_wrong(proof: Proof) -> None:
    assert not proof
    assert not proof.missing
    assert proof.summary().startswith("the result is wrong by ")


def _of_group(name: str, value: Any, group: int = 0) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        assert f"optimizer.param_groups.{group}.{name}" in state
        state[f"optimizer.param_groups.{group}.{name}"] = value

    return change


def _groups_exchanged(state: dict[str, Any]) -> None:
    first, second = (f"optimizer.param_groups.{group}.params" for group in (0, 1))
    state[first], state[second] = state[second], state[first]


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def changed(state: dict[str, Any]) -> None:
        state[name] = change(state[name])

    return changed


TORCH: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "first beta": ("adamw", _of_group("betas", (0.95, 0.99))),
    "second beta": ("adamw", _of_group("betas", (0.9, 0.999))),
    "epsilon": ("adamw", _of_group("eps", 1e-3)),
    "decay of biases": ("decay of kernels", _of_group("weight_decay", 0.1, group=1)),
    "rate": ("adamw", _of_group("lr", 1e-3)),
    "exchanged groups": ("decay of kernels", _groups_exchanged),
    "momentum": ("sgd", _of_group("momentum", 0.95)),
    "step": ("adamw", _tensor("optimizer.state.a.kernel.step", lambda step: step + 1)),
    "doubled momentum": ("sgd", _tensor("optimizer.state.b.bias.momentum_buffer", lambda buffer: 2 * buffer)),
    "moment of another row": (
        "adamw",
        _tensor("optimizer.state.a.kernel.exp_avg", lambda value: value.roll(1, 0)),
    ),
}


@pytest.mark.parametrize("wrong", TORCH)
def test_a_wrong_state_of_torch_is_seen(wrong: str, tmp_path: Path) -> None:
    chain, change = TORCH[wrong]
    options = to_torch(tmp_path, chain)
    metadata = dcp.FileSystemReader(tmp_path / "result").read_metadata()
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=tmp_path / "result")
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "wrong")
    assert_wrong(prove(tmp_path / "source", tmp_path / "wrong", options))


def test_a_state_that_did_not_arrive_is_missed(tmp_path: Path) -> None:
    options = to_torch(tmp_path, "adamw")
    few = Selection(drop=("optimizer.state.b.bias.*",))
    convert(tmp_path / "result", tmp_path / "wrong", to="dcp", selection=few)
    proof = prove(tmp_path / "source", tmp_path / "wrong", options)
    assert_wrong(proof)
    assert "expected the optimizer's state of last.bias, found none" in proof.summary()


def test_amsgrad_is_another_optimizer(tmp_path: Path) -> None:
    options = to_optax(tmp_path, "adamw")
    side = TorchTraining(CHAINS[0], seed=1)
    side.optimizer = torch.optim.AdamW(side.model.parameters(), lr=1e-2, amsgrad=True)
    side.train(0, 3)
    LAYOUTS[0].write(side.model, side.optimizer, tmp_path / "amsgrad")
    with pytest.raises(CheckpointError, match="which has no equivalent in jax"):
        prove(tmp_path / "amsgrad", tmp_path / "result", options)


def test_another_tree_than_the_templates_is_in_orbaxs_words(tmp_path: Path) -> None:
    options = to_optax(tmp_path, "clip, adamw(schedule)")
    convert(
        tmp_path / "result",
        tmp_path / "small",
        to="orbax",
        selection=Selection(drop=("opt_state/*/2/count",)),
    )
    proof = prove(tmp_path / "source", tmp_path / "small", options)
    assert_wrong(proof)
    assert "the library does not restore it: User-provided restore item" in proof.summary()


def test_without_a_framework_nothing_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = to_optax(tmp_path, "adamw")
    monkeypatch.setitem(sys.modules, "bridge.checkpoints.prove.torch_step", None)
    proof = prove(tmp_path / "source", tmp_path / "result", options)
    assert not proof
    assert proof.summary().startswith("not proven by orbax")
    assert "the step needs a library that is not installed" in proof.summary()


def test_the_command_proves(tmp_path: Path) -> None:
    write_example("convert", tmp_path / "example")
    source = str(tmp_path / "example" / "torch")
    done = CliRunner().invoke(app, ["convert", source, str(tmp_path / "a"), "--into", "maxtext", "--prove"])
    assert done.exit_code == 0, done.output
    assert "proof: proven by orbax" in done.output
    assert "the mapping multiplies weights by 0.5, but not the optimizer's updates" in " ".join(
        done.output.split()
    )
    document = CliRunner().invoke(
        app, ["convert", source, str(tmp_path / "c"), "--into", "flax", "--axis", "d=4", "--prove", "--json"]
    )
    assert json.loads(document.stdout)["proof"]["states"][0]["weights"] == 21
    refused = CliRunner().invoke(app, ["convert", source, str(tmp_path / "b"), "--dry-run", "--prove"])
    assert (refused.exit_code, "--prove needs the whole result" in refused.output) == (2, True)


def test_weights_alone_are_restored(tmp_path: Path) -> None:
    to_optax(tmp_path, "adamw")
    selection = Selection(weights_only=True)
    convert(tmp_path / "source", tmp_path / "a", mapping=MAPPING, selection=selection)
    proof = prove(tmp_path / "source", tmp_path / "a", ConvertOptions(mapping=MAPPING, selection=selection))
    assert proof, proof.summary()
    assert "no optimizer state to take a step from" in proof.summary()
    assert (proof.tensors, proof.states) == (4, ())


def test_rounded_weights_and_moments_are_proven_as_far_as_they_were_rounded(tmp_path: Path) -> None:
    to_torch(tmp_path, "adamw")
    options = ConvertOptions("dcp", NAMES, "yours", "mine", casts=("*kernel*=bfloat16",))
    convert(
        tmp_path / "source",
        tmp_path / "narrow",
        to="dcp",
        mapping=NAMES,
        into="yours",
        from_="mine",
        casts=options.casts,
    )
    proof = prove(tmp_path / "source", tmp_path / "narrow", options)
    assert proof, proof.summary()
    assert 1e-4 < proof.states[0].largest < proof.states[0].tolerance == 2.0**-5


def test_moments_with_scales_are_not_proven(tmp_path: Path) -> None:
    names, rows = ("model.w", "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"), (4, 8)
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        for name in names:
            dtype = np.dtype(np.float32) if name == "model.w" else np.dtype(ml_dtypes.float8_e4m3fn)
            writer.write(writer.add_tensor((name,), rows, dtype).name, Box.whole(rows), np.ones(rows, dtype))
            if name != "model.w":
                scales = writer.add_tensor((f"{name}_scale",), (4, 1), np.dtype(np.float32)).name
                writer.write(scales, Box.whole((4, 1)), np.ones((4, 1), np.float32))
        step = writer.add_tensor(("optimizer.state.w.step",), (), np.dtype(np.float32)).name
        writer.write(step, Box.whole(()), np.ones((), np.float32))
    mapping = {"name": "one weight", "rule": [{"torch": "w : o m", "jax": "w : o m"}]}
    convert(tmp_path / "a", tmp_path / "b", mapping=mapping)
    proof = prove(tmp_path / "a", tmp_path / "b", ConvertOptions(mapping=mapping))
    assert not proof
    assert proof.summary().startswith("not proven by orbax")
    assert "no step was taken from moments with scales" in proof.summary()


@pytest.mark.parametrize(
    "made",
    [
        lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=0.1),
        lambda weights: torch.optim.Adam(weights, lr=1e-2, weight_decay=0.1),
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1),
    ],
    ids=["SGD", "Adam", "AdamW"],
)
def test_weights_decay_on_both_sides_as_in_torchs_optimizer(made: Callable[..., Any], tmp_path: Path) -> None:
    side = TorchTraining(CHAINS[0], seed=1)
    side.optimizer = made(side.model.parameters())
    side.train(0, 3)
    LAYOUTS[0].write(side.model, side.optimizer, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "result", mapping=MAPPING)
    proof = prove(tmp_path / "source", tmp_path / "result", ConvertOptions(mapping=MAPPING))
    assert proof, proof.summary()
    assert proof.states[0].largest < 1e-12


def test_what_was_left_out_is_no_part_of_the_proof(tmp_path: Path) -> None:
    side = TorchTraining(CHAINS[0], seed=1)
    side.train(0, 3)
    side.model.register_buffer("junk", torch.ones(3))
    LAYOUTS[0].write(side.model, side.optimizer, tmp_path / "source")
    selection = Selection(drop=("*junk",))
    convert(tmp_path / "source", tmp_path / "result", mapping=MAPPING, selection=selection)
    options = ConvertOptions(mapping=MAPPING, selection=selection)
    assert prove(tmp_path / "source", tmp_path / "result", options)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_a_pickle_that_runs_code_is_refused_before_torch_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = to_torch(tmp_path, "adamw")
    (tmp_path / "result" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        prove(tmp_path / "source", tmp_path / "result", options)
    assert not (tmp_path / "ran").exists()
