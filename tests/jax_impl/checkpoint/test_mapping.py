"""Saving under another model's names and layouts, and loading from them: as ``twinshard convert`` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.scaled import read_decoded
from jax_impl import (
    CheckpointManager,
    load_checkpoint,
    main_weight_adamw,
    save_checkpoint,
    save_checkpoint_async,
)
from tests.support.bridge.bits import assert_same_checkpoints
from tests.support.jax_impl import checkpoint_runs as runs

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")

TRAIN = {"step": 2, "model": {"head_dim": runs.CONFIG.head_dim}}


def optimizer(dtype: str | None) -> Any:
    return main_weight_adamw(1e-2, weight_decay=0.1, mu_dtype=dtype, nu_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ((3,), "float8_e4m3fn"),
        pytest.param((2, runs.DEFAULT, "pjit"), None, marks=pytest.mark.slow),
        pytest.param((2, runs.DEFAULT, "shard_map", "stacked"), "float16", marks=pytest.mark.slow),
        pytest.param(((2, 2), "hfsdp"), "float8_e5m2", marks=pytest.mark.slow),
        pytest.param((2, runs.DEFAULT, "shard_map", "decoder", 2), None, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_saved_under_a_mapping_is_the_plain_one_converted(
    tmp_path: Path, case: Any, dtype: str | None
) -> None:
    made = optimizer(dtype)
    mapping = "decoder_stacked" if "stacked" in case else "decoder"
    plan = runs.plan_of(*case)
    state, _ = runs.train(runs.fresh(*case, optimizer=made), *case, first=0, count=2, optimizer=made)
    objects = {("optimizer", "note"): [1, "two"]}
    save_checkpoint(tmp_path / "plain", plan, state, TRAIN, objects=objects)
    save_checkpoint(tmp_path / "mapped", plan, state, TRAIN, objects=objects, mapping=mapping)
    pending = save_checkpoint_async(tmp_path / "async", plan, state, TRAIN, objects=objects, mapping=mapping)
    # The step is given the state to use up.
    _, expected = runs.train(state, *case, first=2, count=1, optimizer=made)
    pending.wait()
    convert(tmp_path / "plain", tmp_path / "converted", to="orbax", mapping=mapping, into="torch")
    for name in ("mapped", "async"):
        assert_same_checkpoints(tmp_path / name, tmp_path / "converted")
        assert not verify(tmp_path / name).problems
    # Scales of this run's own rows come back, so moments are the optimizer's own.
    for path in ("mapped", "plain"):
        loaded = load_checkpoint(tmp_path / path, plan, made, mapping=mapping)
        assert loaded.train == TRAIN
        save_checkpoint(tmp_path / f"{path}-again", plan, loaded.state, TRAIN, objects=loaded.objects)
        assert_same_checkpoints(tmp_path / f"{path}-again", tmp_path / "plain")
        assert runs.train(loaded.state, *case, first=2, count=1, optimizer=made)[1] == expected


def test_the_plan_gives_the_sizes_that_a_checkpoint_does_not(tmp_path: Path) -> None:
    case, made = (2,), optimizer(None)
    plan = runs.plan_of(*case)
    state, _ = runs.train(runs.fresh(*case, optimizer=made), *case, first=0, count=1, optimizer=made)
    save_checkpoint(tmp_path / "mapped", plan, state, {"step": 1}, mapping="decoder")
    loaded = load_checkpoint(tmp_path / "mapped", plan, made, mapping="decoder")
    first = runs.train(loaded.state, *case, first=1, count=1, optimizer=made)[1]
    assert first == runs.train(state, *case, first=1, count=1, optimizer=made)[1]


def test_a_manager_saves_and_loads_under_a_mapping(tmp_path: Path) -> None:
    case, made = (2,), optimizer(None)
    plan = runs.plan_of(*case)
    state, _ = runs.train(runs.fresh(*case, optimizer=made), *case, first=0, count=1, optimizer=made)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, plan, state, TRAIN, mapping="decoder")
        manager.wait()
        with open_checkpoint(tmp_path / "1") as reader:
            assert "model/embed.weight" in reader.tensors
        loaded = manager.load(plan, made, mapping="decoder")
    first = runs.train(loaded.state, *case, first=1, count=1, optimizer=made)[1]
    assert first == runs.train(state, *case, first=1, count=1, optimizer=made)[1]


def as_torch_stores_it(path: Path, new: Path) -> None:
    """The DCP checkpoint with moments of matrices in float8, and a scale for each of torch's rows."""
    with open_checkpoint(path) as reader, create_checkpoint(new, "dcp") as writer:
        for name, info in reader.tensors.items():
            arrays = {info.path: reader.read(name)}
            last = str(info.path[-1])
            if last in ("exp_avg", "exp_avg_sq") and len(info.shape) > 1:
                values = arrays[info.path]
                scale = np.abs(values).max(-1, keepdims=True) / np.float32(448)
                scale[scale == 0] = 1
                arrays = {info.path: (values / scale).astype(ml_dtypes.float8_e4m3fn)}
                arrays[(*info.path[:-1], f"{last}_scale")] = scale
            for tensor_path, array in arrays.items():
                added = writer.add_tensor(tensor_path, array.shape, array.dtype)
                for box in added.chunks:
                    writer.write(added.name, box, array[box.slices()])


def test_moments_with_torchs_scales_are_decoded(tmp_path: Path) -> None:
    case = (3,)
    plan, wide = runs.plan_of(*case), optimizer(None)
    state, _ = runs.train(runs.fresh(*case, optimizer=wide), *case, first=0, count=2, optimizer=wide)
    save_checkpoint(tmp_path / "plain", plan, state, TRAIN)
    convert(tmp_path / "plain", tmp_path / "dcp", mapping="decoder")
    as_torch_stores_it(tmp_path / "dcp", tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "orbax", mapping="decoder")

    loads: list[tuple[str, dict[str, Any]]] = [("torch", {"mapping": "decoder"}), ("orbax", {})]
    few = optimizer("float8_e4m3fn")
    for path, options in loads:
        for made in (few, wide):
            with pytest.raises(CheckpointError, match=r'moments="convert"'):
                load_checkpoint(tmp_path / path, plan, made, **options)
        loaded = load_checkpoint(tmp_path / path, plan, wide, moments="convert", **options)
        tensors = runs.logical(plan, loaded.state)
        with open_checkpoint(tmp_path / "torch") as reader:
            for torch_name, name, to in (
                ("layers.0.attention.wq.weight", "layers/0/attention/query/kernel", (1, 0)),
                ("layers.0.mlp.w2.weight", "layers/0/mlp/down/kernel", (1, 0)),
            ):
                for key, word in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
                    moment = f"optimizer.state.{torch_name}.{key}"
                    expected = read_decoded(reader, moment, f"{moment}_scale").transpose(to)
                    array = tensors[f"opt_state/{word}/{name}"]
                    np.testing.assert_array_equal(array, expected.reshape(array.shape))
        runs.train(loaded.state, *case, first=2, count=1, optimizer=wide)
        # In the format of its own rows it trains as well.
        loaded = load_checkpoint(tmp_path / path, plan, few, moments="convert", **options)
        runs.train(loaded.state, *case, first=2, count=1, optimizer=few)
