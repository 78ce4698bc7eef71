"""torchtitan's names since September 2026, with gate and up as one tensor, against those of release 0.2."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import load_mapping, make_plan
from bridge.core.mapping.one_rule.sizes import with_config_fields
from tests.support.bridge.bits import same_bits
from tests.support.bridge.family_checkpoints import config_json
from tests.support.bridge.family_models import hf_model
from tests.support.bridge.memory_reader import MemoryReader

STEP = np.asarray(3, np.float32)


def translated(source: MemoryReader, family: str, config: dict[str, object], into: str) -> MemoryReader:
    table = with_config_fields(load_mapping(family), config, "config.json")
    plan = make_plan(source, "dcp", table, into=into)
    arrays = {name: t.read(source, Box.whole(t.shape)) for name, t in plan.tensors.items()}
    return MemoryReader("dcp", arrays, dict(plan.notes.values()))


def fused(old: dict[str, np.ndarray], r: int) -> dict[str, np.ndarray]:
    """The names and arrays of release 0.2 as torchtitan's main has them, by NumPy."""
    names = {"output.": "lm_head.", "expert_bias": "expert_bias_E"}
    names |= {".moe.experts.w2": ".moe.routed_experts.w2.weight"}
    tensors = {}
    for name, array in old.items():
        if ".w1" in name:
            axis = 1 if ".experts." in name else 0
            new = name.replace(".moe.experts.w1", ".moe.routed_experts.w13.weight").replace(".w1.", ".w13.")
            tensors[new] = np.stack([array, old[name.replace(".w1", ".w3")]], axis=axis)
        elif ".attention.wq." in name and (keys := name.replace(".wq.", ".wk.")) in old:
            values = old[name.replace(".wq.", ".wv.")]
            groups = (
                a.reshape(-1, n, *a.shape[1:]) for a, n in ((array, r * 10), (old[keys], 10), (values, 10))
            )
            new = name.replace(".attention.wq.", ".attention.qkv_linear.wqkv.")
            tensors[new] = np.concatenate([*groups], axis=1).reshape(-1, *array.shape[1:])
        elif ".w3" not in name and not any(f".attention.w{k}." in name for k in "kv"):
            for before, after in names.items():
                name = name.replace(before, after)
            tensors[name] = array
    return tensors


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_gate_and_up_are_one_tensor_and_are_taken_apart_again(family: str) -> None:
    model = hf_model(family, **({"head_dim": 10} if family != "deepseek_v3" else {}))
    config = config_json(model)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    random = np.random.default_rng(0)
    arrays = {f"model.{name}": value for name, value in weights.items()}
    for name, _ in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            array = random.standard_normal(weights[name].shape).astype(np.float32)
            arrays[f"optimizer.state.{name}.{moment}"] = array
        arrays[f"optimizer.state.{name}.step"] = STEP
    source = MemoryReader("dcp", arrays)
    new = translated(source, family, config, "torchtitan_fused")
    old = translated(source, family, config, "torchtitan_0_2").arrays
    r = int(config["num_attention_heads"]) // int(config["num_key_value_heads"])
    expected = {}
    for suffix in ("", ".exp_avg", ".exp_avg_sq"):
        begin = "optimizer.state." if suffix else ""
        section = {
            n.removeprefix(begin).removesuffix(suffix): a
            for n, a in old.items()
            if n.startswith("optimizer") == bool(suffix) and n.endswith(suffix) and not n.endswith("step")
        }
        expected |= {f"{begin}{name}{suffix}": array for name, array in fused(section, r).items()}
    converted = {name: array for name, array in new.arrays.items() if not name.endswith(".step")}
    assert converted.keys() == expected.keys()
    assert [
        name for name in converted if not same_bits(converted[name], np.array(expected[name], order="C"))
    ] == []
    # Its names are found by themselves.
    back = translated(new, family, config, "torch").arrays
    assert back.keys() == arrays.keys()
    assert [name for name in back if not same_bits(back[name], np.array(arrays[name], order="C"))] == []
