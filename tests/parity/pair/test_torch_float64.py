"""Float64 runs of PyTorch models: nothing is computed in less, whatever the model's code asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from bridge.parity.torch.losses import probe_loss
from bridge.parity.torch.run_in_dtype import all_float64, copy_in, running
from bridge.parity.torch.side import TorchSide

NARROW = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 6))


class Spy(TorchDispatchMode):
    """Notes each operator, also of a backward, that returns a narrow tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_ops: set[str] = set()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for output in result if isinstance(result, tuple | list) else (result,):
            # lift_fresh is the array itself as a tensor.
            if isinstance(output, torch.Tensor) and output.dtype in NARROW and "lift_fresh" not in str(func):
                self.narrow_ops.add(str(func))
        return result


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def by_hand(weights: dict[str, np.ndarray], tokens: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The logits of the model above, in NumPy."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    batch, length = tokens.shape
    angles = np.arange(length)[:, None] * np.concatenate([frequencies, frequencies])

    def rotated(x: np.ndarray) -> np.ndarray:
        return x * np.cos(angles) + np.concatenate([-x[..., 2:], x[..., :2]], -1) * np.sin(angles)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in ("model.layers.0", "model.layers.1"):
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(h, f"{layer}.self_attn.{letter}_proj").reshape(batch, length, -1, 4).swapaxes(1, 2)
            for letter in "qkv"
        )
        q, k, v = rotated(q), rotated(k.repeat(2, 1)), v.repeat(2, 1)
        scores = q @ k.swapaxes(2, 3) / 2
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + linear(attended.swapaxes(1, 2).reshape(batch, length, 16), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
    return linear(norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_llama_is_computed_in_float64_throughout(attention: str, dtype: str) -> None:
    model = llama(attention).to(getattr(torch, dtype))
    side = TorchSide(model, "next_token")
    record = side.record(TOKENS, "float64")
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    logits = by_hand(side.weights(), TOKENS[:, :-1], frequencies)
    np.testing.assert_allclose(record.calls[0].outputs["logits"], logits, rtol=1e-11, atol=1e-12)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(likely, TOKENS[:, 1:, None], -1).mean()
    assert record.loss == pytest.approx(loss, rel=1e-13)
    for call in record.calls:
        for leaf, array in {**call.outputs, **call.gradients}.items():
            # Embeddings are the given weights; the rest has more bits than float32 has.
            if array.dtype.kind == "f" and call.kind != "Embedding":
                assert (array != array.astype(np.float32)).mean() > 0.2, (call.path, leaf)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_last_bit_of_a_weight_changes_outputs_by_as_little(attention: str) -> None:
    side = TorchSide(llama(attention).double(), "next_token")
    before = side.record(TOKENS, "float64")
    weights = side.weights()
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        weights[name] = np.nextafter(weights[name], np.inf)
    side.load(weights)
    after = side.record(TOKENS, "float64")
    for call, other in zip(before.calls[6:], after.calls[6:], strict=True):
        for leaf, array in call.outputs.items():
            changes = np.abs(array - other.outputs[leaf])
            assert 0 < changes.max() < 1e-12 * np.abs(array).max(), (call.path, leaf)


def test_frequencies_that_the_model_computed_in_float32_stay_as_given() -> None:
    model = llama("eager")
    own = model.model.rotary_emb.inv_freq
    side = TorchSide(model, "next_token")
    record = side.record(TOKENS, "float64")
    angles = np.arange(5)[:, None] * np.concatenate([own.double().numpy()] * 2)
    np.testing.assert_allclose(record.find("model.rotary_emb").outputs["0"][0], np.cos(angles), rtol=1e-15)
    # In bfloat16 they are not rounded: the module asks for float32 itself.
    cosines = side.record(TOKENS, "bfloat16").find("model.rotary_emb").outputs["0"][0]
    np.testing.assert_array_equal(cosines, np.cos(angles.astype(np.float32)).astype(cosines.dtype))


class Islands(nn.Module):
    """A module that computes a part in less than its weights have."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((), 1 / 3))
        self.table = torch.eye(4) / 2 + 0.5  # no buffer
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part((x * self.w) @ self.table)


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.softmax(functional.linear(x, x), -1).sum(-1) + functional.layer_norm(x, (4,)).sum(
            -1
        )


class CustomCast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.half() / 3


ISLANDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float().exp().to(x.dtype),
    "half": lambda x: x.half() * 1,
    "bfloat16": lambda x: x.bfloat16() * 1,
    "to": lambda x: x.to(torch.float32).exp(),
    "to keyword": lambda x: x.to(dtype=torch.bfloat16, copy=True) / 3,
    "to device": lambda x: x.to("cpu", torch.float32) / 3,
    "to like": lambda x: x.to(torch.zeros(1, dtype=torch.float32)) / 3,
    "type": lambda x: x.type(torch.float32) + x.type("torch.FloatTensor") + x.type(torch.HalfTensor),
    "type_as": lambda x: x.type_as(torch.zeros(1).half()) / 3,
    "type_as numpy": lambda x: x.type_as(torch.from_numpy(np.zeros(1, np.float32))) / 3,
    "softmax": lambda x: functional.softmax(x, -1, dtype=torch.float32) + x.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, dtype=torch.float32) + torch.cumsum(x, -1, dtype=torch.float32)[:, 0],
    "zeros": lambda x: torch.zeros(3, 4, dtype=torch.float32).add_(x) + torch.zeros_like(x, dtype=torch.half),
    "new": lambda x: (
        x + x.new_tensor([1 / 3], dtype=torch.float32) * x.new_full((1,), 1 / 3, dtype=torch.half)
    ),
    "full": lambda x: torch.full((4,), 1 / 3) * x + torch.tensor([1 / 3]) + torch.linspace(0, 1, 4),
    "arange": lambda x: (
        torch.arange(4, dtype=torch.float32) / 3 * x + torch.arange(4) / 3 + torch.arange(4.0)
    ),
    "integers": lambda x: x * (torch.ones(4, dtype=torch.long).float() / 3) + torch.ones(4).long() / 3,
    "finfo": lambda x: x.masked_fill(x < 0, torch.finfo(torch.float32).min).softmax(-1),
    "promote": lambda x: x.to(torch.promote_types(torch.float32, torch.bfloat16)) / 3,
    "default": lambda x: x.to(torch.get_default_dtype()) / 3,
    "empty": lambda x: torch.empty(3, 4, dtype=torch.float32).copy_(x) / 3,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.float(), x.float()),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.float().reshape(3, 2, 2)) * torch.polar(torch.ones(2), torch.ones(2) / 3)
    ),
    "complex64": lambda x: (x.to(torch.complex64) / 3).real,
    "numpy": lambda x: x * torch.from_numpy(np.ones(4, np.float32)) + torch.as_tensor(np.ones(4, np.float16)),
    "autocast": autocast,
    "autograd function": CustomCast.apply,
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
    "sdpa": lambda x: functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_no_request_for_less_is_heard(name: str) -> None:
    model = copy_in(Islands(ISLANDS[name]), "float64")
    x = torch.tensor(np.random.default_rng(1).standard_normal((3, 4)))
    with running(model, "float64"), Spy() as spy:
        output = model(x)
        output.sum().backward()
    assert output.dtype == torch.float64
    assert model.w.grad.dtype == torch.float64
    assert spy.calls > 3
    assert not spy.narrow_ops


def test_the_backwards_of_records_and_reruns_are_float64_too() -> None:
    side = TorchSide(Islands(CustomCast.apply))
    record = side.record(np.ones((3, 4)), "float64")
    cotangents = record.calls[0].gradients
    rerun = side.rerun("float64", "", 0, {}, cotangents=cotangents)
    np.testing.assert_allclose(record.gradients["w"], (cotangents[""] / 3).sum() * 2.5, rtol=1e-14)
    np.testing.assert_allclose(rerun.gradients["w"], record.gradients["w"], rtol=1e-15)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "encoder without training": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
    "attention": lambda: Attention(),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3), nn.GELU()),
    "norms": lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(4), nn.RMSNorm(4), nn.Dropout(0.1)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
}


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_modules_of_torch_compute_nothing_in_less(name: str) -> None:
    torch.manual_seed(0)
    model = copy_in(MODULES[name](), "float64")
    with running(model, "float64"), Spy() as spy:
        probe_loss(model, torch.ones(2, 3, 4, dtype=torch.float64)).backward()
        torch.optim.AdamW(model.parameters()).step()
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float64
        for parameter in model.parameters()
    )
    assert spy.calls > 5
    assert not spy.narrow_ops


def test_experts_are_computed_in_float64() -> None:
    rows, weights = torch.randn(6, 8, dtype=torch.float64), torch.randn(3, 8, 4, dtype=torch.float64)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    with all_float64():
        product = functional.grouped_mm(rows, weights, offs=offsets)
        batched = functional.grouped_mm(rows.view(3, 2, 8), weights)
    assert product.dtype == torch.float64
    torch.testing.assert_close(product[:2], rows[:2] @ weights[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(product[2:5], rows[2:5] @ weights[2], rtol=1e-14, atol=0)
    torch.testing.assert_close(batched, rows.view(3, 2, 8) @ weights, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(300),
        lambda: torch.randn(300, dtype=torch.float32),
        lambda: torch.rand_like(torch.ones(300, dtype=torch.float32)),
        lambda: torch.randn_like(torch.ones(300)),
        lambda: torch.empty(300).uniform_(2, 3),
        lambda: torch.empty(300).normal_(mean=1.0),
        lambda: functional.dropout(torch.ones(300), 0.3) != 0,
    ],
)
def test_random_numbers_are_those_of_a_float32_run(draw: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)
    with all_float64():
        drawn = draw()
    assert drawn.dtype in (torch.float64, torch.bool)
    assert torch.equal(drawn, expected.to(drawn.dtype))


def test_casts_to_16_bits_are_copies_as_they_are_from_float32() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with all_float64():
        for copied in (
            x.half(),
            x.bfloat16(),
            x.to(torch.half),
            x.to(dtype=torch.bfloat16),
            x.type(torch.half),
        ):
            copied.add_(1)
    assert (x == 1).all()


def test_narrow_tensors_that_existed_before_can_be_changed_in_place() -> None:
    x = torch.zeros(2)
    with all_float64():
        x[0:1].add_(1)
        x.view(torch.int32)[1] = 1 << 29
    assert x.dtype == torch.float32
    assert x.tolist() == [1, 2.0**-63]


def test_afterwards_torch_is_as_before() -> None:
    with all_float64():
        assert torch.get_default_dtype() == torch.float64
    with pytest.raises(RuntimeError, match="shape"), all_float64():
        torch.ones(2).reshape(3)
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1).dtype == torch.ones(1, dtype=torch.float64).float().dtype == torch.float32
