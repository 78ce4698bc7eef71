"""Runs of PyTorch models as records: what modules were given and returned, gradients, and one module again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge.parity.recorded.recording import probe_values
from bridge.parity.torch.leaves import cast
from bridge.parity.torch.side import TorchSide

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4))


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(OrderedDict(up=nn.Linear(4, 6), act=nn.Tanh(), down=nn.Linear(6, 2)))


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().sum()


# The record


def test_a_record_holds_calls_loss_and_gradients_of_a_model_computed_by_hand() -> None:
    model = mlp()
    record = TorchSide(model, squares).record(X, "float64")
    weights = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    hidden = np.tanh(X @ weights["up.weight"].T + weights["up.bias"])
    output = hidden @ weights["down.weight"].T + weights["down.bias"]
    assert [(call.path, call.number, call.kind, call.parent) for call in record.calls] == [
        ("", 0, "Sequential", None),
        ("up", 0, "Linear", 0),
        ("act", 0, "Tanh", 0),
        ("down", 0, "Linear", 0),
    ]
    np.testing.assert_array_equal(record.calls[0].inputs["0"], X)
    np.testing.assert_allclose(record.calls[2].outputs[""], hidden, rtol=1e-14)
    np.testing.assert_allclose(record.calls[3].inputs["0"], hidden, rtol=1e-14)
    np.testing.assert_allclose(record.calls[0].outputs[""], output, rtol=1e-14)
    assert record.loss == pytest.approx((output**2).sum(), rel=1e-14)
    np.testing.assert_allclose(record.calls[0].gradients[""], 2 * output, rtol=1e-14)
    np.testing.assert_allclose(record.calls[2].gradients[""], 2 * output @ weights["down.weight"], rtol=1e-13)
    np.testing.assert_allclose(record.gradients["down.weight"], 2 * output.T @ hidden, rtol=1e-13)
    assert list(record.gradients) == ["up.weight", "up.bias", "down.weight", "down.bias"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", np.float32),
        ("float64", np.float64),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float16", np.float16),
    ],
)
def test_all_arrays_of_a_record_have_the_dtype_of_the_run(dtype: str, expected: Any) -> None:
    record = TorchSide(mlp()).record(X, dtype)
    parts = [part for call in record.calls for part in (call.inputs, call.outputs, call.gradients)]
    arrays = [array for part in parts for array in part.values()]
    assert len(arrays) == 12
    assert {array.dtype for array in (*arrays, *record.gradients.values())} == {np.dtype(expected)}
    assert record.dtype == dtype
    exact = TorchSide(mlp()).record(X, "float64").calls[0].outputs[""]
    np.testing.assert_allclose(record.calls[0].outputs[""].astype(float), exact, rtol=0.05, atol=0.02)


def test_without_a_backward_there_are_no_gradients() -> None:
    record = TorchSide(mlp()).record(X, backward=False)
    assert record.gradients == {}
    assert not any(call.gradients for call in record.calls)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Packed:
    value: Any
    note: str = "n"


class Many(nn.Module):
    """All sorts of arguments and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner((x, [2 * x, None]), 3, packed=Packed(x + 1), flags=x > 0)
        pair, packed, table, counts, nothing = out
        assert isinstance(pair, Pair)
        assert isinstance(packed, Packed)
        assert packed.note == "n"
        assert nothing is None
        return pair.left + pair.right + packed.value + table["a"][0] * counts


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, pair: Any, times: int, *, packed: Packed, flags: torch.Tensor) -> Any:
        x = pair[0] * self.w
        counts = flags.long().sum()
        return Pair(x * times, pair[1][0] * self.w), Packed(packed.value * self.w), {"a": [x]}, counts, None


def test_leaves_are_named_by_their_places_in_arguments_and_outputs() -> None:
    record = TorchSide(Many()).record(X, "float64")
    call = record.find("inner")
    assert call is not None
    assert list(call.inputs) == ["0.0", "0.1.0", "packed.value", "flags"]
    assert call.inputs["flags"].dtype == np.bool_
    assert list(call.outputs) == ["0.left", "0.right", "1.value", "2.a.0", "3"]
    assert call.outputs["3"].dtype == np.int64
    assert call.outputs["3"].shape == ()
    assert list(call.gradients) == ["0.left", "0.right", "1.value", "2.a.0"]
    count = (X > 0).sum()
    np.testing.assert_allclose(call.gradients["2.a.0"], count * call.gradients["0.left"], rtol=1e-14)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = mlp().up
        self.block = nn.Sequential(nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.block(self.inner(x)))


def test_calls_of_one_module_have_numbers() -> None:
    record = TorchSide(Twice()).record(X)
    assert [(call.path, call.number, call.parent) for call in record.calls] == [
        ("", 0, None),
        ("inner", 0, 0),
        ("block", 0, 0),
        ("block.0", 0, 2),
        ("inner", 1, 0),
    ]
    assert record.find("inner", 1) is record.calls[4]


class Shared(nn.Module):
    """One module under two names, and one weight under two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = self.first
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(x))


def test_of_two_names_the_first_is_used() -> None:
    side = TorchSide(Shared(), squares)
    record = side.record(X, "float64")
    assert [call.path for call in record.calls] == ["", "first", "third"]
    assert list(side.weights()) == list(record.gradients) == ["first.weight", "third.bias"]
    rerun = side.rerun("float64", "third", 0, {}, cotangents=record.calls[2].gradients)
    assert list(rerun.gradients) == ["first.weight", "third.bias"]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lin = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.lin(x))
        b = self.block(h)
        b += h
        return b * b


class OutOfPlace(InPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x).relu()
        self.act(h.clone())
        b = self.block(h) + h
        return b * b


def test_changes_in_place_change_neither_what_was_noted_nor_gradients() -> None:
    with_changes, without = (
        TorchSide(model_class()).record(X, "float64") for model_class in (InPlace, OutOfPlace)
    )
    assert (with_changes.find("lin").outputs[""] < 0).any()
    assert not (with_changes.find("act").outputs[""] < 0).any()
    for path in ("", "lin", "block", "block.0"):
        call, other = with_changes.find(path), without.find(path)
        np.testing.assert_array_equal(call.outputs[""], other.outputs[""])
        np.testing.assert_allclose(call.gradients[""], other.gradients[""], rtol=1e-14, err_msg=path)
    for name, gradient in without.gradients.items():
        np.testing.assert_allclose(with_changes.gradients[name], gradient, rtol=1e-14)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.lin(x)
        out *= 7
        return out


class ChangedLater(nn.Module):
    """Changes an input that a module returned as it was, and an output that was changed inside before."""

    def __init__(self, path: str) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.lin = nn.Linear(4, 4)
        self.same = nn.Identity()
        self.block = Adding()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        if self.path == "same":
            out = self.same(h)
            out *= 3
            return out + 5 * h
        out = self.block(h)
        out *= 3
        return out * out


@pytest.mark.parametrize("path", ["same", "block"])
def test_a_gradient_that_cannot_be_told_is_left_out(path: str) -> None:
    record = TorchSide(ChangedLater(path), squares).record(X, "float64")
    assert record.find(path).gradients == {}
    output = record.calls[0].outputs[""]
    lin = record.find("lin")
    if path == "same":
        np.testing.assert_allclose(output, 18 * lin.outputs[""], rtol=1e-14)
        np.testing.assert_allclose(lin.gradients[""], 36 * output, rtol=1e-13)


def test_buffers_that_are_saved_follow_the_dtype_and_constants_follow_to_float64_only() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("saved", torch.ones(1))
            self.register_buffer("constant", torch.ones(1), persistent=False)
            self.register_buffer("count", torch.ones(1, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> Any:
            return self.w, self.saved, self.constant, self.count

    side = TorchSide(Buffers())
    for dtype, constant in (("float32", "float32"), ("bfloat16", "float32"), ("float64", "float64")):
        outputs = side.record(X, dtype).calls[0].outputs
        assert [array.dtype.name for array in outputs.values()] == [dtype, dtype, constant, "int32"]


class PassThrough(nn.Module):
    """An output that is an input, and one that is used inside before it is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lin = nn.Linear(4, 4)
        self.same = nn.Identity()
        self.inner = Weights()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        out, weights = self.inner(h)
        return 3 * self.same(h) + 5 * h + out + 7 * weights


class Weights(nn.Module):
    def forward(self, h: torch.Tensor) -> Any:
        weights = 2 * h
        return weights * 11, weights


def test_the_gradient_of_an_output_is_that_of_its_uses_outside_of_the_module() -> None:
    record = TorchSide(PassThrough(), lambda model, batch: model(batch).sum()).record(X, "float64")
    gradients = {
        call.path: {leaf: gradient.mean() for leaf, gradient in call.gradients.items()}
        for call in record.calls
    }
    assert gradients == {"": {"": 1}, "lin": {"": 44}, "same": {"": 3}, "inner": {"0": 1, "1": 7}}


def test_two_runs_of_a_record_are_equal_and_leave_model_buffers_modes_and_random_numbers_as_they_were() -> (
    None
):
    torch.manual_seed(6)
    first_layers = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), nn.BatchNorm1d(5))
    model = nn.Sequential(*first_layers[:1], first_layers[1:], nn.Dropout(0.5), nn.Linear(5, 2))
    model[3].eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    side = TorchSide(model)
    first = side.record(X)
    rerun = side.rerun("float32", "", 0, {})
    again = side.rerun("float32", "2", 0, {})
    assert torch.equal(random, torch.get_rng_state())
    torch.manual_seed(99)
    random = torch.get_rng_state()
    second = side.record(X)
    train = side.train([X, X])
    assert first.loss == second.loss
    assert train.losses[0] == first.loss
    np.testing.assert_array_equal(rerun.outputs[""], first.calls[0].outputs[""])
    dropped = first.find("2").outputs[""]
    assert 0 < (dropped == 0).sum() < dropped.size
    np.testing.assert_array_equal(again.outputs[""], dropped)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert [module.training for module in model] == [True, True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    # Statistics of the batch, not those that earlier runs left.
    np.testing.assert_allclose(first.find("1.2").outputs[""].mean(0), 0, atol=1e-6)


def test_the_mode_of_the_model_is_that_of_the_run() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    side = TorchSide(model)
    np.testing.assert_array_equal(side.record(X, "float64").calls[1].outputs[""], X)
    model.train()
    assert (side.record(X, "float64").calls[1].outputs[""] == 0).any()


class Stateful(nn.Module):
    """Counts its calls in an attribute and in a new buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.register_buffer("last", x)
        return x * self.w * self.calls


def test_attributes_and_new_buffers_are_gone_after_a_run() -> None:
    model = Stateful()
    side = TorchSide(model)
    record = side.record(X)
    for _ in range(2):
        np.testing.assert_array_equal(
            side.rerun("float32", "", 0, {}).outputs[""], record.calls[0].outputs[""]
        )
    assert model.calls == 0
    assert not dict(model.named_buffers())


def test_a_model_that_holds_computed_tensors_is_copied() -> None:
    model = mlp()
    model.last = model(torch.zeros(4))
    assert TorchSide(model).record(X).loss is not None


def test_frozen_parameters_have_gradients_and_are_not_trained() -> None:
    model = mlp()
    model.up.requires_grad_(False)
    side = TorchSide(model)
    assert np.abs(side.record(X).gradients["up.weight"]).max() > 0
    trained = side.train([X])
    np.testing.assert_array_equal(trained.last["up.weight"], side.weights()["up.weight"])
    assert (trained.last["down.weight"] != side.weights()["down.weight"]).all()
    assert not model.up.weight.requires_grad


def test_parameters_that_the_loss_does_not_depend_on_have_zeros() -> None:
    model = mlp()
    model.unused = nn.Linear(2, 2)
    record = TorchSide(model, lambda model, batch: model.up(batch).sum()).record(X)
    np.testing.assert_array_equal(record.gradients["unused.bias"], np.zeros(2, np.float32))
    constant = TorchSide(model, lambda model, batch: model(batch).detach().sum()).record(X)
    assert {float(np.abs(gradient).max()) for gradient in constant.gradients.values()} == {0.0}


def test_values_that_are_not_finite_are_recorded() -> None:
    record = TorchSide(mlp()).record(np.full((1, 4), np.nan))
    assert np.isnan(record.loss)
    assert np.isnan(record.gradients["up.weight"]).all()


def test_calls_that_checkpointing_makes_in_the_backward_are_not_recorded() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner = mlp()
            self.first = nn.Linear(4, 4)
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)

    torch.manual_seed(0)
    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        record = TorchSide(model).record(X)
        paths = ["", "first", "inner", "inner.up", "inner.act", "inner.down"]
        assert [call.path for call in record.calls] == paths
        assert np.abs(record.gradients["inner.up.weight"]).max() > 0


def test_a_compiled_model_runs_uncompiled() -> None:
    model = mlp()
    expected = TorchSide(model).record(X)
    model.down = torch.compile(model.down)
    record = TorchSide(model).record(X)
    assert record.loss == expected.loss
    assert record.find("down._orig_mod") is not None


# Losses and batches


def test_the_probe_is_a_sum_of_outputs_times_numbers_of_their_places() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor, y: Any = None) -> Any:
            return {"a": x * self.w, "n": torch.arange(3), "b": [self.w if y is None else y * self.w]}

    side = TorchSide(Two())

    def expected(y: np.ndarray) -> float:
        a = (X * 2 * probe_values("0", (3, 4))).sum() / np.sqrt(12)
        return a + (y * probe_values("1", y.shape)).sum() / np.sqrt(y.size)

    ones = np.ones((2, 4), np.float32)
    assert side.record(X, "float64").loss == pytest.approx(expected(np.full(4, 2.0)), rel=1e-13)
    assert side.record((X, ones), "float64").loss == pytest.approx(expected(2 * ones), rel=1e-13)
    assert side.record({"y": ones, "x": X}, "float64").loss == pytest.approx(expected(2 * ones), rel=1e-13)
    with pytest.raises(ValueError, match="no floating-point array"):
        TorchSide(Function.of(lambda x: torch.arange(2))).record(X)


class Function(nn.Module):
    """A function as a model."""

    @classmethod
    def of(cls, function: Any) -> nn.Module:
        model = cls()
        model.function, model.w = function, nn.Parameter(torch.ones(1))
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def test_the_numbers_of_a_probe_are_the_same_everywhere() -> None:
    numbers = probe_values("a.0", (2, 1))
    np.testing.assert_allclose(numbers, [[0.6666254038968465], [-0.30654347011069055]], rtol=1e-15)
    assert probe_values("", ()).shape == ()
    assert (probe_values("", (3,)) != probe_values("0", (3,))).all()


@dataclass
class Logits:
    logits: Any


class Named(nn.Embedding):
    def forward(self, x: torch.Tensor) -> Any:
        return Logits(super().forward(x))


@pytest.mark.parametrize("model_class", [nn.Embedding, Named])
def test_next_token_is_the_mean_cross_entropy_of_the_shifted_tokens(model_class: type[nn.Embedding]) -> None:
    tokens = RNG.integers(0, 5, (2, 4)).astype(np.int32)
    model = model_class(5, 5)
    logits = model.weight.detach().double().numpy()[tokens[:, :-1]]
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(likely, tokens[:, 1:, None].astype(int), -1).mean()
    side = TorchSide(model, "next_token")
    assert side.record(tokens, "float64").loss == pytest.approx(expected, rel=1e-14)
    # The cross-entropy of bfloat16 logits is computed in float32.
    low = side.record(tokens, "bfloat16").loss
    assert low is not None
    assert low != float(ml_dtypes.bfloat16(low))


def test_floats_of_a_batch_get_the_dtype_of_the_run_and_integers_int64() -> None:
    seen: list[Any] = []
    batch = {
        "f": [np.ones(2, np.float64)],
        "i": np.ones(2, np.uint8),
        "b": np.ones(2, bool),
        "t": "text",
        "n": None,
    }

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return model(batch["f"][0].new_zeros(4)).sum()

    for dtype in ("float32", "bfloat16"):
        TorchSide(mlp(), loss).record(batch, dtype)
    assert [
        (batch["f"][0].dtype, batch["i"].dtype, batch["b"].dtype, batch["t"], batch["n"]) for batch in seen
    ] == [
        (torch.float32, torch.int64, torch.bool, "text", None),
        (torch.bfloat16, torch.int64, torch.bool, "text", None),
    ]


# One module again


def test_a_rerun_without_changes_is_the_recorded_call_with_the_same_gradients() -> None:
    for model in (Many(), Twice(), Shared(), InPlace(), PassThrough()):
        side = TorchSide(model)
        record = side.record(X, "float64")
        for index, call in enumerate(record.calls):
            rerun = side.rerun("float64", call.path, call.number, {}, cotangents=call.gradients)
            assert rerun.outputs.keys() == call.outputs.keys()
            for leaf, array in call.outputs.items():
                np.testing.assert_array_equal(rerun.outputs[leaf], array)
            inside = [inner for inner in record.calls[index + 1 :] if _within(record, inner, index)]
            assert [(inner.path, inner.number) for inner in rerun.calls] == [
                (inner.path, inner.number) for inner in inside
            ]
            for again, recorded in zip(rerun.calls, inside, strict=True):
                assert again.parent == (None if recorded.parent == index else recorded.parent - index - 1)
                np.testing.assert_array_equal(
                    again.outputs[next(iter(recorded.outputs))], next(iter(recorded.outputs.values()))
                )
        whole = side.rerun("float64", "", 0, {}, cotangents=record.calls[0].gradients)
        for name, gradient in record.gradients.items():
            np.testing.assert_allclose(whole.gradients[name], gradient, rtol=1e-13)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.up = nn.Linear(4, 22)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.act(gate) * up


def test_inputs_of_a_rerun_lie_in_memory_as_those_of_the_call_did() -> None:
    strides: list[Any] = []
    model = Gated()
    model.act.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
    side = TorchSide(model)
    record = side.record(X, "float64")
    cotangents = record.find("act").gradients
    rerun = side.rerun("float64", "act", 0, {}, cotangents=cotangents)
    assert strides == [(22, 1)] * 2
    np.testing.assert_array_equal(rerun.outputs[""], record.find("act").outputs[""])
    assert rerun.input_gradients["0"].shape == (3, 11)


def _within(record: Any, call: Any, index: int) -> bool:
    while call.parent is not None:
        if call.parent == index:
            return True
        call = record.calls[call.parent]
    return False


def test_a_rerun_takes_inputs_and_cotangents() -> None:
    model = mlp()
    side = TorchSide(model)
    side.record(X, "float64")
    weight, bias = (side.weights()[name].astype(float) for name in ("up.weight", "up.bias"))
    other, cotangent = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 6))
    rerun = side.rerun("float64", "up", 0, {"0": other}, cotangents={"": cotangent})
    np.testing.assert_allclose(rerun.outputs[""], other @ weight.T + bias, rtol=1e-13)
    np.testing.assert_allclose(rerun.input_gradients["0"], cotangent @ weight, rtol=1e-13)
    np.testing.assert_allclose(rerun.gradients["up.weight"], cotangent.T @ other, rtol=1e-12)
    assert list(rerun.gradients) == ["up.weight", "up.bias"]
    none = side.rerun("float64", "up", 0, {"0": other}, cotangents={})
    assert not none.input_gradients["0"].any()
    assert not none.gradients["up.bias"].any()
    plain = side.rerun("float64", "up", 0, {"0": other})
    assert plain.gradients == plain.input_gradients == {}


def test_inputs_are_cast_to_the_dtype_of_the_recorded_leaf() -> None:
    side = TorchSide(Many())
    side.record(X, "bfloat16")
    rerun = side.rerun("bfloat16", "inner", 0, {"0.0": X.astype(np.float64), "flags": np.ones((3, 4))})
    assert rerun.outputs["0.left"].dtype == ml_dtypes.bfloat16
    assert rerun.outputs["3"] == 12


def test_a_rerun_works_on_inputs_that_the_module_changes() -> None:
    side = TorchSide(InPlace())
    record = side.record(X, "float64")
    ones = np.ones((3, 4))
    for _ in range(2):
        rerun = side.rerun("float64", "act", 0, {}, cotangents={"": ones})
        np.testing.assert_array_equal(rerun.outputs[""], record.find("act").outputs[""])
        np.testing.assert_array_equal(rerun.input_gradients["0"], (record.find("lin").outputs[""] > 0) * ones)


def test_replaced_outputs_are_what_the_module_goes_on_with() -> None:
    side = TorchSide(Twice(), squares)
    record = side.record(X, "float64")
    other = RNG.standard_normal((3, 4))
    rerun = side.rerun(
        "float64", "", 0, {}, cotangents={"": np.ones((3, 6))}, replaced={("block", 0): {"": other}}
    )
    own = record.find("block").outputs[""]
    np.testing.assert_array_equal(rerun.calls[1].outputs[""], own)
    np.testing.assert_array_equal(rerun.calls[3].inputs["0"], other)
    np.testing.assert_array_equal(
        rerun.outputs[""], side.rerun("float64", "inner", 1, {"0": other}).outputs[""]
    )
    # The replacement is a constant: no gradient goes on from it.
    assert not rerun.gradients["block.0.weight"].any()
    assert not rerun.input_gradients["0"].any()
    weight = side.weights()["inner.weight"].astype(float)
    np.testing.assert_allclose(rerun.calls[1].gradients[""], np.ones((3, 6)) @ weight, rtol=1e-13)


def test_numbers_of_calls_inside_count_from_0_in_a_rerun() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(x))

    side = TorchSide(Outer())
    side.record(X)
    other = RNG.standard_normal((3, 4)).astype(np.float32)
    rerun = side.rerun("float32", "twice", 1, {}, replaced={("twice.0", 0): {"": other}})
    assert [(call.path, call.number, call.parent) for call in rerun.calls] == [("twice.0", 0, None)]
    np.testing.assert_array_equal(rerun.outputs[""], other)


def test_calls_and_leaves_that_are_not_there_are_named() -> None:
    side = TorchSide(Twice())
    with pytest.raises(KeyError, match="'inner', call 0: no such call was recorded in float32"):
        side.rerun("float32", "inner", 0, {})
    side.record(X)
    with pytest.raises(KeyError, match="'inner', call 2: no such call"):
        side.rerun("float32", "inner", 2, {})
    with pytest.raises(
        KeyError, match=r"the input of 'inner', call 0 has no leaf 'x': expected one of \['0'\]"
    ):
        side.rerun("float32", "inner", 0, {"x": X})
    with pytest.raises(ValueError, match=r"leaf '0': expected shape \(3, 4\), got \(2,\)"):
        side.rerun("float32", "inner", 0, {"0": np.ones(2)})
    with pytest.raises(KeyError, match="the output of 'inner', call 0 has no leaf '1'"):
        side.rerun("float32", "inner", 0, {}, cotangents={"1": X})
    with pytest.raises(KeyError, match="made no call of 'inner', call 7"):
        side.rerun("float32", "", 0, {}, replaced={("inner", 7): {"": X}})
    with pytest.raises(ValueError, match="the output of 'block', call 0, leaf ''"):
        side.rerun("float32", "", 0, {}, replaced={("block", 0): {"": np.ones(2)}})


class Cache:
    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = CachingLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        return self.layer(self.layer(x, cache), cache)


class CachingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.held.append(super().forward(x))
        return torch.stack(cache.held).sum(0)


def test_objects_that_calls_write_into_are_as_before_the_call_in_each_rerun() -> None:
    side = TorchSide(Caching())
    record = side.record(X)
    for number in (0, 1, 1):
        rerun = side.rerun("float32", "layer", number, {})
        np.testing.assert_array_equal(rerun.outputs[""], record.find("layer", number).outputs[""])


def test_a_rerun_is_in_the_autocast_region_of_the_call() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.lin(x)

    side = TorchSide(Casting())
    record = side.record(X)
    assert record.find("lin").outputs[""].dtype == ml_dtypes.bfloat16
    assert side.rerun("float32", "lin", 0, {}).outputs[""].dtype == ml_dtypes.bfloat16
    exact = side.record(X, "float64").find("lin")
    weight, bias = (side.weights()[name].astype(float) for name in ("lin.weight", "lin.bias"))
    np.testing.assert_allclose(exact.outputs[""], X @ weight.T + bias, rtol=1e-13)


# Weights and training


def test_loaded_weights_reach_the_model_records_and_reruns() -> None:
    model = mlp()
    side = TorchSide(model)
    side.record(X, "float64")
    weights = {name: RNG.standard_normal(array.shape) for name, array in side.weights().items()}
    side.load(weights)
    assert side.weights()["up.bias"].dtype == np.float32
    np.testing.assert_array_equal(model.up.bias.detach().numpy(), weights["up.bias"].astype(np.float32))
    rerun = side.rerun("float64", "up", 0, {})
    expected = X @ weights["up.weight"].astype(np.float32).astype(float).T + weights["up.bias"].astype(
        np.float32
    )
    np.testing.assert_allclose(rerun.outputs[""], expected, rtol=1e-13)
    np.testing.assert_array_equal(side.record(X, "float64").find("up").outputs[""], rerun.outputs[""])


def test_weights_that_do_not_fit_are_named_and_none_is_set() -> None:
    side = TorchSide(mlp())
    own = side.weights()
    with pytest.raises(ValueError, match=r"missing \['up.bias'\], unexpected \['more'\]"):
        side.load({**{name: array for name, array in own.items() if name != "up.bias"}, "more": X})
    with pytest.raises(ValueError, match=r"down.weight: expected shape \(2, 6\), got \(6, 2\)"):
        side.load({**{name: array + 1 for name, array in own.items()}, "down.weight": own["down.weight"].T})
    np.testing.assert_array_equal(side.weights()["up.weight"], own["up.weight"])


def test_training_is_that_of_a_loop_written_by_hand() -> None:
    batches = [RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(3)]
    model = mlp()
    side = TorchSide(model, squares)
    training = side.train(batches)
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3, weight_decay=0.01)
    for step, batch in enumerate(batches):
        loss = by_hand(torch.from_numpy(batch)).square().sum()
        assert training.losses[step] == loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected = {name: parameter.detach().numpy().copy() for name, parameter in by_hand.named_parameters()}
        if step in (0, 2):
            trained = training.first if step == 0 else training.last
            for name, array in expected.items():
                np.testing.assert_array_equal(trained[name], array)
    assert side.train(batches, "float64").last["up.weight"].dtype == np.float64
    by_sgd = TorchSide(
        model, squares, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    ).train(batches[:1])
    gradient = side.record(batches[0]).gradients["up.bias"]
    np.testing.assert_allclose(by_sgd.last["up.bias"], side.weights()["up.bias"] - 0.5 * gradient, rtol=1e-6)


# Errors


def test_errors_say_what_was_given() -> None:
    with pytest.raises(ValueError, match="Tanh has no parameters"):
        TorchSide(nn.Tanh())
    with pytest.raises(ValueError, match=r"up.weight: a parameter on the meta device"):
        TorchSide(mlp().to("meta"))
    with pytest.raises(
        ValueError, match="expected a loss among probe, next_token or a function, got 'other'"
    ):
        TorchSide(mlp(), "other")
    side = TorchSide(mlp())
    with pytest.raises(ValueError, match=r"expected a dtype among float32, .*, got 'int8'"):
        side.record(X, "int8")
    with pytest.raises(
        ValueError, match=r"refused the batch \(x float32 \[3, 4\], n int64 \[2\]\): TypeError"
    ):
        side.record({"x": X, "n": np.arange(2)})
    with pytest.raises(ValueError, match=r"floating-point scalar, got torch.float32 \[3, 2\]"):
        TorchSide(mlp(), lambda model, batch: model(batch)).record(X)
    with pytest.raises(ValueError, match="floating-point scalar, got float"):
        TorchSide(mlp(), lambda model, batch: model(batch).sum().item()).record(X)
    with pytest.raises(ValueError, match="called no module"):
        TorchSide(mlp(), lambda model, batch: batch.sum()).record(X)
    with pytest.raises(ValueError, match="at least one batch"):
        side.train([])
    with pytest.raises(ValueError, match=r"integer tokens \[B, T \+ 1\], got torch.float32 \[3, 4\]"):
        TorchSide(mlp(), "next_token").record(X)
    with pytest.raises(ValueError, match=r"two arrays at 'a.b'"):
        side.record({"a.b": X, "a": {"b": X}})


def test_sharded_models_give_whole_weights_and_are_refused_otherwise() -> None:
    class Sharded(torch.Tensor):
        """Has a DTensor's name for its whole."""

        def full_tensor(self) -> torch.Tensor:
            return torch.arange(8.0)

    model = mlp()
    model.up.bias = nn.Parameter(torch.zeros(3).as_subclass(Sharded))
    side = TorchSide(model)
    np.testing.assert_array_equal(side.weights()["up.bias"], np.arange(8.0))
    for call in (lambda: side.record(X), lambda: side.train([X]), lambda: side.load(side.weights())):
        with pytest.raises(ValueError, match=r"up.bias is sharded .* or build the model unsharded"):
            call()


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex128, torch.float32, torch.complex64),
        # There is no complex dtype of as many bits.
        (torch.complex64, torch.bfloat16, torch.complex64),
        (torch.int64, torch.float64, torch.int64),
        (torch.bool, torch.float32, torch.bool),
    ],
)
def test_floating_and_complex_tensors_alone_are_cast(
    stored: torch.dtype, asked: torch.dtype, expected: torch.dtype
) -> None:
    tensor = torch.ones(3).to(stored)
    assert torch.equal(cast(tensor, asked), tensor.to(expected))
    assert cast(tensor, asked).dtype == expected
