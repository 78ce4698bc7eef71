"""EasyLM's streams, written as EasyLM writes them: a msgpack pair of keys and flax's bytes for each leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax.serialization import msgpack_serialize, to_bytes, to_state_dict
from flax.traverse_util import flatten_dict

from bridge import CheckpointError, convert, open_checkpoint, verify
from bridge.core.formats import detect_format
from tests.support.bridge.torch_layouts import LAYOUTS
from tests.support.bridge.trainings import CHAINS, MAPPING, OptaxTraining, TorchTraining
from tests.support.bridge.verify_files import contents


def streamed(path: Path, tree: Any) -> Path:
    """`StreamingCheckpointer.save_train_state_to_file` of EasyLM without its device transfers."""
    packer = msgpack.Packer()
    with path.open("wb") as file:
        for key, value in flatten_dict(to_state_dict(tree)).items():
            file.write(packer.pack((key, to_bytes(value))))
    return path


def test_a_stream_holds_what_the_tree_holds(tmp_path: Path) -> None:
    tree = {
        "params": {
            "params": {"h": {"0": {"w": jnp.arange(6.0).reshape(2, 3)}}, "b": np.ones(2, ml_dtypes.bfloat16)}
        },
        "step": 7,
        "opt_state": ({"mu": np.arange(3)}, {"count": np.int32(7)}),
    }
    path = streamed(tmp_path / "streaming_train_state_7", tree)
    assert detect_format(path) == "msgpack"
    whole = tmp_path / "whole.msgpack"
    whole.write_bytes(msgpack_serialize(to_state_dict(tree)))
    assert contents(path) == contents(whole)
    assert verify(path).good


def test_a_training_of_easylm_goes_on_in_torch(tmp_path: Path) -> None:
    chain = CHAINS[0]
    with jax.enable_x64(True):
        optax_side = OptaxTraining(chain, TorchTraining(chain, seed=1).weights())
        optax_side.train(0, 3)
        state = {"step": 3, "params": {"params": optax_side.params}, "opt_state": optax_side.state}
        streamed(tmp_path / "streaming_train_state", state)
        torch_side = TorchTraining(chain, seed=2)
        torch_side.train(7, 1)
        LAYOUTS[0].write(torch_side.model, torch_side.optimizer, tmp_path / "like")
        convert(
            tmp_path / "streaming_train_state", tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "like"
        )
        LAYOUTS[0].read(torch_side.model, torch_side.optimizer, tmp_path / "arrived")
        assert torch_side.train(3, 5) == pytest.approx(optax_side.train(3, 5), rel=1e-6)


def pair(keys: Any, data: bytes) -> bytes:
    return msgpack.packb((keys, data))


ONE = to_bytes(np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pair(["a"], ONE) * 2, "the leaf 'a' occurs twice"),
        (pair(["a"], ONE) + pair(["a", "b"], ONE), "occurs twice, or in another leaf"),
        (pair(["a", "b"], ONE) + pair(["a"], ONE), "the leaf 'a' occurs twice"),
        (pair(["a"] * 65, ONE), "the keys of a leaf in a stream are missing"),
        (pair(["a"], ONE) + msgpack.packb({"a": 1}), "the keys of a leaf in a stream are missing"),
        (pair(["a"], ONE) + msgpack.packb((["b"], 3)), "bytes of a leaf"),
        (pair(["a"], ONE + b"\x00"), "a leaf ends at byte"),
        (b"\x92\x91\xa1a\xc6\xff\xff\xff\xff", "4294967295 bytes of a leaf are missing"),
        (pair(["a"], b"\xdd\xff\xff\xff\xff"), "4294967295 values are missing"),
        (pair(["a"], b"\x92\x91\xa1b\xc4\x01\x01" * 2), "a leaf ends at byte"),
    ],
)
def test_a_malformed_stream_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "stream.msgpack").write_bytes(data)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(tmp_path / "stream.msgpack")


def test_a_stream_cut_anywhere_is_refused_or_ends_with_a_leaf(tmp_path: Path) -> None:
    first = streamed(tmp_path / "a", {"a": np.arange(3.0)}).read_bytes()
    whole = streamed(tmp_path / "b", {"a": np.arange(3.0), "b": np.int32(1)}).read_bytes()
    assert whole.startswith(first)
    for length in range(1, len(whole)):
        (tmp_path / "cut.msgpack").write_bytes(whole[:length])
        if length == len(first):
            with open_checkpoint(tmp_path / "cut.msgpack") as reader:
                assert [*reader.tensors] == ["a"]
        else:
            with pytest.raises(CheckpointError):
                open_checkpoint(tmp_path / "cut.msgpack")
