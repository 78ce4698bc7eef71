"""``convert --like``: training goes on in the other library as if it had never changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from bridge import convert
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


@pytest.mark.pairwise
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


@pytest.mark.pairwise
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


def order(chain: Chain, layout: Layout, folder: Path) -> str | None:
    """The order of the weights, where torch only numbers them."""
    if not layout.numbered:
        return None
    training = TorchTraining(chain, seed=0)
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    lines = [names[id(p)] for group in training.optimizer.param_groups for p in group["params"]]
    (folder / "order.txt").write_text("\n".join(lines))
    return str(folder / "order.txt")
