"""Saving under another model's names and layouts, and loading from them: as ``twinshard convert`` does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.mapping import load_mapping
from tests.support.bridge.bits import assert_same_checkpoints
from tests.support.bridge.family_checkpoints import train_step, trained
from tests.support.torch_impl import mapped_jobs as jobs
from torch_impl import CheckpointManager, load_checkpoint, save_checkpoint


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    path = tmp_path / "fused.toml"
    path.write_text(jobs.QKV)
    return str(path)


MAPPINGS = {"decoder": ("decoder", "jax"), "fused": ("", "split")}


@pytest.mark.fast_cases("decoder-optim_grads_params-float16-2")
@pytest.mark.parametrize(
    ("model_name", "strategy", "dtype", "world"),
    [
        ("fused", "optim_grads_params", "float8_e4m3fn", 4),
        ("decoder", "optim_grads_params", "float16", 2),
        pytest.param("fused", "no_shard", "float16", 2, marks=pytest.mark.slow),
        pytest.param("decoder", "optim_grads", "float32", 3, marks=pytest.mark.slow),
        pytest.param("decoder", "optim", "float8_e4m3fn", 3, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_saved_under_a_mapping_is_the_plain_one_converted(
    ranks, tmp_path, mapping, model_name, strategy, dtype, world
):
    name, into = MAPPINGS[model_name]
    name = name or mapping
    args = (model_name, strategy, dtype, name, str(tmp_path), world == 2)
    empty = ranks.run(world, jobs.save_both, *args)
    if world == 4:
        assert max(empty) > 0, "expected a rank without rows of some parameter"
    convert(tmp_path / "plain", tmp_path / "converted", to="dcp", mapping=name, into=into)
    assert_same_checkpoints(tmp_path / "mapped", tmp_path / "converted")
    assert not verify(tmp_path / "mapped").problems
    # Loaded on other ranks the runs are one: states, train values, and the next steps.
    fewer = max(1, world // 2)
    expected = ranks.run(fewer, jobs.go_on, model_name, strategy, dtype, None, str(tmp_path / "plain"))
    for path in ("mapped", "plain"):
        loaded = ranks.run(fewer, jobs.go_on, model_name, strategy, dtype, name, str(tmp_path / path))
        for (state, *rest), (state_before, *rest_before) in zip(loaded, expected, strict=True):
            assert state.keys() == state_before.keys()
            assert [n for n, a in state_before.items() if not np.array_equal(state[n], a)] == [], path
            assert rest == rest_before


def test_a_model_of_transformers_is_saved_as_the_hub_has_it_and_loaded_from_there(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe", steps=1)
    table = load_mapping("qwen3_moe").between("torch", "hf")
    # Sizes of heads come from the model's config.
    save_checkpoint(tmp_path / "dcp", model, optimizer, mapping=table)
    model.save_pretrained(tmp_path / "hub")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert {n for n in reader.tensors if not n.startswith("optimizer.")} == set(hub)
        assert all(np.array_equal(reader.read(name), array) for name, array in hub.items())
        expert = "model.layers.1.mlp.experts.3.up_proj.weight"
        moment = optimizer.state[model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")]["exp_avg"]
        np.testing.assert_array_equal(
            reader.read(f"optimizer.state.{expert}.exp_avg"), moment[3, 16:].numpy()
        )
        assert expert in reader.objects["optimizer.param_groups.0.params"]
    other, its = trained("qwen3_moe", steps=2, seed=1)
    load_checkpoint(tmp_path / "dcp", other, its, mapping=table)
    assert [train_step(other, its, k) for k in (5, 6)] == [train_step(model, optimizer, k) for k in (5, 6)]
    # Weights alone, from the files of the Hub.
    fresh, _ = trained("qwen3_moe", steps=0, seed=2)
    load_checkpoint(tmp_path / "hub", fresh, mapping=table)
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "hub").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in fresh.state_dict().items())


def test_a_manager_saves_and_loads_under_a_mapping(tmp_path: Path) -> None:
    table = load_mapping("qwen3_moe").between("torch", "hf")
    model, optimizer = trained("qwen3_moe", steps=1)
    other, its = trained("qwen3_moe", steps=2, seed=1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model, optimizer, mapping=table)
        manager.wait()
        with open_checkpoint(tmp_path / "1") as reader:
            assert "model.layers.1.mlp.experts.3.up_proj.weight" in reader.tensors
        manager.load(other, its, mapping=table)
    assert train_step(other, its, 5) == train_step(model, optimizer, 5)


def test_a_model_that_does_not_fit_leaves_nothing_on_disk(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe", steps=1)
    with pytest.raises(
        CheckpointError, match=r"mapping decoder does not fit the Qwen3MoeForCausalLM; is this another"
    ):
        save_checkpoint(tmp_path / "a", model, optimizer, mapping="decoder")
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path / "plain", model, optimizer)
    with pytest.raises(CheckpointError, match=r"mapping decoder does not fit .*plain"):
        load_checkpoint(tmp_path / "plain", *trained("qwen3_moe", steps=1), mapping="decoder")
