"""Files of flax.serialization, compared with what flax restores from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import Box, CheckpointError, detect_format, open_checkpoint
from tests.support.bridge.bits import same_bits


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((13, 17)).astype(np.float32),
        "b": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
        "f8": np.ones(3, ml_dtypes.float8_e4m3fn),
        "i4": np.asarray(jnp.arange(3, dtype=jnp.int4)),
        "empty": np.zeros((0, 3)),
        "zero_d": np.asarray(2.5),
        "scalar": np.float32(3),
        "complex": 1 + 2j,
        "step": 7,
        "rate": 0.5,
        "flag": True,
        "none": None,
        "nothing": {},
        "text": "Grüße",
        "numbers": [1, 2],
        "nested": {"a": {"b": np.arange(4, dtype=np.uint8)}},
    }


def written(path: Path, content: Any) -> Path:
    path.write_bytes(flax.serialization.msgpack_serialize(content))
    return path


def test_each_leaf_is_what_flax_restores(tmp_path: Path) -> None:
    path = written(tmp_path / "a.msgpack", tree())
    restored = flax.serialization.msgpack_restore(path.read_bytes())
    with open_checkpoint(path) as reader:
        assert reader.format == "msgpack"
        assert [*reader.tensors, *reader.objects] != []
        for name, value in restored.items():
            if isinstance(value, np.ndarray | np.generic):
                assert same_bits(reader.read(name), np.asarray(value))
        assert reader.read("nested/a/b").tolist() == [0, 1, 2, 3]
        assert {n: reader.read(n)[()] for n in ("step", "rate", "flag", "complex")} == {
            "step": 7,
            "rate": 0.5,
            "flag": True,
            "complex": 1 + 2j,
        }
        leaf_kinds = reader.kinds  # type: ignore[attr-defined]
        assert leaf_kinds == {
            **dict.fromkeys(("step", "rate", "flag"), "scalar"),
            "none": "None",
            "nothing": "Dict",
            "text": "string",
        }
        assert dict(reader.objects) == {"none": None, "nothing": {}, "text": "Grüße", "numbers": [1, 2]}


def test_arrays_in_chunks_are_read_by_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    expected = tree()
    path = written(tmp_path / "a.msgpack", expected)
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    rng = np.random.default_rng(1)
    with open_checkpoint(path) as reader:
        assert same_bits(reader.read("x"), expected["x"])
        for _ in range(100):
            offsets = tuple(int(rng.integers(0, n + 1)) for n in (13, 17))
            box = Box(
                offsets,
                tuple(int(rng.integers(0, n - o + 1)) for n, o in zip((13, 17), offsets, strict=True)),
            )
            assert np.array_equal(reader.read("x", box), expected["x"][box.slices()])
    convert(path, tmp_path / "b")
    assert diff(path, tmp_path / "b").max_ulp == 0


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for k in range(2):
            x = nn.Dense(7, name=f"dense_{k}", param_dtype=jnp.bfloat16 if k else jnp.float32)(x)
        return x


def train_state() -> TrainState:
    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    return step(TrainState.create(apply_fn=model.apply, params=params, tx=optimizer))


def step(state: TrainState) -> TrainState:
    def loss(params: Any) -> jax.Array:
        return jnp.sum(
            state.apply_fn({"params": params}, jnp.arange(6.0).reshape(2, 3)).astype(jnp.float32) ** 2
        )

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


@pytest.mark.slow
def test_a_train_state_goes_on_from_orbax_as_it_would_have(tmp_path: Path) -> None:
    state = train_state()
    (tmp_path / "checkpoint_1").write_bytes(flax.serialization.to_bytes(state))
    assert detect_format(tmp_path / "checkpoint_1") == "msgpack"
    convert(tmp_path / "checkpoint_1", tmp_path / "b")
    assert verify(tmp_path / "b").good
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "b", state)
    expected, resumed = step(state), step(restored)
    assert jax.tree.structure(expected) == jax.tree.structure(resumed)
    assert all(
        same_bits(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(resumed), strict=True)
    )


def test_numbers_are_positions_in_the_optimizers_state_and_keys_in_weights(tmp_path: Path) -> None:
    weights = {"blocks": {"0": {"w": np.ones(2)}, "1": {"w": np.ones(2)}}}
    content = {
        "params": weights,
        "opt_state": {"0": {"count": 1, "mu": weights}, "1": {}, "2": {"0": {"nu": weights}}},
    }
    path = written(tmp_path / "a.msgpack", content)
    with open_checkpoint(path) as reader:
        paths = {info.path for info in reader.tensors.values()} | set(reader.object_paths.values())
    assert paths == {
        *(("params", "blocks", k, "w") for k in "01"),
        ("opt_state", 0, "count"),
        *(("opt_state", 0, "mu", "blocks", k, "w") for k in "01"),
        ("opt_state", 1),
        *(("opt_state", 2, 0, "nu", "blocks", k, "w") for k in "01"),
    }


def test_a_dtype_that_no_checkpoint_has_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.msgpack", {"u4": np.asarray(jnp.ones(3, jnp.uint4)), "w": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"'u4' \('uint4', which is an unknown dtype\)"):
        convert(path, tmp_path / "b")
    convert(path, tmp_path / "b", selection=Selection(drop=("u4",)))
    assert verify(path).unread == ("u4",)


def test_a_hub_folder_and_its_shards(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    a, b = {"model": {"a": np.ones(3)}}, {"model": {"b": np.zeros((2, 2))}}
    written(folder / "flax_model.msgpack", {"model": {**a["model"], **b["model"]}})
    assert [t.name for t in inspect(folder).tensors] == ["model/a", "model/b"]
    (folder / "flax_model.msgpack").unlink()
    written(folder / "flax_model-00001-of-00002.msgpack", a)
    written(folder / "flax_model-00002-of-00002.msgpack", b)
    weight_map = {
        "model/a": "flax_model-00001-of-00002.msgpack",
        "model/b": "flax_model-00002-of-00002.msgpack",
    }
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert [t.name for t in inspect(folder).tensors] == ["model/a", "model/b"]
    convert(folder, tmp_path / "o")
    assert diff(folder, tmp_path / "o").max_ulp == 0


def array(shape: Any = (2,), dtype: Any = "float32", data: Any = bytes(8), code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data)))


def nested_extensions(count: int) -> bytes:
    """An array whose shape is an array, and so on."""
    inside = b"\1"
    for _ in range(count):
        inside = msgpack.packb(msgpack.ExtType(1, b"\x93" + inside))
    return msgpack.packb({"w": 0})[:-1] + inside


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\x81", "truncated"),
        (b"\x81\xa1w\xc1", "does not begin a value"),
        (msgpack.packb({"w": 1}) + b"\0", "its content ends at byte"),
        (msgpack.packb([1]), "expected a tree with keys, found list"),
        (msgpack.packb(1), "expected a tree with keys, found int"),
        (msgpack.packb({"w": array((3,))}), r"expected 12 bytes for float32 \(3,\), got 8"),
        (msgpack.packb({"w": array((-2,))}), "not a list of at most"),
        (msgpack.packb({"w": array((2**40, 2**40))}), "expected 4835703278458516698824704 bytes"),
        (msgpack.packb({"w": array(tuple([1] * 70))}), "not a list of at most"),
        (msgpack.packb({"w": array(data="text")}), "the elements of an array are missing"),
        (msgpack.packb({"w": array(code=9)}), "extension type 9 is not one of flax's types"),
        (msgpack.packb({"w": msgpack.ExtType(1, b"\x93")}), "truncated"),
        (msgpack.packb({"w": msgpack.ExtType(2, msgpack.packb([1]))}), "not a pair of numbers"),
        (msgpack.packb({"w": msgpack.ExtType(1, array().data + b"\0")}), "an array or number ends at byte"),
        (b"\xdf\xff\xff\xff\xff\xa1w\1", "4294967295 values are missing"),
        (b"\x81\xa1w\xdb\xff\xff\xff\xffx", "text or bytes of length 4294967295"),
        (b"\x81\xa1w\xc7\xff\1x", "truncated"),
        (b"\x81\xa1w" * 100 + b"\1", "nested more than 64 deep"),
        (b"\x81\xa1w" + b"\x91" * 5000 + b"\1", "nested more than 64 deep"),
        (nested_extensions(500), "has another one inside"),
        (b"\x81" * 5000 + b"\1" * 5001, "nested more than 64 deep"),
        (b"\x82\xa1w\1\xa1w\2", "the key 'w' occurs twice"),
        (b"\x81\xc0\1", "neither text nor a number"),
        (b"\x81\xa1\xff\1", "is not UTF-8"),
        (msgpack.packb({"w": {"__msgpack_chunked_array__": True}}), "expected the shape and the chunks"),
        (
            msgpack.packb(
                {
                    "w": {
                        "__msgpack_chunked_array__": True,
                        "shape": {"0": 5},
                        "chunks": {"0": array(), "1": array()},
                    }
                }
            ),
            r"expected 20 bytes for float32 \(5,\), got 16",
        ),
        (msgpack.packb({"a": {"b": 1}, "a/b": 2}), "'a/b' twice"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.msgpack").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "a.msgpack")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "whole", tree()).read_bytes()
    for stop in range(1, len(data), 7):
        (tmp_path / "a.msgpack").write_bytes(data[:stop])
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "a.msgpack")


def test_a_directory_with_flaxs_file_checkpoint_is_read(tmp_path: Path) -> None:
    tree = {"params": {"w": np.ones(2, np.float32)}}
    (tmp_path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    for path in (tmp_path, tmp_path / "checkpoint"):
        with open_checkpoint(path) as reader:
            assert [*reader.tensors] == ["params/w"]
            assert np.array_equal(reader.read("params/w"), np.ones(2))
    # TensorFlow's file of this name is text.
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')
    with pytest.raises(CheckpointError, match="expected a DCP checkpoint"):
        open_checkpoint(tmp_path)
