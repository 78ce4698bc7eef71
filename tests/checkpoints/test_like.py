"""``convert --like``: training goes on in the other library as if it had never changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from bridge import CheckpointError, Selection, convert
from bridge.core.formats import open_checkpoint
from tests.support.bridge.torch_layouts import LAYOUTS, Layout
from tests.support.bridge.trainings import CHAINS, MAPPING, Chain, OptaxTraining, TorchTraining

BEFORE, AFTER = 3, 5


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def require_equal(a: TorchTraining | OptaxTraining, b: TorchTraining | OptaxTraining) -> None:
    ours, theirs = a.weights(), b.weights()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("file", ["dcp", "torch.pt"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_optax_goes_on_where_torch_stopped(chain: Chain, layout: Layout, file: str, tmp_path: Path) -> None:
    torch_side = TorchTraining(chain, seed=1)
    torch_side.train(0, BEFORE)
    layout.write(torch_side.model, torch_side.optimizer, tmp_path / file)
    optax_side = OptaxTraining(chain, TorchTraining(chain, seed=2).weights())
    optax_side.save(tmp_path / "template")

    convert(
        tmp_path / file,
        tmp_path / "arrived",
        mapping=MAPPING,
        like=tmp_path / "template",
        optimizer_order=order(chain, layout, tmp_path),
    )

    optax_side.restore(tmp_path / "arrived")
    assert optax_side.train(BEFORE, AFTER) == pytest.approx(torch_side.train(BEFORE, AFTER), rel=1e-6)
    require_equal(optax_side, torch_side)


@pytest.mark.each_value
@pytest.mark.parametrize("file", ["dcp", "torch.pt"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_torch_goes_on_where_optax_stopped(chain: Chain, layout: Layout, file: str, tmp_path: Path) -> None:
    torch_side = TorchTraining(chain, seed=1)
    optax_side = OptaxTraining(chain, torch_side.weights())
    optax_side.train(0, BEFORE)
    optax_side.save(tmp_path / "optax")
    # A torch optimizer has its state after its first step.
    torch_side.train(7, 1)
    layout.write(torch_side.model, torch_side.optimizer, tmp_path / file)

    convert(
        tmp_path / "optax",
        tmp_path / "arrived",
        mapping=MAPPING,
        like=tmp_path / file,
        optimizer_order=order(chain, layout, tmp_path),
    )

    layout.read(torch_side.model, torch_side.optimizer, tmp_path / "arrived")
    assert torch_side.train(BEFORE, AFTER) == pytest.approx(optax_side.train(BEFORE, AFTER), rel=1e-6)
    require_equal(torch_side, optax_side)


def saved(tmp_path: Path, chain: Chain = CHAINS[0]) -> tuple[Path, Path]:
    """A checkpoint of torch and one of optax."""
    torch_side = TorchTraining(chain, seed=1)
    torch_side.train(0, BEFORE)
    LAYOUTS[0].write(torch_side.model, torch_side.optimizer, tmp_path / "torch")
    OptaxTraining(chain, torch_side.weights()).save(tmp_path / "optax")
    return tmp_path / "torch", tmp_path / "optax"


def test_all_that_the_source_lacks_is_named(tmp_path: Path) -> None:
    source, template = saved(tmp_path, CHAINS[1])
    report = convert(
        source,
        tmp_path / "arrived",
        mapping=MAPPING,
        like=template,
        selection=Selection(drop=("*first.bias*",)),
    )
    assert report.filled == {
        "opt_state/0/mu/first/bias": "as in the template",
        "opt_state/0/nu/first/bias": "as in the template",
        "opt_state/2/count": "the source's step, 3",
        "params/first/bias": "as in the template",
    }


def test_a_state_that_begins_anew_keeps_its_count(tmp_path: Path) -> None:
    source, template = saved(tmp_path)
    weights = Selection(weights_only=True)
    report = convert(source, tmp_path / "arrived", mapping=MAPPING, like=template, selection=weights)
    assert report.filled["opt_state/0/count"] == "as in the template"
    with open_checkpoint(tmp_path / "arrived") as arrived:
        assert arrived.read("opt_state/0/count") == 0


def test_a_weight_without_a_place_is_refused(tmp_path: Path) -> None:
    source, template = saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"params/last/bias: expected a place .* for the weight model.last.bias"
    ):
        convert(
            source,
            tmp_path / "arrived",
            mapping=MAPPING,
            like=without(template, "*last/bias", tmp_path / "small"),
        )
    assert not (tmp_path / "arrived").exists()


def without(checkpoint: Path, pattern: str, path: Path) -> Path:
    convert(checkpoint, path, to="orbax", selection=Selection(drop=(pattern,)))
    return path


def test_another_shape_is_refused(tmp_path: Path) -> None:
    source, _ = saved(tmp_path)
    wider = {"first.weight": np.ones((7, 4)), "first.bias": np.ones(7), "last.weight": np.ones((2, 7))}
    OptaxTraining(CHAINS[0], wider | {"last.bias": np.ones(2)}).save(tmp_path / "wider")
    with pytest.raises(
        CheckpointError, match=r"params/first/bias: expected shape \[7\] as in the template, got \[3\]"
    ):
        convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "wider")


def test_other_names_ask_for_a_mapping(tmp_path: Path) -> None:
    source, template = saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"expected a mapping .*: 2 of 4 names are equal, but not first.weight"
    ):
        convert(source, tmp_path / "arrived", like=template)


def test_equal_names_need_no_mapping(tmp_path: Path) -> None:
    """A chain becomes another chain, with values in the template's dtype."""
    _, source = saved(tmp_path, CHAINS[2])
    side = OptaxTraining(CHAINS[1], TorchTraining(CHAINS[1], seed=2).weights())
    side.save(tmp_path / "template")
    report = convert(source, tmp_path / "arrived", like=tmp_path / "template")
    assert report.conventions is None
    side.restore(tmp_path / "arrived")
    other = OptaxTraining(CHAINS[2], side.weights())
    other.restore(source)
    require_equal(side, other)


def order(chain: Chain, layout: Layout, folder: Path) -> str | None:
    """The order of the weights, where torch only numbers them."""
    if not layout.numbered:
        return None
    training = TorchTraining(chain, seed=0)
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    lines = [names[id(p)] for group in training.optimizer.param_groups for p in group["params"]]
    (folder / "order.txt").write_text("\n".join(lines))
    return str(folder / "order.txt")
