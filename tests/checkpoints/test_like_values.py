"""``convert --like``: numbers and other values of the program arrive exactly, or are refused or named."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from optax import chain

from bridge import CheckpointError, convert, diff
from bridge.checkpoints.convert.conversion import ConvertReport

MODEL = {name: torch.arange(2.0) + n for n, name in enumerate("abcdef")}
MAPPING = 'name = "m"\n' + "".join(f'[[rule]]\ntorch = "{n}.w : o m"\njax = "{n}/w : m o"\n' for n in "ab")
STEPS = 5


def saved_by_torch(path: Path, **values: Any) -> Path:
    """With ``dcp.save`` for a folder, else with ``torch.save``; ``model`` in addition to the values."""
    tree = {"model": MODEL, **values}
    if path.suffix:
        torch.save(tree, path)
    else:
        dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


def loaded(path: Path, **values: Any) -> dict[str, Any]:
    """What DCP itself loads into these values."""
    tree = {"model": {name: torch.zeros(2) for name in MODEL}, **values}
    dcp.load(tree, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(tree["model"][name], MODEL[name]) for name in MODEL)
    return {name: tree[name] for name in values}


def saved_by_orbax(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def restored(path: Path, tree: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, tree)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 3))


def trained(folder: Path, **values: Any) -> tuple[Path, Path]:
    """A torch checkpoint after ``STEPS`` steps of AdamW, and the mapping of its weights."""
    model = torch.nn.ModuleDict({name: Layer() for name in "ab"})
    optimizer = torch.optim.AdamW(model.named_parameters())
    for _ in range(STEPS):
        for weight in model.parameters():
            weight.grad = weight.detach().clone()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **values}, folder / "s.pt")
    (folder / "m.toml").write_text(MAPPING)
    return folder / "s.pt", folder / "m.toml"


def into_optax(folder: Path, tx: optax.GradientTransformation, given: dict[str, Any], **own: Any) -> Any:
    """The report, and what Orbax restores into the state of ``tx`` and ``own``."""
    source, mapping = trained(folder, **given)
    params = {name: {"w": jnp.zeros((3, 2))} for name in "ab"}
    tree = {"params": params, "opt_state": tx.init(params), **own}
    report = convert(source, folder / "out", like=saved_by_orbax(folder / "like", tree), mapping=mapping)
    return report, restored(folder / "out", tree)


@pytest.mark.parametrize("tensors", [False, True])
def test_python_numbers_become_the_numbers_of_orbax(tmp_path: Path, tensors: bool) -> None:
    """Orbax has a tensor for each number. The program's own step is not the optimizer's."""
    given = {"step": 20, "epoch": 7, "best": 0.1, "train": {"step": 40, "seen": 2**30 + 1, "done": True}}
    own = {"step": 0, "epoch": 0, "best": 0.0, "train": {"step": 0, "seen": 0, "done": False}}
    as_saved = {**given, "step": torch.tensor(20), "epoch": torch.tensor(7)} if tensors else given
    report, after = into_optax(tmp_path, optax.adamw(0.1), as_saved, **own)
    assert report.filled == {}
    assert {name: after[name] for name in own} == given
    assert int(after["opt_state"][0].count) == STEPS
    # Numbers next to the weights keep their paths through a mapping, too.
    convert(tmp_path / "out", tmp_path / "back", mapping=tmp_path / "m.toml")
    back = {"step": torch.tensor(0), "epoch": torch.tensor(0), "best": torch.tensor(0.0)}
    dcp.load(back, checkpoint_id=tmp_path / "back", no_dist=True)
    assert {name: pytest.approx(value.item()) for name, value in back.items()} == {n: given[n] for n in back}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (2**62 + 1, 0),
        (torch.tensor(2**62 + 1), 0),
        (2**62 + 1, torch.tensor(0)),
        (torch.tensor(2**62 + 1), torch.tensor(0)),
        (0.1, torch.tensor(0.0, dtype=torch.float64)),
        (float("nan"), 0.0),
        (True, False),
        (np.int64(2**53 + 1), 0),
        ("best", "worst"),
        ([1, 2], [0, 0]),
        (0.25, None),
        ({"a": 1}, {"a": None}),
    ],
)
def test_a_value_arrives_with_all_its_bits(tmp_path: Path, given: Any, own: Any) -> None:
    source = saved_by_torch(tmp_path / "s.pt", value=given, step=given)
    report = convert(source, tmp_path / "out", like=saved_by_torch(tmp_path / "like", value=own, step=own))
    assert (report.filled, report.dropped) == ({}, ())
    after = loaded(tmp_path / "out", value=own, step=own)
    for value in after.values():
        got = value.item() if isinstance(value, torch.Tensor) else value
        wanted = given.item() if isinstance(given, torch.Tensor | np.generic) else given
        assert got == wanted or (wanted != wanted and got != got)
        assert isinstance(value, torch.Tensor) == isinstance(own, torch.Tensor)


@pytest.mark.parametrize(
    ("given", "own", "message"),
    [
        (torch.tensor(9.7), 0, r"value: expected a value that int can hold, .* got 9\.69"),
        (torch.tensor(2**24 + 1), 0.0, None),
        (torch.tensor([1, 2, 3]), 0, r"value: expected a value that int can hold, .* shape \[3\]"),
        (9.7, torch.tensor(0), r"value: expected a number that int64 of shape \[\] can store, .* got 9\.7"),
        (300, torch.tensor(0, dtype=torch.int8), r"value: expected a number that int8 .* got 300"),
        (2**24 + 1, torch.tensor(0.0), r"value: expected a number that float32 .* got 16777217"),
        (1e300, torch.tensor(0.0), r"value: expected a number that float32 .* got 1e\+300"),
        ("nine", torch.tensor(0), r"value: expected a number that int64 .* got 'nine'"),
        (7, torch.zeros(3), r"value: expected a number that float32 of shape \[3\] can store, .* got 7"),
        (float("inf"), 0, None),
    ],
)
def test_a_number_that_would_change_is_refused(
    tmp_path: Path, given: Any, own: Any, message: str | None
) -> None:
    source = saved_by_torch(tmp_path / "s.pt", train={"value": given})
    like = saved_by_torch(tmp_path / "like", train={"value": own})
    if message is None:
        # A Python number has no dtype, and a float of Python holds each int32.
        convert(source, tmp_path / "out", like=like)
        assert loaded(tmp_path / "out", train={"value": own}) == {"train": {"value": float(given)}}
        return
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", like=like)


def test_orbax_keeps_an_empty_leaf_and_names_what_has_no_place(tmp_path: Path) -> None:
    given = {"best": 0.25, "seen": torch.tensor(3), "none": None}
    report, after = into_optax(tmp_path, optax.adamw(0.1), given, best=None, seen=None, none=None)
    assert {"best", "seen"} <= {*report.dropped}
    assert (after["best"], after["seen"], after["none"]) == (None, None, None)


def test_counts_that_are_no_steps_begin_anew(tmp_path: Path) -> None:
    """The plateau's count is a position in a window; a count of metrics belongs to the sum next to it."""
    tx = optax.chain(
        optax.adamw(0.1), optax.contrib.reduce_on_plateau(patience=2), optax.add_noise(0.1, 0.5, 0)
    )
    own = {"train": {"metrics": {"count": 0, "sum": 0.0}}}
    report, after = into_optax(tmp_path, tx, {}, **own)
    assert report.filled["opt_state/1/count"] == "as in the template"
    assert report.filled["opt_state/2/count"] == f"the source's step, {STEPS}"
    assert (int(after["opt_state"][1].count), int(after["opt_state"][2].count)) == (0, STEPS)
    assert after["train"] == own["train"]


@pytest.mark.parametrize("with_mapping", [False, True])
@pytest.mark.parametrize("how", ["quantized", "sparse"])
def test_a_weight_that_cannot_be_read_is_never_the_templates(
    tmp_path: Path, how: str, with_mapping: bool
) -> None:
    weight = torch.ones(2, 3)
    if how == "quantized":
        with warnings.catch_warnings(action="ignore"):
            closed = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    else:
        closed = weight.to_sparse()
    torch.save({"model": {"a.w": closed, "b.w": weight}}, tmp_path / "s.pt")
    torch.save({"model": {"a.w": weight, "b.w": weight}}, tmp_path / "like.pt")
    (tmp_path / "m.toml").write_text(MAPPING)
    way: dict[str, Any] = {"mapping": tmp_path / "m.toml", "to": "orbax"}
    with pytest.raises(
        CheckpointError, match=r"expected weights that can be read, found 'model\.a\.w' .*--drop"
    ):
        convert(
            tmp_path / "s.pt", tmp_path / "out", **way if with_mapping else {"like": tmp_path / "like.pt"}
        )


def test_values_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    source = saved_by_torch(tmp_path / "s.pt", args=argparse.Namespace(rate=1), epoch=3)
    report = convert(source, tmp_path / "out", like=saved_by_torch(tmp_path / "like", epoch=0))
    assert report.dropped == ("args",)
    with pytest.raises(CheckpointError, match=r"'args'.*--drop 'args'"):
        convert(source, tmp_path / "none", like=saved_by_torch(tmp_path / "other", epoch=0, args=7))


def test_a_value_of_the_template_that_cannot_be_read_is_refused_with_what_helps(tmp_path: Path) -> None:
    like = saved_by_torch(tmp_path / "like.pt", args=argparse.Namespace(rate=1))
    with pytest.raises(CheckpointError, match=r"'args'.*save the template without this value") as caught:
        convert(saved_by_torch(tmp_path / "s.pt", epoch=3), tmp_path / "out", like=like)
    assert "--drop" not in str(caught.value)
    convert(saved_by_torch(tmp_path / "with.pt", args="fast"), tmp_path / "out", like=like)
    assert loaded(tmp_path / "out", args="") == {"args": "fast"}


def scheduled(*before: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(
        *before, optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1 / (1 + count))
    )


CLIP, EMA = optax.clip(1e9), optax.ema(0.9)
PLATEAU = optax.contrib.reduce_on_plateau(patience=2)


@pytest.mark.parametrize(
    ("old", "new", "anew", "same_next"),
    [
        pytest.param(scheduled(), scheduled(CLIP), "", True, id="clipping added"),
        pytest.param(scheduled(CLIP), scheduled(), "", True, id="clipping removed"),
        pytest.param(scheduled(), chain(scheduled(), EMA), "opt_state/1/", False, id="average added"),
        pytest.param(chain(scheduled(), EMA), chain(scheduled(), EMA), "", True, id="average stays"),
        pytest.param(
            chain(scheduled(), EMA), chain(scheduled(CLIP), EMA), "opt_state/1/", False, id="average"
        ),
        pytest.param(
            chain(scheduled(), PLATEAU), chain(scheduled(CLIP), PLATEAU), "opt_state/1/", False, id="plateau"
        ),
        pytest.param(scheduled(), optax.apply_if_finite(scheduled(), 3), "opt_state/", True, id="wrapped"),
    ],
)
def test_another_chain_goes_on_with_the_moments_and_steps(
    tmp_path: Path,
    old: optax.GradientTransformation,
    new: optax.GradientTransformation,
    anew: str,
    same_next: bool,
) -> None:
    """Other parts begin anew if the moments move, and each leaf that does, all below ``anew``, is named."""
    weights: Any = {"fc": {"kernel": jnp.ones((3, 2))}}
    params, state = weights, old.init(weights)
    for step in range(STEPS):
        updates, state = old.update(
            {"fc": {"kernel": weights["fc"]["kernel"] * (step + 1)}}, state, params, value=1.0
        )
        params = optax.apply_updates(params, updates)
    source = saved_by_orbax(tmp_path / "old", {"params": params, "opt_state": state})
    fresh = {"params": weights, "opt_state": new.init(weights)}
    report = convert(source, tmp_path / "out", like=saved_by_orbax(tmp_path / "new", fresh))
    after = restored(tmp_path / "out", fresh)
    np.testing.assert_array_equal(after["params"]["fc"]["kernel"], params["fc"]["kernel"])
    expected, _ = old.update(weights, state, params, value=1.0)
    got, _ = new.update(weights, after["opt_state"], after["params"], value=1.0)
    assert bool((got["fc"]["kernel"] == expected["fc"]["kernel"]).all()) == same_next
    begun_anew = {path for path, content in report.filled.items() if content == "as in the template"}
    assert bool(begun_anew) == bool(anew)
    assert all(path.startswith(anew) for path in begun_anew)


def test_a_template_of_another_optimizer_gets_no_advice_about_its_names(tmp_path: Path) -> None:
    """Only names of the source can be dropped."""
    with pytest.raises(CheckpointError, match=r"has the state of optax\.amsgrad") as caught:
        into_optax(tmp_path, optax.amsgrad(0.1), {})
    assert "--weights-only" in str(caught.value)
    assert "--drop" not in str(caught.value)


def test_what_the_template_has_no_place_for_is_not_said_to_be_kept(tmp_path: Path) -> None:
    like, mapping = trained(tmp_path)
    params = {name: {"w": jnp.zeros((3, 2))} for name in "ab"}
    state = optax.MultiSteps(optax.adamw(0.1), 2).init(params)
    source = saved_by_orbax(tmp_path / "optax", {"params": params, "opt_state": state})
    report = convert(source, tmp_path / "out", like=like, mapping=mapping)
    assert "opt_state/acc_grads/a/w" in report.dropped
    assert not any("acc_grads" in remark for remark in report.remarks)
    without = convert(source, tmp_path / "kept", mapping=mapping)
    assert any("acc_grads" in remark for remark in without.remarks)


@pytest.mark.parametrize(
    "beside",
    [
        {"torch_rng_state": torch.arange(9, dtype=torch.uint8)},
        {"class_weights": torch.ones(5)},
        {"best_acc1": torch.tensor([0.5])},
        {"ema": MODEL, "epoch": torch.tensor(5)},
        {"batch_stats": {"mean": torch.ones(3)}, "history": torch.ones(4)},
    ],
)
@pytest.mark.parametrize("to", ["torch", "orbax"])
def test_between_equal_names_anything_beside_the_weights_arrives(
    tmp_path: Path, beside: dict[str, Any], to: str
) -> None:
    def tree(factor: int) -> Any:
        return jax.tree.map(lambda leaf: leaf * factor, {"model": MODEL, **beside})

    if to == "torch":
        for name, factor in (("s.pt", 3), ("like.pt", 1)):
            torch.save(tree(factor), tmp_path / name)
    else:
        for name, factor in (("s.pt", 3), ("like.pt", 1)):
            saved_by_orbax(tmp_path / name, jax.tree.map(lambda leaf: np.asarray(leaf), tree(factor)))
    report = convert(tmp_path / "s.pt", tmp_path / "out", like=tmp_path / "like.pt")
    assert (report.filled, report.dropped) == ({}, ())
    assert diff(tmp_path / "s.pt", tmp_path / "out").same


@pytest.mark.parametrize("own", [[0.0, 0.0], "x"])
def test_a_tensor_where_the_template_has_another_value_is_refused(tmp_path: Path, own: Any) -> None:
    """Stock DCP would not load it."""
    source = saved_by_torch(tmp_path / "s.pt", train={"best": torch.tensor([0.25, 1.0])})
    like = saved_by_torch(tmp_path / "like", train={"best": own})
    with pytest.raises(CheckpointError, match=r"train\.best"):
        convert(source, tmp_path / "out", like=like)
    # A template without a value takes a number, as a number.
    source = saved_by_torch(tmp_path / "n.pt", train={"best": torch.tensor(0.25)})
    like = saved_by_torch(tmp_path / "none", train={"best": None})
    convert(source, tmp_path / "out", like=like)
    assert loaded(tmp_path / "out", train={"best": None}) == {"train": {"best": 0.25}}


@pytest.mark.parametrize("with_names", [False, True])
def test_numbered_states_need_no_mapping_between_equal_names(tmp_path: Path, with_names: bool) -> None:
    sides = []
    for seed, name in enumerate(("s.pt", "like.pt")):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
        optimizer = torch.optim.AdamW(model.named_parameters() if with_names else model.parameters())
        for _ in range(seed + 1):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
        sides.append((model, optimizer))
    report = convert(tmp_path / "s.pt", tmp_path / "out", like=tmp_path / "like.pt")
    assert (report.filled, report.dropped) == ({}, ())
    assert diff(tmp_path / "s.pt", tmp_path / "out").same


def test_the_tree_of_an_earlier_conversion_is_a_template(tmp_path: Path) -> None:
    """Its keys have dots, as those of the state dict."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "s.pt")
    convert(tmp_path / "s.pt", tmp_path / "tree", to="orbax")
    report = convert(tmp_path / "s.pt", tmp_path / "out", like=tmp_path / "tree")
    assert (report.filled, report.dropped) == ({}, ())
    assert diff(tmp_path / "tree", tmp_path / "out").same


def inexact(folder: Path, **options: Any) -> ConvertReport:
    return convert(folder / "s.pt", folder / f"out{len([*folder.iterdir()])}", **options)


def test_rounding_to_another_dtype_is_reported(tmp_path: Path) -> None:
    tensors = {"w": torch.tensor([1 / 3]), "half": torch.ones(1, dtype=torch.bfloat16), "n": torch.ones(1)}
    torch.save(tensors, tmp_path / "s.pt")
    like = {"w": tensors["w"].bfloat16(), "half": tensors["half"].float(), "n": tensors["n"]}
    dcp.save(like, checkpoint_id=tmp_path / "like", no_dist=True)
    assert inexact(tmp_path, like=tmp_path / "like").inexact == ("w",)
    assert inexact(tmp_path, to="dcp", casts=["w=bf16", "half=fp32"]).inexact == ("w",)
    assert inexact(tmp_path, to="dcp").inexact == ()
