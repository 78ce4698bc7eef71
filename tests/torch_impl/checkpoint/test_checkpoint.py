"""Checkpoints of unsharded modules in one process: names, atomicity, refusals, exact resumption."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from torch_impl.checkpoint import contents, full_state_dict
from torch_impl.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from torch_impl.checkpoint.contents import _saved_groups, materialize_state
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

TINY = DecoderConfig(vocab_size=19, d_model=21, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=13)
TRAIN = {
    "step": 3,
    "data": {"seed": 2**40, "position": 17, "corpus_sha256": np.arange(32, dtype=np.uint8)},
    "model": {"d_model": 21, "tied": 0},
    "noise": np.array([[0.5, -0.0], [np.nan, 3.0]]),
}


def _decoder(seed: int) -> Decoder:
    decoder = Decoder(TINY)
    decoder.init_weights(seed)
    return decoder


def _adamw(model: nn.Module, **options: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    tokens = torch.from_numpy(np.random.default_rng(index).integers(0, TINY.vocab_size, (3, 8)))
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _trained(seed: int = 1, steps: int = 2, **options: float) -> tuple[Decoder, torch.optim.AdamW]:
    model = _decoder(seed)
    optimizer = _adamw(model, **options)
    for index in range(steps):
        _step(model, optimizer, index)
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.state.{name}.{key}"] = value.clone()
    return state


def _assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer, TRAIN)
    resumed = _decoder(seed=9)
    its_optimizer = _adamw(resumed, lr=0.5, weight_decay=0.9)
    load_checkpoint(tmp_path / "a", resumed, its_optimizer)
    _assert_equal(_state(resumed, its_optimizer), _state(model, optimizer))
    assert its_optimizer.state[resumed.norm.weight]["step"].item() == 2
    for index in (2, 3):
        assert _step(resumed, its_optimizer, index) == _step(model, optimizer, index)
    _assert_equal(_state(resumed, its_optimizer), _state(model, optimizer))


def test_the_train_state_comes_back_as_it_was_given(tmp_path):
    model, optimizer = _trained(steps=0)
    save_checkpoint(tmp_path / "a", model, optimizer, TRAIN)
    train = load_checkpoint(tmp_path / "a", model, optimizer)
    assert list(train) == ["step", "data", "model", "noise"]
    assert train["step"] == 3
    assert type(train["step"]) is int
    assert train["data"]["seed"] == 2**40
    assert train["model"] == {"d_model": 21, "tied": 0}
    assert train["data"]["corpus_sha256"].dtype == np.uint8
    assert train["data"]["corpus_sha256"].tolist() == list(range(32))
    assert train["noise"].tobytes() == TRAIN["noise"].tobytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_are_those_of_stock_state_dicts_and_ints_are_int64_scalars(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer, {"step": 3, "data": {"seed": 1}})
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path / "stock",
    )
    with open_checkpoint(tmp_path / "a") as ours, open_checkpoint(tmp_path / "stock") as stock:
        train = {"train.step", "train.data.seed"}
        assert set(ours.tensors) - train == set(stock.tensors)
        assert set(ours.objects) == set(stock.objects)
        for name, info in stock.tensors.items():
            assert (ours.tensors[name].path, ours.tensors[name].shape) == (info.path, info.shape)
            assert ours.read(name).tobytes() == stock.read(name).tobytes()
        for name in stock.objects:
            assert ours.objects[name] == stock.objects[name]
        assert ours.tensors["train.data.seed"].path == ("train", "data", "seed")
        assert {(ours.tensors[n].shape, ours.tensors[n].dtype.name) for n in train} == {((), "int64")}


READER = """
import sys, torch, warnings
import torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
expected = torch.load(sys.argv[2])
found = {name: torch.full_like(value, 77) for name, value in expected.items()}
dcp.load(found, checkpoint_id=sys.argv[1])
assert "torch_impl" not in sys.modules
assert all(torch.equal(found[name], value) for name, value in expected.items())
print(len(found))
"""


def test_plain_dcp_load_reads_it_in_a_program_that_has_never_heard_of_us(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer, {"step": 3})
    expected = {**_state(model, optimizer), "train.step": torch.tensor(3)}
    torch.save(expected, tmp_path / "expected.pt")
    command = [sys.executable, "-c", READER, str(tmp_path / "a"), str(tmp_path / "expected.pt")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == f"{len(expected)}\n", result.stderr


def test_no_file_contains_the_path_it_was_written_to(tmp_path):
    model, optimizer = _trained(steps=0)
    save_checkpoint(tmp_path / "secret" / "a", model, optimizer)
    for file in (tmp_path / "secret" / "a").iterdir():
        assert b"secret" not in file.read_bytes()
        assert b".tmp-" not in file.read_bytes()


def test_saving_before_the_first_step_stores_zero_moments_and_changes_nothing(tmp_path):
    model, optimizer = _trained(steps=0, weight_decay=0.5)
    untouched = copy.deepcopy(model)
    its_optimizer = _adamw(untouched, weight_decay=0.5)
    save_checkpoint(tmp_path / "a", model, optimizer)
    _assert_equal(_state(model), _state(untouched))
    with open_checkpoint(tmp_path / "a") as reader:
        for name in reader.tensors:
            if name.startswith("optimizer.state."):
                assert not reader.read(name).any(), name
    for index in (0, 1):
        assert _step(model, optimizer, index) == _step(untouched, its_optimizer, index)
    _assert_equal(_state(model, optimizer), _state(untouched, its_optimizer))


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_a_step_count_from_before_the_first_step_lies_where_the_kernels_read_it(capturable, device):
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter], capturable=capturable)
    materialize_state(optimizer)
    assert optimizer.state[parameter]["step"].device.type == device


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_count_has_torchs_dtype_under_any_default(tmp_path, fused):
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        models = [nn.Linear(3, 2) for _ in range(2)]
        first, second = (torch.optim.AdamW(model.parameters(), fused=fused) for model in models)
        models[0](torch.ones(1, 3)).sum().backward()
        first.step()
        save_checkpoint(tmp_path / "a", models[0], first)
        load_checkpoint(tmp_path / "a", models[1], second)
        _assert_equal(_state(models[1], second), _state(models[0], first))
        assert second.state[models[1].bias]["step"].dtype == (torch.float32 if fused else torch.float64)
    finally:
        torch.set_default_dtype(default)


def test_loading_into_an_optimizer_that_never_stepped_leaves_weights_as_saved(tmp_path):
    model, optimizer = _trained(weight_decay=0.5)
    saved = _state(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    fresh = _decoder(seed=4)
    its_optimizer = _adamw(fresh, weight_decay=0.5)
    load_checkpoint(tmp_path / "a", fresh, its_optimizer)
    _assert_equal(_state(fresh, its_optimizer), saved)


def _grouped(model: Decoder, swap: bool) -> torch.optim.AdamW:
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [
        {"params": norms, "lr": 0.02, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": others, "eps": 1e-6, "initial_lr": 0.3},
    ]
    return torch.optim.AdamW(groups[::-1] if swap else groups, lr=0.01)


def test_hyperparameters_of_each_group_are_restored_by_the_parameters_it_holds(tmp_path):
    model = _decoder(1)
    optimizer = _grouped(model, swap=False)
    _step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.004
    save_checkpoint(tmp_path / "a", model, optimizer)
    fresh = _decoder(2)
    its_optimizer = _grouped(fresh, swap=True)
    for group in its_optimizer.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.2), eps=9.0, weight_decay=9.0, foreach=False)
        group.pop("initial_lr", None)
    load_checkpoint(tmp_path / "a", fresh, its_optimizer)
    others, norms = its_optimizer.param_groups
    assert (norms["lr"], norms["weight_decay"], norms["betas"], norms["eps"]) == (
        0.004,
        0.0,
        (0.8, 0.9),
        1e-8,
    )
    assert (others["lr"], others["weight_decay"], others["betas"]) == (0.01, 0.01, (0.9, 0.999))
    assert (others["eps"], others["initial_lr"]) == (1e-6, 0.3)
    assert "initial_lr" not in norms
    assert [group["foreach"] for group in its_optimizer.param_groups] == [False, False]
    assert _step(fresh, its_optimizer, 1) == _step(model, optimizer, 1)
    _assert_equal(_state(fresh), _state(model))


def test_a_learning_rate_held_in_a_tensor_is_saved_and_restored_in_place(tmp_path):
    model = _decoder(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    save_checkpoint(tmp_path / "a", model, optimizer)
    rate = torch.tensor(0.0)
    fresh = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    load_checkpoint(tmp_path / "a", model, fresh)
    assert rate.item() == 0.25
    plain = _adamw(model)
    load_checkpoint(tmp_path / "a", model, plain)
    assert plain.param_groups[0]["lr"] == 0.25


def test_parameters_of_one_group_that_were_saved_in_two_are_refused(tmp_path):
    model = _decoder(1)
    save_checkpoint(tmp_path / "a", model, _grouped(model, swap=False))
    with pytest.raises(
        CheckpointError, match=r"group 0 in one saved group, found them in .*groups.0, .*groups.1"
    ):
        load_checkpoint(tmp_path / "a", model, _adamw(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_scalars_stacks_buffers_and_empty_tensors_are_exact(tmp_path, dtype):
    def build(seed: int) -> nn.Module:
        module = nn.Module()
        random = torch.Generator().manual_seed(seed)
        for name, shape in {"scalar": (), "hollow": (3, 0, 2), "stack": (2, 3, 4), "long": (1,)}.items():
            value = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
            module.register_parameter(name, nn.Parameter(value))
        module.register_buffer("count", torch.randint(0, 99, (3,), generator=random))
        module.register_buffer("derived", torch.zeros(2), persistent=False)
        return module

    saved, loaded = build(1), build(2)
    save_checkpoint(tmp_path / "a", saved, _adamw(saved))
    load_checkpoint(tmp_path / "a", loaded, _adamw(loaded))
    _assert_equal(_state(loaded), _state(saved))
    assert set(_state(loaded)) == {f"model.{n}" for n in ("scalar", "hollow", "stack", "long", "count")}


def test_a_tensor_in_strange_memory_order_is_loaded_in_place(tmp_path):
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.arange(15.0).view(3, 5).t())
    expected, pointer = model.weight.detach().clone(), model.weight.data_ptr()
    save_checkpoint(tmp_path / "a", model)
    with torch.no_grad():
        model.weight.zero_()
    load_checkpoint(tmp_path / "a", model)
    assert torch.equal(model.weight, expected)
    assert model.weight.data_ptr() == pointer


@pytest.mark.parametrize("listed", [True, False])
def test_frozen_parameters_have_no_optimizer_state_and_are_restored(tmp_path, listed):
    def build(seed: int) -> tuple[Decoder, torch.optim.AdamW]:
        model = _decoder(seed)
        model.embed.weight.requires_grad_(False)
        chosen = [p for p in model.parameters() if listed or p.requires_grad]
        return model, torch.optim.AdamW(chosen, lr=0.01)

    model, optimizer = build(1)
    _step(model, optimizer, 0)
    save_checkpoint(tmp_path / "a", model, optimizer)
    fresh, its_optimizer = build(2)
    load_checkpoint(tmp_path / "a", fresh, its_optimizer)
    assert fresh.embed.weight not in its_optimizer.state
    assert _step(fresh, its_optimizer, 1) == _step(model, optimizer, 1)
    _assert_equal(_state(fresh), _state(model))


def test_weights_alone_can_be_loaded_from_a_whole_run_but_not_a_run_from_weights(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "run", model, optimizer)
    save_checkpoint(tmp_path / "weights", model)
    fresh = _decoder(5)
    assert load_checkpoint(tmp_path / "run", fresh) == {}
    _assert_equal(_state(fresh), _state(model))
    with pytest.raises(CheckpointError, match="expected optimizer state, found none"):
        load_checkpoint(tmp_path / "weights", fresh, _adamw(fresh))


def test_an_existing_destination_is_refused_and_untouched(tmp_path):
    model, optimizer = _trained(steps=0)
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("a", "file", "link"):
        with pytest.raises(FileExistsError, match=f"{name} exists already"):
            save_checkpoint(tmp_path / name, model, optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "link"]
    assert (tmp_path / "file").read_text() == "mine"
    assert not any((tmp_path / "a").iterdir())


def test_every_file_and_directory_is_synced_before_the_checkpoint_appears(tmp_path, monkeypatch):
    synced: set[int] = set()
    at_rename: dict[str, set[int]] = {}
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recording_rename(source: str, target: str) -> None:
        if Path(target).name == "a":
            at_rename["needed"] = {p.stat().st_ino for p in [Path(source), *Path(source).iterdir()]}
            at_rename["synced"] = set(synced)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    save_checkpoint(tmp_path / "a", *_trained(steps=0))
    assert len(at_rename["needed"]) == 4
    assert at_rename["needed"] <= at_rename["synced"]
    assert tmp_path.stat().st_ino in synced
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"a": {"b": 1.5}}, r"train\.a\.b: expected an int, a numpy array .* got 1\.5"),
        ({"flag": True}, r"train\.flag: expected an int, .* got True"),
        ({"a.b": 1}, r"train: expected keys that are str without '\.', got 'a\.b'"),
        ({3: 1}, "train: expected keys that are str"),
    ],
)
def test_train_state_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, train, message):
    model, optimizer = _trained(steps=0)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "deep" / "a", model, optimizer, train)
    assert not any(tmp_path.iterdir())


def test_an_optimizer_over_foreign_parameters_or_of_an_unknown_kind_is_refused(tmp_path):
    model, other = _decoder(1), _decoder(2)
    with pytest.raises(ValueError, match="group 0: expected parameters of the model, got one of shape"):
        save_checkpoint(tmp_path / "a", model, _adamw(other))
    with pytest.raises(ValueError, match=r"expected MainWeightAdamW, .* got RMSprop without state"):
        save_checkpoint(tmp_path / "a", model, torch.optim.RMSprop(model.parameters(), lr=1.0))
    assert not any(tmp_path.iterdir())


def test_plain_sgd_has_no_state_and_continues(tmp_path):
    model, other = _decoder(1), _decoder(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    continued = torch.optim.SGD(other.parameters(), lr=1.0)
    save_checkpoint(tmp_path / "a", model, optimizer)
    load_checkpoint(tmp_path / "a", other, continued)
    assert continued.param_groups[0]["lr"] == 0.25
    for run, steps in ((model, optimizer), (other, continued)):
        run(torch.arange(6)[None]).square().mean().backward()
        steps.step()
    for expected, resumed in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, resumed)
    with pytest.raises(CheckpointError, match="expected optimizer state, found none"):
        load_checkpoint(tmp_path / "a", other, _adamw(other))


@pytest.mark.parametrize("name", ["optimizer.param_groups.first.lr", "optimizer.param_groups.0"])
def test_options_of_an_optimizer_that_belong_to_no_group_are_refused_by_name(name):
    reader = SimpleNamespace(
        path=Path("c"), objects={"optimizer.param_groups.0.lr": 0.5, name: 0.5}, tensors={}
    )
    with pytest.raises(CheckpointError, match=f"^c: expected names like .*0.lr, found '{re.escape(name)}'$"):
        _saved_groups(reader)
    del reader.objects[name]
    assert _saved_groups(reader) == {0: {"lr": 0.5}}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_sgd_momentum_that_some_parameters_lack_is_saved_as_zeros(tmp_path, steps, nesterov):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)

    model, untouched = _decoder(1), _decoder(1)
    optimizer, reference = sgd(model), sgd(untouched)
    for run, its_optimizer in ((model, optimizer), (untouched, reference)):
        run.layers[1].requires_grad_(False)  # no gradient in the steps before the save
        for index in range(steps):
            _step(run, its_optimizer, index)
        run.layers[1].requires_grad_(True)
    save_checkpoint(tmp_path / "a", model, optimizer)
    resumed = _decoder(2)
    resumed_optimizer = sgd(resumed)
    load_checkpoint(tmp_path / "a", resumed, resumed_optimizer)
    runs = ((untouched, reference), (model, optimizer), (resumed, resumed_optimizer))
    for run, its_optimizer in runs:
        for index in (5, 6):
            _step(run, its_optimizer, index)
        _assert_equal(_state(run, its_optimizer), _state(untouched, reference))


def test_sgd_momentum_with_dampening_that_some_parameters_lack_is_refused(tmp_path):
    model = _decoder(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    model.layers[1].requires_grad_(False)
    _step(model, optimizer, 0)
    model.layers[1].requires_grad_(True)
    lacking, total = len(list(model.layers[1].parameters())), len(list(model.parameters()))
    with pytest.raises(
        ValueError, match=rf"a gradient for each .* SGD without state for {lacking} of {total}"
    ):
        save_checkpoint(tmp_path / "a", model, optimizer)


def test_sgd_momentum_with_dampening_goes_on_in_a_fresh_optimizer(tmp_path):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    model, resumed = _decoder(1), _decoder(2)
    optimizer, resumed_optimizer = sgd(model), sgd(resumed)
    _step(model, optimizer, 0)
    save_checkpoint(tmp_path / "a", model, optimizer)
    load_checkpoint(tmp_path / "a", resumed, resumed_optimizer)
    for index in (5, 6):
        _step(model, optimizer, index)
        _step(resumed, resumed_optimizer, index)
    _assert_equal(_state(resumed, resumed_optimizer), _state(model, optimizer))


def test_loading_what_is_not_there_or_no_directory_raises(tmp_path):
    model, optimizer = _trained(steps=0)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="missing does not exist: expected a checkpoint there"):
        load_checkpoint(tmp_path / "missing", model, optimizer)
    with pytest.raises(NotADirectoryError):
        load_checkpoint(tmp_path / "file", model, optimizer)
    with pytest.raises(CheckpointError, match="an empty directory"):
        load_checkpoint(tmp_path / "empty", model, optimizer)


def _refused_unchanged(path: Path, model: nn.Module, message: str, fresh: bool = True) -> None:
    """Loading raises CheckpointError with the message and modifies nothing."""
    optimizer = _adamw(model, lr=0.125)
    if not fresh:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = _state(model, optimizer if not fresh else None)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, model, optimizer)
    _assert_equal(_state(model, optimizer if not fresh else None), before)
    assert bool(optimizer.state) == (not fresh)
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("fresh", [True, False])
def test_another_model_is_refused_with_the_names_that_differ_and_nothing_changes(tmp_path, fresh):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer)
    deeper = Decoder(DecoderConfig(**{**vars(TINY), "n_layers": 3}))
    _refused_unchanged(
        tmp_path / "a", deeper, r"32 missing: model\.layers\.2\.\S+, .* and 27 more \(another model\?", fresh
    )
    tied = Decoder(DecoderConfig(**{**vars(TINY), "tied": True}))
    _refused_unchanged(tmp_path / "a", tied, r"4 unexpected: model\.lm_head\.weight, optimizer\.state", fresh)
    wider = Decoder(DecoderConfig(**{**vars(TINY), "d_ff": 14}))
    _refused_unchanged(
        tmp_path / "a",
        wider,
        r"12 tensors differ [\s\S]*w13.weight: expected float32 \(28, 21\), found .* \(26, 21\)",
        fresh,
    )
    _refused_unchanged(
        tmp_path / "a", Decoder(TINY).double(), r"differ [\s\S]*expected float64 .* found float32", fresh
    )


def test_an_optimizer_with_other_state_is_refused(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match=r"19 missing: optimizer\.state\.embed\.weight\.max_exp_avg_sq"):
        load_checkpoint(tmp_path / "a", model, torch.optim.AdamW(model.parameters(), amsgrad=True))


def test_the_notes_of_a_conversion_are_no_part_of_the_model(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer)
    with open_checkpoint(tmp_path / "a") as reader, create_checkpoint(tmp_path / "b", "dcp") as writer:
        names = {
            name: writer.add_tensor(info.path, info.shape, info.dtype).name
            for name, info in reader.tensors.items()
        }
        for name in reader.objects:
            writer.add_object(reader.object_paths[name], reader.objects[name])
        writer.add_kinds({"train.rng": "key<rbg>"})
        for name, written in names.items():
            for box in writer.chunks(written):
                writer.write(written, box, reader.read(name, box))
    other = _decoder(3)
    load_checkpoint(tmp_path / "b", other, again := _adamw(other))
    _assert_equal(_state(other, again), _state(model, optimizer))


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_nothing_changes(tmp_path, keep):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer)
    file = tmp_path / "a" / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.truncate(int(keep * file.stat().st_size))
    _refused_unchanged(tmp_path / "a", _decoder(3), "truncated")


def test_a_flipped_bit_is_refused_and_nothing_changes(tmp_path):
    model, optimizer = _trained()
    save_checkpoint(tmp_path / "a", model, optimizer)
    needle = model.lm_head.weight.detach().numpy().tobytes()
    file = tmp_path / "a" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(needle) + 5] ^= 1
    file.write_bytes(data)
    _refused_unchanged(tmp_path / "a", _decoder(3), r"model\.lm_head\.weight")


class _Hostile:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.target,)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    model, optimizer = _trained(steps=0)
    save_checkpoint(tmp_path / "a", model, optimizer)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran")), protocol=4))
    _refused_unchanged(tmp_path / "a", model, "metadata")
    assert not (tmp_path / "ran").exists()


def test_names_of_parameters_stay_those_of_the_live_groups(tmp_path):
    model = _decoder(0)
    save_checkpoint(tmp_path / "a", model, torch.optim.AdamW(model.named_parameters()))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}])
    load_checkpoint(tmp_path / "a", model, optimizer)
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [[name for name, _ in named[:3]], [name for name, _ in named[3:]]]


def test_a_function_that_this_version_of_torch_lacks_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(known=len)
    wraps = (
        (module, "known", lambda original: (original,)),
        (module, "absent", lambda original: (original,)),
    )
    monkeypatch.setattr(full_state_dict, "_WRAPPED", wraps)
    full_state_dict.accept_full_state_dicts.__wrapped__()
    assert vars(module) == {"known": (len,)}


def test_a_value_of_a_group_gets_the_live_values_type_or_is_refused() -> None:
    like = contents._like
    assert like((0.9, 0.99), [0.5, 1], "betas") == (0.5, 1.0)
    for current, value, expected in ((1.0, 2, 2.0), (None, "x", "x"), (3, None, None), (True, False, False)):
        made = like(current, value, "g")
        assert (made, type(made)) == (expected, type(expected))
    for current, value in ((True, 1), (1.0, True), ("a", 1), ((1, 2), [1, 2, 3])):
        with pytest.raises(CheckpointError, match=r"g: expected a .*, found"):
            like(current, value, "g")
