"""``convert --like``: training goes on in the other library as if it had never changed."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from orbax.checkpoint.experimental import v1

from bridge import CheckpointError, Selection, convert, diff, verify
from bridge.checkpoints.convert.plan import ConvertOptions, conversion_key, planned
from bridge.checkpoints.jobs.cluster import convert_on
from bridge.checkpoints.jobs.processes import Processes
from bridge.core.formats import open_checkpoint
from tests.support.bridge.torch_layouts import LAYOUTS, Layout
from tests.support.bridge.trainings import CHAINS, MAPPING, RATE, Chain, OptaxTraining, TorchTraining, adamw

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


CASES = [
    pytest.mark.parametrize("file", ["dcp", "torch.pt"]),
    pytest.mark.parametrize("layout", LAYOUTS, ids=str),
    pytest.mark.parametrize("chain", CHAINS, ids=str),
    pytest.mark.each_value,
]


def every_case(test: Callable[..., None]) -> Callable[..., None]:
    for mark in CASES:
        test = mark(test)
    return test


def arrived(folder: Path, source: str, template: str, chain: Chain, layout: Layout) -> Path:
    names = order(chain, layout, folder)
    target = folder / "arrived"
    convert(folder / source, target, mapping=MAPPING, like=folder / template, optimizer_order=names)
    return target


@every_case
def test_optax_goes_on_where_torch_stopped(chain: Chain, layout: Layout, file: str, tmp_path: Path) -> None:
    torch_side = TorchTraining(chain, seed=1)
    torch_side.train(0, BEFORE)
    layout.write(torch_side.model, torch_side.optimizer, tmp_path / file)
    optax_side = OptaxTraining(chain, TorchTraining(chain, seed=2).weights())
    optax_side.save(tmp_path / "template")
    optax_side.restore(arrived(tmp_path, file, "template", chain, layout))
    assert optax_side.train(BEFORE, AFTER) == pytest.approx(torch_side.train(BEFORE, AFTER), rel=1e-6)
    require_equal(optax_side, torch_side)


@every_case
def test_torch_goes_on_where_optax_stopped(chain: Chain, layout: Layout, file: str, tmp_path: Path) -> None:
    torch_side = TorchTraining(chain, seed=1)
    optax_side = OptaxTraining(chain, torch_side.weights())
    optax_side.train(0, BEFORE)
    optax_side.save(tmp_path / "optax")
    # A torch optimizer has its state after its first step.
    torch_side.train(7, 1)
    layout.write(torch_side.model, torch_side.optimizer, tmp_path / file)
    path = arrived(tmp_path, "optax", file, chain, layout)
    layout.read(torch_side.model, torch_side.optimizer, path)
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


def test_the_count_of_another_part_of_the_chain_that_begins_anew_stays(tmp_path: Path) -> None:
    source, _ = saved(tmp_path)
    other = dataclasses.replace(CHAINS[0], optax=lambda: optax.chain(adamw(), optax.ema(0.9)))
    side = OptaxTraining(other, TorchTraining(other, seed=2).weights())
    side.save(tmp_path / "template")
    convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "template")
    side.restore(tmp_path / "arrived")
    assert [int(side.state[0][0].count), int(side.state[1].count)] == [BEFORE, 0]


def test_a_weight_without_a_place_is_refused(tmp_path: Path) -> None:
    source, template = saved(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"params/last/bias: expected a place .* weights model.last.bias, .* \(--drop 'model.last.bias'\)",
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


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.lion(RATE), "optax.lion or optax.contrib.muon"),
        (optax.amsgrad(RATE), "optax.amsgrad .nu_max"),
        (optax.adafactor(RATE), "optax.adafactor .v"),
    ],
    ids=["lion", "amsgrad", "adafactor"],
)
def test_a_state_of_another_optimizer_in_optax_is_refused(
    optimizer: optax.GradientTransformation, words: str, tmp_path: Path
) -> None:
    source, _ = saved(tmp_path)
    other = dataclasses.replace(CHAINS[0], optax=lambda: optimizer)
    OptaxTraining(other, TorchTraining(other, seed=1).weights()).save(tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"{words}.*--weights-only"):
        convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "other")
    only = Selection(weights_only=True)
    assert convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "other", selection=only)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.NAdam, "NAdam .mu_product"),
        (
            functools.partial(torch.optim.AdamW, amsgrad=True),
            "max_exp_avg_sq as in the template, got exp_avg, exp_avg_sq",
        ),
    ],
    ids=["NAdam", "amsgrad"],
)
def test_a_state_of_another_optimizer_in_torch_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer], words: str, tmp_path: Path
) -> None:
    source, _ = saved(tmp_path)
    other = TorchTraining(dataclasses.replace(CHAINS[0], torch=optimizer), seed=1)
    other.train(0, 1)
    LAYOUTS[0].write(other.model, other.optimizer, tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"{words}.*--weights-only"):
        convert(source, tmp_path / "arrived", like=tmp_path / "other")


def test_the_template_is_not_written_over(tmp_path: Path) -> None:
    source, template = saved(tmp_path)
    with pytest.raises(CheckpointError, match="a file of the template"):
        convert(source, template, mapping=MAPPING, like=template, replace=True)


def test_another_template_is_another_conversion(tmp_path: Path) -> None:
    source, template = saved(tmp_path, CHAINS[1])
    keys = []
    for seed in (2, 3):
        shutil.rmtree(template)
        OptaxTraining(CHAINS[1], TorchTraining(CHAINS[1], seed).weights()).save(template)
        with planned(source, ConvertOptions(mapping=MAPPING, like=template)) as (conversion, _):
            keys.append(conversion_key(conversion))
    assert keys[0] != keys[1]
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"template"}


@pytest.mark.parametrize(("theirs", "ours"), [("int64", "float64"), ("float64", "int64"), ("int32", "int64")])
def test_another_kind_of_dtype_is_refused(theirs: str, ours: str, tmp_path: Path) -> None:
    training = TorchTraining(CHAINS[0], seed=1)
    weights = training.model.state_dict()
    weights["first.bias"] = weights["first.bias"].to(getattr(torch, ours))
    torch.save(weights, tmp_path / "weights.pt")
    side = OptaxTraining(CHAINS[0], training.weights())
    side.params["first"]["bias"] = side.params["first"]["bias"].astype(theirs)
    side.save(tmp_path / "template")
    expected = f"params/first/bias: expected dtype {theirs} as in the template, got {ours}"
    with pytest.raises(CheckpointError, match=expected):
        convert(tmp_path / "weights.pt", tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "template")


def test_values_are_rounded_to_the_templates_dtype(tmp_path: Path) -> None:
    source, _ = saved(tmp_path)
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=1).weights())
    side.params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), side.params)
    side.save(tmp_path / "narrow")
    convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "narrow")
    with open_checkpoint(source) as before, open_checkpoint(tmp_path / "arrived") as after:
        expected = before.read("model.first.bias").astype(jnp.bfloat16)
        np.testing.assert_array_equal(after.read("params/first/bias"), expected)
        assert after.tensors["opt_state/0/mu/first/bias"].dtype == np.float64


def test_random_state_and_a_number_of_the_programs_stay_its_own(tmp_path: Path) -> None:
    """Counts of random streams are no steps; a step that is a Python number stays one."""
    source, _ = saved(tmp_path)
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=2).weights())
    program = {"params": side.params, "opt_state": side.state, "step": 0}
    program["data"] = {"count": jnp.uint32(7)}
    program["rngs"] = {"params": {"count": jnp.uint32(9), "key": jax.random.key(5)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "program", program)
    report = convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "program")
    assert report.filled == {
        "data/count": "as in the template",
        "rngs/params/count": "as in the template",
        "rngs/params/key": "as in the template",
        "step": "the source's step, 3",
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "arrived", program)
    assert (restored["step"], type(restored["step"])) == (3, int)
    assert restored["rngs"]["params"]["count"] == 9
    assert (
        jax.random.key_data(restored["rngs"]["params"]["key"]).tolist()
        == jax.random.key_data(jax.random.key(5)).tolist()
    )


@pytest.mark.parametrize("separate", [False, True], ids=["default", "params,opt_state"])
def test_a_manager_goes_on_from_a_step_like_its_own(separate: bool, tmp_path: Path) -> None:
    torch_side = TorchTraining(CHAINS[1], seed=1)
    torch_side.train(0, BEFORE)
    LAYOUTS[0].write(torch_side.model, torch_side.optimizer, tmp_path / "torch")
    side = OptaxTraining(CHAINS[1], TorchTraining(CHAINS[1], seed=2).weights())
    tree: dict[str, Any] = {"params": side.params, "opt_state": side.state}

    def arguments(kind: Any) -> Any:
        return ocp.args.Composite(**{k: kind(v) for k, v in tree.items()}) if separate else kind(tree)

    with ocp.CheckpointManager(tmp_path / "own") as manager:
        manager.save(0, args=arguments(ocp.args.StandardSave))
    report = convert(tmp_path / "torch", tmp_path / "run" / "3", mapping=MAPPING, like=tmp_path / "own" / "0")
    # Values outside the tree have a place in an item only.
    assert ("optimizer.param_groups.0.lr" in report.dropped) == separate
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == BEFORE
        restored = manager.restore(BEFORE, args=arguments(ocp.args.StandardRestore))
    side.params, side.state = restored["params"], restored["opt_state"]
    assert side.train(BEFORE, AFTER) == pytest.approx(torch_side.train(BEFORE, AFTER), rel=1e-6)
    require_equal(side, torch_side)
    # The schedule's count is only there.
    compared = diff(tmp_path / "torch", tmp_path / "run" / "3", mapping=MAPPING)
    assert [tensor.difference.max_ulp for tensor in compared.tensors] == [0] * 13
    assert verify(tmp_path / "run" / "3")
    items = "opt_state, params" if separate else "default"
    options = ConvertOptions(mapping=MAPPING, like=tmp_path / "own" / "0")
    with pytest.raises(
        CheckpointError, match=rf"no named items .* got {items} \(.* a step as the template\)"
    ):
        convert_on(Processes(2), tmp_path / "torch", tmp_path / "parts", options, parts=2)


def test_the_other_interface_of_orbax_goes_on(tmp_path: Path) -> None:
    """Its steps have one item, whose name its manager may choose, and the program's own metadata."""
    source, _ = saved(tmp_path)
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=2).weights())
    tree = {"params": side.params, "opt_state": side.state}
    v1.save(tmp_path / "own", tree)
    v1.save_checkpointables(tmp_path / "steps" / "0", {"items": tree}, custom_metadata={"layers": "scanned"})
    for template, result in (("own", "arrived"), ("steps/0", "run/3")):
        convert(source, tmp_path / result, mapping=MAPPING, like=tmp_path / template)
    restored = [v1.load(tmp_path / "arrived", tree)]
    restored.append(v1.load_checkpointables(tmp_path / "run" / "3", {"items": tree})["items"])
    assert [int(state["opt_state"][0].count) for state in restored] == [BEFORE, BEFORE]
    assert v1.checkpointables_metadata(tmp_path / "run" / "3").custom_metadata == {"layers": "scanned"}


def test_the_item_of_a_step_as_the_template_is_no_step(tmp_path: Path) -> None:
    source, _ = saved(tmp_path)
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=2).weights())
    with ocp.CheckpointManager(tmp_path / "own") as manager:
        manager.save(0, args=ocp.args.StandardSave({"params": side.params, "opt_state": side.state}))
    convert(source, tmp_path / "arrived", mapping=MAPPING, like=tmp_path / "own" / "0" / "default")
    side.restore(tmp_path / "arrived")
    assert int(side.state[0].count) == BEFORE


def test_random_state_of_the_source_needs_no_place(tmp_path: Path) -> None:
    own, _ = saved(tmp_path)
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=1).weights())
    random_state = {"layer": {"rngs": {"count": jnp.uint32(7), "key": jax.random.key(1)}}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "program", {"params": side.params, "opt_state": side.state, "nnx_aux": random_state}
        )
    report = convert(tmp_path / "program", tmp_path / "arrived", mapping=MAPPING, like=own)
    assert {name for name in report.dropped if "rngs" in name} == {
        "nnx_aux/layer/rngs/count",
        "nnx_aux/layer/rngs/key",
    }


def test_parts_in_processes_have_the_template(tmp_path: Path) -> None:
    source, template = saved(tmp_path, CHAINS[1])
    options = ConvertOptions(mapping=MAPPING, like=template)
    report = convert_on(Processes(2), source, tmp_path / "parts", options, parts=2)
    whole = convert(source, tmp_path / "whole", mapping=MAPPING, like=template)
    assert report.filled == whole.filled
    assert diff(tmp_path / "parts", tmp_path / "whole").max_ulp == 0


def order(chain: Chain, layout: Layout, folder: Path) -> str | None:
    """The order of the weights, where torch only numbers them."""
    if not layout.numbered:
        return None
    training = TorchTraining(chain, seed=0)
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    lines = [names[id(p)] for group in training.optimizer.param_groups for p in group["params"]]
    (folder / "order.txt").write_text("\n".join(lines))
    return str(folder / "order.txt")
