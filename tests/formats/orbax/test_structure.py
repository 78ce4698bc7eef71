"""A tree comes back from a copy with the structure it had: None, empty containers, lists, Python numbers and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct
from flax.training.train_state import TrainState
from orbax.checkpoint.experimental import v1
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import Box
from tests.support.bridge.orbax_helpers import STOCK_RESTORES, stock_restore_v0, stock_save

THROUGH = (("orbax",), ("dcp", "orbax"), ("safetensors", "orbax"), ("dcp", "safetensors", "dcp", "orbax"))


class EmaState(TrainState):  # type: ignore[no-untyped-call, unused-ignore]  # flax has no types for it, in some versions
    ema: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


@struct.dataclass
class Settings:
    values: Any
    options: Any


def params() -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def train_state() -> EmaState:
    return EmaState.create(apply_fn=None, params=params(), tx=optax.adamw(1e-3))


def trees() -> dict[str, Any]:
    """Arrays, None and empty containers: what StandardCheckpointer restores into a target."""
    chain = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    return {
        "batch_stats": {"params": params(), "batch_stats": {}},
        "ema": {"params": params(), "ema": None},
        "train_state": train_state(),
        "sgd": {"params": params(), "opt_state": optax.sgd(0.1).init(params())},
        "adamw alone": optax.adamw(1e-3).init(params()),
        "chain alone": chain.init(params()),
        "sgd alone": optax.sgd(0.1).init(params()),
        "three": [None, {}, jnp.ones(2)],
        "first": [jnp.ones(2), [], ()],
        "every": {"w": jnp.ones(2), "d": {}, "l": [], "t": (), "n": None},
        "deep": {"w": jnp.ones(2), "a": {"b": {"c": {}}, "d": [[None], [{}, [()]]]}},
        "containers": Pair(Settings(jnp.ones(2), {}), (jnp.ones(1), Pair(None, ()), None)),
        "nothing else": {"a": {}, "b": [None, ()]},
        "numbers as keys": {"0": None, "1": jnp.ones(2), "2": {}},
    }


def with_values() -> dict[str, Any]:
    """Numbers and text of Python, which PyTreeCheckpointer restores."""
    return {
        "w": jnp.ones(2),
        "step": 3,
        "rate": 0.5,
        "on": True,
        "name": "run",
        "a/b": {"d.e": "slashes"},
        "list": ["text", None, 7, jnp.ones(1), {}],
        "text": ["a", "b"],
    }


def copied(tmp_path: Path, tree: Any, formats: tuple[str, ...]) -> Path:
    source = tmp_path / "source"
    stock_save(source, tree)
    for number, format in enumerate(formats):
        convert(source, tmp_path / f"{number}_{format}", to=format)
        source = tmp_path / f"{number}_{format}"
        assert verify(source).problems == ()
        report = diff(tmp_path / "source", source)
        assert report.within, report.structure
    return source


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda node: node is None)


def cases() -> list[Any]:
    """Every tree copied straight and through DCP; some of them through safetensors, and there and back."""
    few = ("three", "deep", "containers", "nothing else")
    return [
        pytest.param(
            name,
            formats,
            id=f"{name} {'-'.join(formats)}",
            marks=[pytest.mark.slow] if "safetensors" in formats and name not in few else [],
        )
        for name in trees()
        for formats in THROUGH
    ]


@pytest.mark.parametrize(("name", "formats"), cases())
def test_stock_orbax_restores_a_copy_into_the_same_target(
    tmp_path: Path, name: str, formats: tuple[str, ...]
) -> None:
    tree = trees()[name]
    copy = copied(tmp_path, tree, formats)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(copy, target)
    for loaded in (restored, v1.load(copy, target)):
        assert structure(loaded) == structure(tree)
        jax.tree.map(np.testing.assert_array_equal, loaded, tree)
    expected, loaded = (stock_restore_v0(path) for path in (tmp_path / "source", copy))
    assert structure(loaded) == structure(expected)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize("formats", THROUGH, ids="-".join)
def test_numbers_and_text_of_python_come_back_as_such(tmp_path: Path, formats: tuple[str, ...]) -> None:
    copy = copied(tmp_path, with_values(), formats)
    with ocp.PyTreeCheckpointer() as checkpointer:
        expected, loaded = checkpointer.restore(tmp_path / "source"), checkpointer.restore(copy)
    assert repr(jax.tree.map(_plain, loaded)) == repr(jax.tree.map(_plain, expected))
    with open_checkpoint(tmp_path / "source") as reader, open_checkpoint(copy) as other:
        assert dict(reader.objects) == dict(other.objects)
        assert reader.object_paths == other.object_paths


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, jax.Array | np.ndarray) else leaf


@pytest.mark.parametrize("format", ["orbax", "dcp", "safetensors"])
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"w": jnp.ones(2), "l": [jnp.ones(1), None]}, ("ema", "None in a, not in the tree of b")),
        (
            {"w": jnp.ones(2), "ema": None, "l": [jnp.ones(1), None], "x": {}},
            ("x", "not in the tree of a, Dict in b"),
        ),
        (
            {"w": jnp.ones(2), "ema": None, "l": {"0": jnp.ones(1), "1": None}},
            ("l", "a list in a, a dict in b"),
        ),
    ],
    ids=["missing", "extra", "dict"],
)
def test_diff_sees_another_structure(
    tmp_path: Path, other: Any, difference: tuple[str, str], format: str
) -> None:
    stock_save(tmp_path / "a", {"w": jnp.ones(2), "ema": None, "l": [jnp.ones(1), None]})
    stock_save(tmp_path / "other", other)
    convert(tmp_path / "other", tmp_path / "b", to=format)
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.structure == (difference,)
    assert not report.within
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 1
    assert ": ".join(difference) in result.stdout
    # What is left out on one side is no difference.
    name = difference[0] + "*" if difference[0] == "l" else difference[0]
    assert diff(tmp_path / "a", tmp_path / "b", selection=Selection(drop=(name,))).within


@pytest.mark.parametrize("formats", THROUGH, ids="-".join)
def test_weights_alone_keep_the_structure_of_their_tree(tmp_path: Path, formats: tuple[str, ...]) -> None:
    weights = {"params": {"w": jnp.ones(2), "none": None, "dense": {}, "list": [jnp.ones(1), ()]}}
    source = tmp_path / "source"
    stock_save(source, {**weights, "opt_state": optax.sgd(0.1).init(weights), "ema": None, "step": 3})
    for number, format in enumerate(formats):
        options = Selection(weights_only=True)
        convert(source, tmp_path / f"{number}_{format}", to=format, selection=options)
        assert diff(tmp_path / "source", tmp_path / f"{number}_{format}", selection=options).within
        source = tmp_path / f"{number}_{format}"
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, weights)
    with ocp.StandardCheckpointer() as checkpointer:
        assert structure(checkpointer.restore(source, target)) == structure(weights)


def test_another_container_is_a_difference_of_values(tmp_path: Path) -> None:
    stock_save(tmp_path / "a", {"w": jnp.ones(2), "ema": None})
    stock_save(tmp_path / "b", {"w": jnp.ones(2), "ema": {}})
    assert diff(tmp_path / "a", tmp_path / "b").objects == (("ema", None, {}),)


def test_what_came_from_torch_stays_out_of_the_tree(tmp_path: Path) -> None:
    """Hyperparameters beside no array must not be leaves: a JAX program's target does not have them."""
    with create_checkpoint(tmp_path / "dcp", "dcp") as writer:
        writer.add_object(("optimizer", "param_groups", 0, "foreach"), None)
        writer.add_object(("note",), "text")
        name = writer.add_tensor(("params", "w"), (2,), np.dtype(np.float32)).name
        writer.write(name, Box((0,), (2,)), np.ones(2, np.float32))
    convert(tmp_path / "dcp", tmp_path / "orbax")
    for restore in STOCK_RESTORES.values():
        assert structure(restore(tmp_path / "orbax")) == structure({"params": {"w": 1}})
    convert(tmp_path / "orbax", tmp_path / "back")
    with open_checkpoint(tmp_path / "back") as reader:
        assert dict(reader.objects) == {"optimizer.param_groups.0.foreach": None, "note": "text"}


def test_stock_names_and_types_of_leaves_are_those_of_the_source(tmp_path: Path) -> None:
    copied(tmp_path, with_values(), ("orbax",))
    a, b = (
        json.loads((tmp_path / name / "_METADATA").read_text())["tree_metadata"]
        for name in ("source", "0_orbax")
    )
    assert a.keys() == b.keys()
    for name, entry in a.items():
        assert entry["key_metadata"] == b[name]["key_metadata"]
        if entry["value_metadata"]["value_type"] != "jax.Array":
            assert b[name]["value_metadata"]["value_type"] == entry["value_metadata"]["value_type"]
