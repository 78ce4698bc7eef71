"""Models of every shape that a comparison meets: calls, containers, layouts, stacks, values that are no numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx

from bridge.core.mapping import load_mapping, parse_mapping
from bridge.parity.compare.parity import parity
from bridge.parity.report_page.report import ParityReport, Revealed
from jax_impl.models.decoder import Decoder as JaxDecoder
from jax_impl.models.decoder import DecoderConfig as JaxConfig
from tests.support.parity.pair_tools import compare_pair, tokens
from tests.support.parity.pairs import build
from tests.support.parity.small_twins import BATCH, MAPPING, WIDTH, JaxMLP, TorchMLP
from torch_impl.models.decoder import Decoder, DecoderConfig

LINEAR = """
name = "one"

[[rule]]
torch = "inner.weight : o i"
jax = "inner/kernel : i o"

[[rule]]
torch = "inner.bias"
jax = "inner/bias"
"""


class Torch(torch.nn.Module):
    """A linear layer, and a function of it and of the input."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.way = forward

    def forward(self, x: Any) -> Any:
        return self.way(self.inner, x)


class Jax(nnx.Module):
    """The same in JAX."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.way = forward

    def __call__(self, x: Any) -> Any:
        return self.way(self.inner, x)


@dataclasses.dataclass
class Output:
    """What a model may return; a dataclass is no pytree in JAX."""

    hidden: Any
    cache: Any = None


def both(ours: Callable[[Any, Any], Any], theirs: Callable[[Any, Any], Any], **options: Any) -> ParityReport:
    return parity(
        Torch(ours),
        Jax(theirs),
        options.pop("batch", BATCH),
        mapping=parse_mapping(LINEAR, "one"),
        **{"weights": "torch", "steps": 1, **options},
    )


def twice(f: Any, x: Any) -> Any:
    return f(f(x) + x)


def test_a_module_that_is_called_twice_has_two_rows() -> None:
    report = both(twice, twice)
    assert report.same, report.summary()
    assert [row.call for row in report.stage("forward") if row.name == "inner"] == [0, 1]
    report = both(twice, lambda f, x: f(f(x) + 1.01 * x))
    assert [row.name for row in report.introduced] == [""]


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda f, x: (f(x), 2 * x),
    "nested": lambda f, x: (f(x), (None, [x, {"a": 2 * x}])),
    "dict": lambda f, x: {"logits": f(x), "none": None, "text": "a"},
    "dataclass": lambda f, x: Output(f(x), (x, None)),
    "integers": lambda f, x: (f(x), f(x).argmax(-1)),
    "booleans": lambda f, x: (f(x), f(x) > 0),
}


@pytest.mark.fast_cases("nested", "tuple", "dict")
@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_containers(container: str) -> None:
    report = both(CONTAINERS[container], CONTAINERS[container], loss=(_of_first, _of_first))
    assert report.same, report.summary()
    assert {row.name for row in report.stage("forward")} == {"", "inner"}
    assert not [row for row in report.rows if row.verdict == "unknown"]


def _of_first(model: Any, batch: Any) -> Any:
    output = model(batch)
    if isinstance(output, dict):
        output = output["logits"]
    output = getattr(output, "hidden", output)
    return ((output[0] if isinstance(output, tuple) else output) ** 2).mean()


def test_integers_that_differ_are_a_difference() -> None:
    report = both(
        lambda f, x: (f(x), f(x).argmax(-1)),
        lambda f, x: (f(x), f(x).argmin(-1)),
        loss=(_of_first, _of_first),
    )
    assert [row.name for row in report.introduced] == [""]


def test_values_that_are_no_numbers_on_both_sides() -> None:
    def ours(f: Any, x: Any) -> Any:
        return f(x), torch.where(x > 0.5, torch.nan, x)

    def theirs(f: Any, x: Any) -> Any:
        return f(x), jnp.where(x > 0.5, jnp.nan, x)

    assert both(ours, theirs, loss=(_of_first, _of_first)).same
    report = both(ours, lambda f, x: (f(x), jnp.where(x > 0.9, jnp.nan, x)), loss=(_of_first, _of_first))
    assert [row.name for row in report.introduced] == [""]


def test_a_loss_that_is_no_number_compares_nothing() -> None:
    with pytest.raises(ValueError, match="loss: expected a finite number, got nan in torch and nan in JAX"):
        both(lambda f, x: f(x) * float("nan"), lambda f, x: f(x) * float("nan"))


def test_modules_and_parameters_without_a_partner_are_listed() -> None:
    report = parity(TorchMLP().eval(), JaxMLP(), BATCH, mapping=parse_mapping(MAPPING, "small"), steps=0)
    assert (report.torch_only, report.jax_only) == (("act", "drop"), ("act",))
    assert "torch modules without a partner: act, drop" in list(report.remarks())


def test_dropout_that_is_off_and_on() -> None:
    model, table = TorchMLP(dropout=0.5), parse_mapping(MAPPING, "small")
    assert parity(model.eval(), JaxMLP(), BATCH, mapping=table, steps=0).same
    report = parity(model.train(), JaxMLP(), BATCH, mapping=table, steps=0)
    assert not report.same
    assert report.first_divergence is not None
    assert report.first_divergence.name == ""


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_a_scanned_stack_against_layers(stacked: bool) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 12,
        "d_ff": 40,
    }
    model = Decoder(DecoderConfig(**sizes))
    port = JaxDecoder(JaxConfig(**sizes), stacked=stacked, rngs=nnx.Rngs(0))
    report = parity(
        model,
        port,
        tokens(0, 2, 9),
        mapping=load_mapping("decoder_stacked" if stacked else "decoder"),
        axes={"d": 12},
        loss="next_token",
        weights="torch",
        steps=1,
    )
    assert report.same, report.summary()
    assert {"layers/0/mlp", "layers/1/mlp"} <= {row.partner for row in report.stage("forward")}


def partial_sums_are_rounded() -> bool:
    """Whether torch's transposed convolution rounds overlapping products to float16 before it sums them.

    It does on processors without float16 arithmetic, and then loses nearly twice as much as one rounding of the result.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 12, 8, 8, generator=generator).half()
    weight = (torch.randn(12, 8, 4, 4, generator=generator) / 12).half()
    exact = torch.nn.functional.conv_transpose2d(x.double(), weight.double(), stride=2)
    computed = torch.nn.functional.conv_transpose2d(x, weight, stride=2).double()
    return bool((computed - exact).norm() > 1.5 * (exact.half().double() - exact).norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["convnet", "convnet_train", "gemma2"])
def test_layouts_statistics_and_tied_weights_in_every_dtype(name: str, dtype: str) -> None:
    pair = build(name, 0)
    report = compare_pair(pair, dtype=dtype, steps=1)
    if not report.same and (name, dtype) == ("convnet_train", "float16") and partial_sums_are_rounded():
        first = report.first_divergence
        assert first is not None
        assert first.name == "up", report.summary()
        assert "torch loses" in report.summary()
    else:
        assert report.same, report.summary()
    if name.startswith("convnet"):
        (row,) = (row for row in report.stage("forward") if row.name == "stem.conv")
        assert row.layout.startswith("axes")


def test_an_update_is_the_change_of_the_weights() -> None:
    report = both(lambda f, x: f(x), lambda f, x: f(x), jax_optimizer=optax.adamw(1.1e-3, weight_decay=0.01))
    rows = report.stage("update")
    assert len(rows) == 2
    assert all(0.05 < row.error < 0.15 for row in rows), rows


class TorchPooled(torch.nn.Module):
    """A linear layer whose last features a mask hides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: Any) -> Any:
        return self.inner(x, keep=torch.arange(WIDTH) < 3)


class Masked(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Any, keep: Any) -> Any:
        return super().forward(x) * keep


def test_a_mask_that_only_torch_gets_is_named() -> None:
    report = parity(
        TorchPooled(),
        Jax(lambda inner, x: inner(x)),
        BATCH,
        mapping=parse_mapping(LINEAR, "one"),
        weights="torch",
        steps=1,
    )
    assert "torch's inputs keep have no twin: they may be the cause" in report.summary()
    assert report.table()[1][-1] == report.first_divergence.note  # type: ignore[union-attr]


def test_remarks_say_how_many_hidden_faults_they_leave_out() -> None:
    report = both(lambda inner, x: inner(x), lambda inner, x: inner(x))
    faults = tuple(Revealed(f"fault {number}", "inner", False, 0.0) for number in range(11))
    *_, last = dataclasses.replace(report, revealed=faults).remarks()
    assert last == "  not shown: ... and 3 more; the report lists all"


@pytest.mark.parametrize(("weights", "scale"), [("own", 3.0), ("torch", None), ("jax", None), ("jax", 3.0)])
def test_both_models_keep_their_weights(weights: str, scale: float | None) -> None:
    torch_model, jax_model = TorchMLP(seed=1), JaxMLP(seed=2)
    own = [param.detach().clone() for param in torch_model.parameters()]
    theirs = nnx.state(nnx.clone(jax_model))
    table = parse_mapping(MAPPING, "small")
    parity(torch_model, jax_model, BATCH, mapping=table, weights=weights, scale=scale, steps=0)
    assert all(torch.equal(a, b) for a, b in zip(own, torch_model.parameters(), strict=True))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, nnx.state(jax_model), theirs)))
