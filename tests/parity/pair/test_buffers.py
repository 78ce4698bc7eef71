"""Running statistics, counters and tables are copied and compared, before and after runs, or they are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from bridge.core.formats import create_checkpoint
from bridge.core.mapping.language.rules import mapping_of
from bridge.parity import capture_jax, capture_torch, parity
from bridge.parity.compare.captured import compare_traces
from bridge.parity.compare.parity import stored_weights
from bridge.parity.jax.side import JaxSide
from bridge.parity.report_page.report import ParityReport
from bridge.parity.torch.side import TorchSide

X = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
STATISTICS = (("norm.running_mean", "norm/mean"), ("norm.running_var", "norm/var"))


def table(
    *rules: tuple[str, str], affine: bool = True, root: str = "", drop: str = "*tracked"
) -> dict[str, Any]:
    norm = (("norm.weight", f"{root}norm/scale"), ("norm.bias", f"{root}norm/bias")) if affine else ()
    every = (("fc.weight : o i_", f"{root}fc/kernel : i_ o"), ("fc.bias", f"{root}fc/bias"), *norm, *rules)
    return {"name": "b", "drop": [drop], "rule": [{"torch": a, "jax": b} for a, b in every]}


class Torch(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(5, 6), norm or nn.BatchNorm1d(6)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


class Jax(nnx.Module):
    def __init__(self, **options: Any) -> None:
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(5, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, **{"epsilon": 1e-5, "momentum": 0.9, "rngs": rngs, **options})

    def __call__(self, x: Any) -> Any:
        return self.norm(self.fc(x))


def compared(ours: nn.Module, theirs: Any, mapping: dict[str, Any], **options: Any) -> ParityReport:
    return parity(ours, theirs, X, mapping=mapping, **{"weights": "torch", "steps": 0, **options})


def test_statistics_are_copied_either_way_and_put_back():
    ours, theirs = Torch().eval(), Jax()
    theirs.eval()
    before = np.asarray(theirs.norm.var[...]), ours.norm.running_var.clone()
    for weights in ("torch", "jax"):
        report = compared(ours, theirs, table(*STATISTICS), weights=weights, steps=2)
        assert report, report.summary()
        assert len(report.stage("buffers")) == 2
        assert "norm.num_batches_tracked" in report.summary()
        assert report.complete
    assert np.array_equal(before[0], theirs.norm.var[...])
    assert torch.equal(before[1], ours.norm.running_var)
    own = compared(ours, theirs, table(*STATISTICS), weights="own")
    assert not own
    assert {row.partner for row in own.stage("weights") if row.kind == "buffer" and row.counts} == {
        "norm/mean",
        "norm/var",
    }


def test_a_wrong_momentum_is_named():
    report = compared(Torch(), Jax(momentum=0.1), table(*STATISTICS), steps=2)
    first = report.first_divergence
    assert first is not None
    assert (first.stage, first.name) == ("buffers", "norm.running_mean")
    assert "9 times as far" in first.cause
    assert any(row.stage == "steps" and row.kind == "buffer" and row.counts for row in report.rows)


def test_an_unbiased_variance_against_a_biased_one_is_named():
    report = compared(Torch(), Jax(), table(*STATISTICS))
    (row,) = [row for row in report.rows if row.counts]
    assert (row.stage, row.name) == ("buffers", "norm.running_var")
    assert "unbiased variance, 8 / 7 times" in row.cause
    assert "not a fault of the port" in report.summary()
    # The two ways out that the cause names.
    dropped = {**table(STATISTICS[0]), "drop": ["*tracked", "norm.running_var", "norm/var"]}
    report = compared(Torch(), Jax(), dropped, steps=2)
    assert report
    assert report.dropped_buffers == ("norm.num_batches_tracked", "norm.running_var", "norm/var")
    assert (report.torch_buffers, report.jax_buffers, report.changed_buffers) == ((), (), ())
    assert compared(Torch().eval(), _in_mode(Jax(), False), table(*STATISTICS), steps=2)


def test_a_wrong_epsilon_over_statistics_is_seen():
    ours, theirs = Torch().eval(), Jax(epsilon=1e-3)
    theirs.eval()
    report = compared(ours, theirs, table(*STATISTICS))
    assert report.first_divergence is not None
    assert (report.first_divergence.stage, report.first_divergence.name) == ("forward", "norm")


def test_a_norm_without_parameters_has_a_partner_by_its_statistics():
    ours = Torch(nn.BatchNorm1d(6, affine=False)).eval()
    theirs = Jax(use_bias=False, use_scale=False)
    theirs.eval()
    report = compared(ours, theirs, table(*STATISTICS, affine=False))
    assert report, report.summary()
    assert "norm" in {row.name for row in report.stage("forward")}


def test_buffers_without_rules_are_named_and_fail_strictly_where_they_change():
    still, moving = (compared(Torch().train(mode), _in_mode(Jax(), mode), table()) for mode in (False, True))
    for report in (still, moving):
        assert "norm.running_mean" in report.summary()
        assert "norm/var" in report.summary()
    assert moving.changed_buffers == ("norm.running_mean", "norm.running_var", "norm/mean", "norm/var")
    assert "buffers that the forward changes" in moving.conclusion()
    assert still.changed_buffers == ()


def _in_mode(module: nnx.Module, train: bool) -> nnx.Module:
    (module.train if train else module.eval)()
    return module


class Linen(linen.Module):
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(6, name="fc")(x)
        return linen.BatchNorm(use_running_average=False, epsilon=1e-5, momentum=self.momentum, name="norm")(
            x
        )


@pytest.mark.parametrize("named", ["plain", "by collection"])
def test_collections_of_linen_go_on_from_step_to_step(named: str):
    by_collection = named == "by collection"
    statistics = [(a, f"batch_stats/{b}" if by_collection else b) for a, b in STATISTICS]
    mapping = table(*statistics, root="params/" if by_collection else "")
    for momentum, same in ((0.9, True), (0.5, False)):
        model = Linen(momentum)
        variables = model.init(_key(), X)
        report = compared(Torch(), (model, variables), mapping, steps=3)
        mean = [row for row in report.rows if row.partner == "batch_stats/norm/mean"]
        assert {row.stage for row in mean} == {"weights", "buffers", "update", "steps"}
        assert any(row.counts for row in mean) != same


def _key() -> Any:
    import jax

    return jax.random.key(0)


class TableTorch(nn.Module):
    """A table that no checkpoint has, and a counter of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 6)
        self.register_buffer("shift", torch.arange(6.0), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x) + self.shift


class Count(nnx.Variable): ...


class TableJax(nnx.Module):
    def __init__(self, step: int = 1, rate: float = 0.0) -> None:
        self.fc = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
        self.shift = jnp.zeros(6)
        self.calls = Count(jnp.zeros((), jnp.int32))
        self.step = step
        self.drop = nnx.Dropout(rate, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += self.step
        return self.drop(self.fc(x)) + self.shift


TABLES = {
    "name": "t",
    "rule": [
        {"torch": "fc.weight : o i_", "jax": "fc/kernel : i_ o"},
        {"torch": "fc.bias", "jax": "fc/bias"},
        {"torch": "shift", "jax": "shift"},
        {"torch": "calls", "jax": "calls"},
    ],
}


def test_plain_arrays_tables_and_counters_are_state_too():
    report = compared(TableTorch(), TableJax(), TABLES, steps=2)
    assert report, report.summary()
    assert "RngCount, RngKey" in report.summary()
    wrong = compared(TableTorch(), TableJax(step=2), TABLES, steps=2)
    assert {row.name for row in wrong.rows if row.counts} == {"calls"}
    assert "buffers after the forward differ: calls" in wrong.summary()


def test_state_of_a_function_is_copied_and_not_trained():
    def function(tree: Any, x: Any) -> Any:
        y = x @ tree["fc"]["kernel"] + tree["fc"]["bias"]
        y = (y - tree["norm"]["mean"]) / jnp.sqrt(tree["norm"]["var"] + 1e-5)
        return y * tree["norm"]["scale"] + tree["norm"]["bias"]

    ones = jnp.ones(6)
    norm = {"mean": ones, "var": ones, "scale": ones, "bias": ones}
    tree = {"fc": {"kernel": jnp.ones((5, 6)), "bias": ones}, "norm": norm}
    report = compared(Torch().eval(), (function, tree), table(*STATISTICS), steps=2)
    assert report, report.summary()
    assert [row.name for row in report.stage("weights")].count("norm.running_mean") == 1


def test_traces_hold_buffers(tmp_path: Path):
    capture_torch(
        Torch(), X, tmp_path / "torch.trace", loss=(lambda model, x: model(x).square().sum()), steps=2
    )
    for momentum in (0.9, 0.1):
        capture_jax(
            Jax(momentum=momentum),
            X,
            tmp_path / f"{momentum}.trace",
            loss=lambda model, x: (model(x) ** 2).sum(),
            steps=2,
        )
        report = compare_traces(
            tmp_path / "torch.trace",
            tmp_path / f"{momentum}.trace",
            mapping=mapping_of(table(*STATISTICS), "m"),
        )
        assert {row.stage for row in report.rows if row.kind == "buffer"} == {
            "weights",
            "buffers",
            "update",
            "steps",
        }
        assert "num_batches_tracked" in report.summary()


@pytest.mark.parametrize("way", ["own names", "through the mapping"])
def test_a_checkpoint_gives_buffers_too(tmp_path: Path, way: str):
    state = {name: value.numpy() for name, value in Torch().state_dict().items()}
    with create_checkpoint(tmp_path / "t", "dcp") as writer:
        for name, array in state.items():
            stored = writer.add_tensor(("model", name), array.shape, array.dtype).name
            for box in writer.chunks(stored):
                writer.write(stored, box, np.asarray(array[box.slices()]))
    side = TorchSide(Torch()) if way == "own names" else JaxSide(Jax())
    values, kept = stored_weights(tmp_path / "t", mapping_of(table(*STATISTICS), "m"), side)
    mean = "norm.running_mean" if way == "own names" else "norm/mean"
    assert np.array_equal(values[mean], state["norm.running_mean"])
    assert kept == ()
    if way == "own names":
        assert "norm.num_batches_tracked" in values


class TorchPhase(nn.Module):
    """Counts 1, 2, 3 in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(5, 6)
        self.register_buffer("phase", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.phase += 1
        return self.fc(x)


class JaxPhase(nnx.Module):
    """Counts 1, 2, ... but holds 5 after step ``odd``."""

    def __init__(self, odd: int) -> None:
        self.fc = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
        self.phase, self.count = nnx.Cache(jnp.zeros(1)), nnx.Cache(jnp.zeros(1))
        self.odd = odd

    def __call__(self, x: Any) -> Any:
        self.count[...] = self.count[...] + 1
        self.phase[...] = jnp.where(self.count[...] == self.odd, 5, self.count[...])
        return self.fc(x)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("odd", [2, 3, 9])
def test_buffers_are_compared_after_each_step(odd: int, captured: bool, tmp_path: Path):
    mapping = table(("phase", "phase"), affine=False)
    ours, theirs = TorchPhase(), JaxPhase(odd)
    if captured:
        copied = {"fc/kernel": ours.fc.weight.detach().numpy().T, "fc/bias": ours.fc.bias.detach().numpy()}
        for name, array in copied.items():
            getattr(theirs.fc, name[3:])[...] = jnp.asarray(array)
        capture_torch(ours, X, tmp_path / "torch.trace", steps=4)
        capture_jax(theirs, X, tmp_path / "jax.trace", steps=4)
        report = compare_traces(tmp_path / "torch.trace", tmp_path / "jax.trace", mapping=mapping)
    else:
        report = compared(ours, theirs, mapping, steps=4)
    differing = [(row.stage, row.name, row.note) for row in report.rows if row.counts]
    expected = [("steps", "phase", f"first differs after step {odd}")] if odd < 9 else []
    assert differing == expected, report.summary()
    if expected:
        assert f"phase, first differs after step {odd}" in report.summary()
