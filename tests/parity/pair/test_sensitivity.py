"""The self-test: typical faults change the model, leave no trace in it, and are shown unless the weights hide them."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from bridge.parity.compare.parity import parity
from bridge.parity.recorded.recording import Call
from bridge.parity.recorded.trace import TraceSide, write_trace
from bridge.parity.torch import self_test
from bridge.parity.torch.self_test import Fault, _shift_mask, faults_of, plant_faults, with_fault
from bridge.parity.torch.side import TorchSide
from tests.support.parity.causal_pairs import SIZES
from tests.support.parity.pair_tools import compare_pair, randomize, tokens
from tests.support.parity.pairs import build
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP, jax_values

TABLE = parse_mapping(MAPPING, "small")

NAMES = {
    "variance_epsilon ten times as large",
    "weight transposed",
    "weight a little old",
    "bias left out",
    "first two heads of the query swapped",
    "rotary base 50 times as large",
    "another activation",
    "mask off by one",
}
TOKENS = tokens(0, rows=2, length=9)


def llama(attention: str = "eager", seed: int = 0) -> torch.nn.Module:
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "head_dim": 8, "num_key_value_heads": 4}
    sizes["attn_implementation"] = attention
    config = transformers.LlamaConfig(**sizes, attention_bias=True, use_cache=False)
    model = transformers.LlamaForCausalLM(config).eval()
    randomize(model, seed)
    return model


@functools.cache
def side() -> TorchSide:
    return TorchSide(llama(), "next_token")


@functools.cache
def right() -> Call:
    return side().record(TOKENS, "float64", backward=False).calls[0]


def faults(name: str) -> list[Fault]:
    return [fault for fault in faults_of(side().model) if fault.name == name]


def difference(first: Call, second: Call) -> float:
    high, logits = first.outputs["logits"], second.outputs["logits"]
    return float(np.linalg.norm(high - logits) / np.linalg.norm(high))


def test_a_llama_can_have_every_fault() -> None:
    assert {fault.name for fault in faults_of(side().model)} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_planted_fault_changes_the_model_and_the_original_is_as_before(name: str) -> None:
    before = {name: tensor.clone() for name, tensor in side().model.state_dict().items()}
    planted = faults(name)
    # The first and the last of its kind.
    for fault in {planted[0].module: planted[0], planted[-1].module: planted[-1]}.values():
        run = with_fault(side(), fault).record(TOKENS, "float64", backward=False)
        assert np.all(np.isfinite(run.calls[0].outputs["logits"]))
        assert difference(right(), run.calls[0]) > 1e-9, fault.module
    again = side().record(TOKENS, "float64", backward=False).calls[0]
    assert difference(right(), again) == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in side().model.state_dict().items())


def test_a_mask_is_off_by_one_under_an_attention_that_gets_none() -> None:
    fused = TorchSide(llama("sdpa"), "next_token")
    (fault,) = [fault for fault in faults_of(fused.model) if fault.name == "mask off by one"]
    run = with_fault(fused, fault).record(TOKENS, "float64", backward=False)
    assert difference(right(), run.calls[0]) > 1e-3
    assert difference(right(), fused.record(TOKENS, "float64", backward=False).calls[0]) < 1e-12


def test_a_module_that_does_not_say_whether_it_is_causal_keeps_its_arguments() -> None:
    x = torch.ones(2, 3, 4)
    module = torch.nn.Identity()
    assert _shift_mask(module, (x,), {}) is None
    module.is_causal = True
    _, changed = _shift_mask(module, (x,), {})
    assert changed["attention_mask"].shape == (1, 1, 3, 3)


SMALL = 1e-4


def shrink(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                parameter.mul_(SMALL)


def test_weights_near_zero_hide_a_rotary_base() -> None:
    base = "rotary base 50 times as large"
    model = llama()
    shown = {revealed.fault: revealed for revealed in plant_faults(TorchSide(model, "next_token"), TOKENS)}
    assert shown[base].shown
    assert shown[base].ratio > 100
    shrink(model)
    hidden = {revealed.fault: revealed for revealed in plant_faults(TorchSide(model, "next_token"), TOKENS)}
    assert not hidden[base].shown
    # A fault of what is there without attention is shown still.
    assert hidden["variance_epsilon ten times as large"].shown


@pytest.mark.slow
def test_a_scale_shows_what_small_weights_hide() -> None:
    pair = build("llama", 0)
    shrink(pair.torch_model)
    before = {name: tensor.clone() for name, tensor in pair.torch_model.state_dict().items()}
    for scale in (None, 1 / SMALL):
        report = compare_pair(pair, weights="torch", scale=scale, self_test=True)
        assert report.same, report.summary()
        remarks = "\n".join(report.remarks())
        assert ("not shown: model.rotary_emb, rotary base" in remarks) == (scale is None)
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.torch_model.state_dict().items())


@pytest.mark.fast_cases("None-jax")
@pytest.mark.parametrize("weights", ["own", "torch", "jax"])
@pytest.mark.parametrize("scale", [None, 3.7])
def test_models_are_bit_for_bit_as_before(weights: Any, scale: float | None) -> None:
    model, port = TorchMLP(seed=1, dropout=0.5), JaxMLP(seed=1)
    model.requires_grad_(False)
    model.drop.eval()
    # Values that a way there and back in another precision would not keep.
    with torch.no_grad():
        model.up.weight.add_(1e-5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = {path: np.array(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(port))}
    report = parity(
        *(model, port, BATCH), mapping=TABLE, weights=weights, scale=scale, steps=0, self_test=True
    )
    assert report.same == (weights != "own"), report.summary()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert (model.training, model.drop.training) == (True, False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    after = {path: np.array(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(port))}
    assert after.keys() == theirs.keys()
    assert all(np.array_equal(theirs[path], array) for path, array in after.items())


def test_models_are_as_before_where_the_comparison_fails() -> None:
    model, port = TorchMLP(seed=1), JaxMLP(seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for weights in ("torch", "jax"):
        with pytest.raises(ValueError, match="refused the batch"):
            parity(model, port, BATCH[:, :2], mapping=TABLE, weights=weights, scale=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert np.array_equal(np.asarray(port.down.kernel[...]), jax_values(2)["down/kernel"])


def test_a_frozen_model_cannot_be_trained() -> None:
    model = TorchMLP().requires_grad_(False)
    with pytest.raises(ValueError, match=r"all parameters are frozen.*steps = 0"):
        parity(model, JaxMLP(), BATCH, mapping=TABLE, steps=1)


def test_a_trace_cannot_be_tested(tmp_path: Path) -> None:
    write_trace(TorchSide(TorchMLP()), BATCH, tmp_path / "torch", steps=0)
    with pytest.raises(ValueError, match=r"self_test: expected a torch model, .* got TraceSide"):
        next(plant_faults(TraceSide.read(tmp_path / "torch"), None))


def test_of_many_faults_some_are_tried_all_over_the_model() -> None:
    tried = list(plant_faults(side(), TOKENS, most=3))
    every = list(faults_of(side().model))
    assert len(tried) == 3
    assert tried[0].module == every[0].module
    assert tried[-1].module == every[2 * len(every) // 3].module


def test_a_call_that_the_fault_leaves_out_has_no_ratio() -> None:
    ones: Any = np.ones(3)
    call: Any = SimpleNamespace(path="block", number=0, outputs={"0": ones})
    without: Any = SimpleNamespace(find=lambda path, number: None)
    other: Any = SimpleNamespace(find=lambda path, number: SimpleNamespace(outputs={"0": np.ones(3) * 2}))
    shaped: Any = SimpleNamespace(find=lambda path, number: SimpleNamespace(outputs={"0": np.ones(4)}))
    ratios = [
        self_test._ratio(call, other, without, faulty, "float32") for faulty in (without, other, shaped)
    ]
    assert ratios[0] == ratios[2] == 0.0
    assert ratios[1] > 1e5
