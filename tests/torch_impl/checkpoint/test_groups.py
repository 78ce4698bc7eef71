"""Which ranks save and load together: those of a mesh, or of a group. Ranks that differ are told, and none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torch_impl
from bridge.core.formats import CheckpointError, open_checkpoint
from tests.support.ranks import RankGroup, on_ranks
from torch_impl import CheckpointManager, load_checkpoint, save_checkpoint, save_checkpoint_async


def half() -> int:
    """Of four ranks, 0 and 1 are one half, 2 and 3 the other."""
    return dist.get_rank() // 2


def model_of(mesh: DeviceMesh, seed: int, features: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return torch_impl.fully_shard(nn.Linear(features, 3), mesh=mesh)


def mesh_of_half() -> DeviceMesh:
    own = torch.arange(2) + 2 * half()
    # Made by its own ranks alone, as by a program that knows of no others.
    group = dist.new_group(own.tolist(), use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu")


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [
        param.full_tensor().detach().clone() for param in model.parameters() if isinstance(param, DTensor)
    ]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("way", ["sync", "async", "manager"])
@pytest.mark.pairwise
@on_ranks(4, timeout=100)
def test_two_meshes_save_at_once(tmp_path: Any, way: str, inner: bool) -> None:
    """Both halves save at once, each its own model at its own path, and load it."""
    folder = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "dp"))["dp"] if inner else mesh_of_half()
    model, path = model_of(mesh, half()), f"{folder}/{half()}"
    expected = weights(model)
    if way == "manager":
        with CheckpointManager(path) as manager:
            manager.save(4, model, train={"step": half()})
            manager.save(7, model, train={"step": half()})
    elif way == "async":
        first = save_checkpoint_async(f"{path}/4", model, train={"step": half()})
        second = save_checkpoint_async(f"{path}/7", model, train={"step": half()})
        first.wait()
        second.wait()
    else:
        save_checkpoint(f"{path}/7", model, train={"step": half()})
    other = model_of(mesh, 5)
    load = CheckpointManager(path).load if way == "manager" else lambda *args: load_checkpoint(path, *args)
    assert load(other) == {"step": half()}
    assert all(map(torch.equal, weights(other), expected))


@pytest.mark.parametrize("plain", [False, True])
@on_ranks(4, timeout=100)
def test_ranks_of_one_mesh_save_without_the_others(tmp_path: Any, plain: bool) -> None:
    """The other ranks do something else, and never come."""
    path = str(tmp_path / "a")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "dp"))["dp"]
    if half():
        return
    model = nn.Linear(5, 3) if plain else model_of(mesh, 0)
    torch.nn.init.ones_(model.weight)
    group = mesh.get_group() if plain else None
    save_checkpoint(path, model, train={"step": 3}, process_group=group)
    assert load_checkpoint(path, model, process_group=group) == {"step": 3}


def differing(folder: str, what: str) -> str:
    """What all ranks say where rank 2 of 3 has something else."""
    other = dist.get_rank() == 2
    mesh = init_device_mesh("cpu", (3,))
    model: nn.Module = model_of(mesh, 0)
    path, train = f"{folder}/a", {"step": 7, "order": torch.arange(3).numpy()}
    try:
        if what == "path":
            save_checkpoint(f"{folder}/b" if other else path, model)
        elif what == "async path":
            save_checkpoint_async(f"{folder}/b" if other else path, model)
        elif what == "manager's step":
            CheckpointManager(folder).save(8 if other else 7, model)
        elif what == "step":
            save_checkpoint(path, model, train={**train, "step": 8} if other else train)
        elif what == "train array":
            save_checkpoint(
                path, model, train={**train, "order": torch.arange(1, 4).numpy()} if other else train
            )
        elif what == "shape":
            model.extra = nn.Linear(4 if other else 3, 1)
            save_checkpoint(path, model)
        elif what == "name":
            if other:
                model.extra = nn.Linear(1, 1)
            save_checkpoint(path, model)
        elif what == "load path":
            load_checkpoint(f"{folder}/b" if other else path, model)
        elif what == "load step":
            load_checkpoint(folder, model, step=8 if other else 7)
        elif what == "call":
            if other:
                load_checkpoint(path, model)
            else:
                save_checkpoint(path, model)
    except CheckpointError as error:
        return str(error)
    return "nothing"


EXPECTED = {
    "path": ("/a on rank 0", "/b on rank 2"),
    "async path": ("/a on rank 0", "/b on rank 2"),
    "manager's step": ("/7 on rank 0", "/8 on rank 2"),
    "step": ("train.step is int64 () 7 on rank 0", "int64 () 8 on rank 2"),
    "train array": ("train.order is int64 (3,) with checksum", "on rank 2"),
    "shape": ("model.extra.weight is float32 (1, 3) on rank 0", "float32 (1, 4) on rank 2"),
    "name": ("model.extra.weight is absent on rank 0", "float32 (1, 1) on rank 2"),
    "load path": ("/a on rank 0", "/b on rank 2"),
    "load step": ("the step is 7 on rank 0", "8 on rank 2"),
    "call": ("the call is a save on rank 0", "a load on rank 2"),
}


@pytest.mark.parametrize("what", EXPECTED)
def test_ranks_that_differ_are_named_on_all_ranks(ranks: RankGroup, tmp_path: Any, what: str) -> None:
    for text in ranks.run(3, differing, str(tmp_path), what, timeout=100):
        assert all(part in text for part in EXPECTED[what]), text
        assert "(ranks 0, 1 against 2)" in text
        assert "process_group=" in text
    assert not list(tmp_path.iterdir())


def stages(path: str, joined: bool) -> str:
    """Two stages of a pipeline, each with a mesh and tensors of its own."""
    mesh = mesh_of_half()
    model = nn.ModuleDict({str(half()): model_of(mesh, half(), features=4 + half())})
    expected = weights(model)
    try:
        save_checkpoint(path, model, process_group=dist.group.WORLD if joined else None)
    except FileExistsError as error:
        return str(error)
    load_checkpoint(path, model, process_group=dist.group.WORLD) if joined else None
    assert all(map(torch.equal, weights(model), expected))
    return "saved"


def test_stages_save_into_one_checkpoint_with_a_group_of_all(ranks: RankGroup, tmp_path: Any) -> None:
    with pytest.raises(Exception, match="unexpected"):
        # Each stage asks for its own tensors only.
        ranks.run(4, stages, str(tmp_path / "a"), True, timeout=100)
    with open_checkpoint(tmp_path / "a") as reader:
        assert {name: reader.tensors[name].shape for name in reader.tensors} == {
            "model.0.weight": (3, 4),
            "model.0.bias": (3,),
            "model.1.weight": (3, 5),
            "model.1.bias": (3,),
        }


@on_ranks(2)
def test_a_group_is_one_that_the_rank_is_in(tmp_path: Any) -> None:
    path = str(tmp_path / "a")
    model = nn.Linear(2, 2)
    group = dist.new_group([0])
    with pytest.raises(
        TypeError, match=r"process_group: expected a torch.distributed.ProcessGroup, got DeviceMesh"
    ):
        save_checkpoint(path, model, process_group=init_device_mesh("cpu", (2,)))  # type: ignore[arg-type]
    if dist.get_rank() == 1:
        with pytest.raises((TypeError, ValueError), match=r"process_group: expected"):
            save_checkpoint(path, model, process_group=group)
    else:
        save_checkpoint(path, model, process_group=group)


def too_few(path: str) -> None:
    model, group = model_of(init_device_mesh("cpu", (4,)), 0), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(
            CheckpointError, match=r"together hold all rows, got ranks \[0, 1\]: .*process_group="
        ):
            save_checkpoint(path, model, process_group=group)


def test_a_group_without_some_of_the_rows_is_refused_by_name(ranks: RankGroup, tmp_path: Any) -> None:
    ranks.run(4, too_few, str(tmp_path / "a"), timeout=100)
    assert not list(tmp_path.iterdir())
