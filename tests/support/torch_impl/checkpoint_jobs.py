"""Rank functions of the checkpoint tests. Every rank trains on its own slice of a global batch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.files.atomic import AtomicDirectory
from tests.support.torch_impl.toy import counted
from torch_impl import (
    MainWeightAdamW,
    MixedPrecisionPolicy,
    full_tensor,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from torch_impl.dtensor.local import local_of
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

TINY = DecoderConfig(vocab_size=19, d_model=21, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=13)
GLOBAL_BATCH = 12
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
HYPERPARAMETERS = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
    "adam_w_mode": True,
    "bias_correction": True,
}

State = dict[str, np.ndarray]


ZOO: dict[str, tuple[int, ...]] = {
    "scale": (),
    "shift": (7,),
    "matrix": (7, 5),
    "stack": (3, 4, 5),
    "kernel": (2, 3, 2, 3),
    "hollow": (3, 0, 2),
}


class Zoo(nn.Module):
    """Parameters of every awkward shape, all used: ``[B, 5] -> [B]``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, shape in ZOO.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random)))
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.tanh(x @ self.matrix.T + self.shift).sum(-1) * self.scale
        stacked = torch.einsum("bi,eji->bej", x, self.stack).tanh().flatten(1)
        wide = torch.cat([stacked, stacked, stacked], dim=1)
        return flat + (wide * self.kernel.flatten()).mean(-1) + self.hollow.sum()


def decoder_run(strategy: str, seed: int, **options: Any) -> tuple[nn.Module, MainWeightAdamW]:
    """A tiny decoder, sharded by blocks and root, and its optimizer."""
    model = Decoder(TINY)
    model.init_weights(seed)
    precision = MixedPrecisionPolicy(param_dtype=options.pop("param_dtype", None))
    for layer in model.layers:
        fully_shard(layer, strategy=strategy, mp_policy=precision)
    fully_shard(model, strategy=strategy, mp_policy=precision)
    return model, MainWeightAdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options})


def zoo_run(strategy: str, seed: int) -> tuple[nn.Module, MainWeightAdamW]:
    model = fully_shard(Zoo(seed), strategy=strategy)
    return model, MainWeightAdamW(model.parameters(), lr=0.01, weight_decay=0.5)


def stock_run(strategy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder under PyTorch's own AdamW."""
    model, _ = decoder_run(strategy, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


RUNS = {"decoder": decoder_run, "zoo": zoo_run, "stock": stock_run}


def _loss(model: nn.Module, index: int) -> torch.Tensor:
    """Mean loss of this rank's slice of the global batch of a step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    own = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
    random = np.random.default_rng(index)
    if isinstance(model, Zoo):
        return model(torch.from_numpy(random.standard_normal((GLOBAL_BATCH, 5)))[own].float()).square().mean()
    tokens = torch.from_numpy(random.integers(0, TINY.vocab_size, (GLOBAL_BATCH, 8)))[own]
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def global_loss(model: nn.Module, index: int) -> float:
    """Mean loss over the global batch, without gradients."""
    with torch.no_grad():
        loss = _loss(model, index).double()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    """One training step; returns the mean loss over the global batch."""
    loss = _loss(model, index)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """Every tensor of the run in full, by its checkpoint name; collective."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.state.{name}.{key}"] = value
    return {
        name: (full_tensor(t) if isinstance(t, DTensor) else t.detach()).numpy().copy()
        for name, t in tensors.items()
    }


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part of every tensor; no communication."""
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"optimizer.state.{name}.{key}"] = value
    return {
        name: (local_of(t) if isinstance(t, DTensor) else t).detach().numpy().copy()
        for name, t in values.items()
    }


def interrupted(run_name: str, strategy: str, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train two steps, save, and train two more steps."""
    model, optimizer = RUNS[run_name](strategy, seed=1, **options)
    for index in (0, 1):
        step(model, optimizer, index)
    before = full_state(model, optimizer)
    save_checkpoint(path, model, optimizer, {"step": 2, "sha": np.arange(4, dtype=np.uint8)})
    saved = full_state(model, optimizer)
    assert all(np.array_equal(saved[name], before[name]) for name in before)
    losses = [global_loss(model, 7), step(model, optimizer, 2), step(model, optimizer, 3)]
    return {"saved": saved, "losses": losses, "final": full_state(model, optimizer)}


def resumed(run_name: str, strategy: str, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Load into another trained run, run a forward, and train two steps."""
    model, optimizer = RUNS[run_name](strategy, seed=5, **options)
    step(model, optimizer, 11)
    optimizer.param_groups[0].update(lr=9.0, weight_decay=9.0, betas=(0.1, 0.2), eps=9.0)
    train = load_checkpoint(path, model, optimizer)
    loaded = full_state(model, optimizer)
    losses = [global_loss(model, 7), step(model, optimizer, 2), step(model, optimizer, 3)]
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return {
        "train": train,
        "loaded": loaded,
        "group": group,
        "losses": losses,
        "final": full_state(model, optimizer),
    }


def stored_rows(run_name: str, strategy: str, path: str) -> dict[str, list[tuple[int, ...]]]:
    """Save, and return the stored chunks of every tensor as ``offsets + sizes``, seen by the stock reader."""
    save_checkpoint(path, *RUNS[run_name](strategy, seed=1))
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    chunks = {name: getattr(entry, "chunks", []) for name, entry in metadata.items()}
    return {name: sorted((*c.offsets, *c.sizes) for c in boxes) for name, boxes in chunks.items()}


def plain_load(path: str, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> State:
    """Load with stock DCP into ordinary tensors on every rank."""
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()
    }
    dcp.load(tensors, checkpoint_id=path)
    return {name: value.numpy() for name, value in tensors.items()}


def save_before_any_step(strategy: str, path: str) -> tuple[State, State, State, list[float], list[float]]:
    """Weights before and after saving a run without a step, what was loaded, and losses with and without the save."""
    model, optimizer = decoder_run(strategy, seed=1, weight_decay=0.5)
    before = full_state(model, None)
    save_checkpoint(path, model, optimizer)
    after = full_state(model, None)
    fresh, its_optimizer = decoder_run(strategy, seed=2, weight_decay=0.5)
    load_checkpoint(path, fresh, its_optimizer)
    loaded = full_state(fresh, its_optimizer)
    untouched, other_optimizer = decoder_run(strategy, seed=1, weight_decay=0.5)
    losses = [step(model, optimizer, index) for index in (0, 1)]
    return before, after, loaded, losses, [step(untouched, other_optimizer, index) for index in (0, 1)]


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def forward_after_load_where_ranks_hold_nothing(strategy: str, path: str) -> list[float]:
    """A unit of two elements, so that with three or four ranks some ranks own no row."""
    model = fully_shard(_Unit(), strategy=strategy)
    optimizer = MainWeightAdamW(model.parameters())
    save_checkpoint(path, model, optimizer)
    with torch.no_grad():
        model.weight.mul_(100)
    model(torch.ones(2))
    load_checkpoint(path, model, optimizer)
    return model(torch.ones(2)).tolist()


def two_groups(path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Hyperparameters of two groups as saved, and as loaded into groups in the other order."""

    def build(swap: bool, **change: Any) -> tuple[nn.Module, MainWeightAdamW]:
        model, _ = decoder_run("optim_grads", seed=1)
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        others = [p for n, p in model.named_parameters() if "norm" not in n]
        groups = [{"params": norms, "lr": 0.5, **change}, {"params": others, "weight_decay": 0.25, **change}]
        return model, MainWeightAdamW(groups[::-1] if swap else groups, lr=0.125, betas=(0.5, 0.75), eps=1e-5)

    def values(optimizer: MainWeightAdamW) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    model, optimizer = build(False)
    save_checkpoint(path, model, optimizer)
    other, its_optimizer = build(True, lr=7.0, weight_decay=7.0, betas=(0.1, 0.1), eps=7.0)
    load_checkpoint(path, other, its_optimizer)
    return values(optimizer), values(its_optimizer)


def _error_of(function: Any, *args: Any) -> tuple[str, str]:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def _failing(where: str, rank: int) -> Iterator[None]:
    """Let one rank fail at a point of saving or loading."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    targets: dict[str, tuple[Any, str]] = {
        "write": (dcp.DefaultSavePlanner, "resolve_data"),
        "plan": (dcp.DefaultSavePlanner, "create_local_plan"),
        "commit": (AtomicDirectory, "commit"),
        "read": (DcpReader, "read"),
    }
    if dist.get_rank() != rank:
        yield
        return
    with mock.patch.object(*targets[where], side_effect=full):
        yield


def failing_save(path: str, where: str, rank: int) -> tuple[str, str, list[str]]:
    """Error type and text of a save that fails on one rank, and the files left next to the destination."""
    model, optimizer = decoder_run("optim", seed=1)
    with _failing(where, rank):
        error = _error_of(save_checkpoint, path, model, optimizer)
    dist.barrier()
    left = sorted(os.listdir(Path(path).parent))
    # The ranks are still in step: the same save works now.
    dist.barrier()
    save_checkpoint(f"{path}-again", model, optimizer)
    return (*error, left)


def save_of_unequal_train_state(path: str) -> tuple[str, str]:
    model, optimizer = decoder_run("optim", seed=1)
    bad = dist.get_rank() == dist.get_world_size() - 1
    return _error_of(save_checkpoint, path, model, optimizer, {"step": "two" if bad else 2})


def save_onto_existing(path: str) -> tuple[str, str]:
    model, optimizer = decoder_run("no_shard", seed=1)
    return _error_of(save_checkpoint, path, model, optimizer)


def failing_load(path: str, where: str, rank: int) -> tuple[str, str, bool, float]:
    """Error type and text of a load that fails on one rank, whether anything changed, and the loss of a later step."""
    model, optimizer = decoder_run("optim_grads_params", seed=2)
    step(model, optimizer, 0)
    before = local_state(model, optimizer)
    with _failing(where, rank):
        error = _error_of(load_checkpoint, path, model, optimizer)
    after = local_state(model, optimizer)
    unchanged = before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before)
    return (*error, unchanged, step(model, optimizer, 1))


def load_of_other_model(path: str) -> tuple[str, str, bool]:
    """Load a decoder's checkpoint into a zoo whose optimizer never stepped."""
    model, optimizer = zoo_run("optim_grads", seed=2)
    before = local_state(model, optimizer)
    error = _error_of(load_checkpoint, path, model, optimizer)
    after = local_state(model, optimizer)
    same = before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before)
    return (*error, same)


def save_only(run_name: str, strategy: str, path: str) -> None:
    model, optimizer = RUNS[run_name](strategy, seed=1)
    step(model, optimizer, 0)
    save_checkpoint(path, model, optimizer)


def save_while_unsharded(path: str) -> tuple[State, State]:
    """The state before, and as loaded from what was saved between ``unshard`` and ``reshard``."""
    model, optimizer = decoder_run("optim_grads_params", seed=1, param_dtype=torch.bfloat16)
    step(model, optimizer, 0)
    before = full_state(model, optimizer)
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    save_checkpoint(path, model, optimizer)
    fresh, its_optimizer = decoder_run("optim", seed=2)
    for module in fresh.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    load_checkpoint(path, fresh, its_optimizer)
    return before, full_state(fresh, its_optimizer)


def plain_round_trip(strategy: str, path: str) -> list[list[tuple[int, ...]]]:
    """Stock save and load of a state dict with every shape; returns the stored chunks of the empty tensor."""
    model, other = (fully_shard(Zoo(seed), strategy=strategy) for seed in (1, 2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    dcp.load({"model": other.state_dict()}, checkpoint_id=path)
    saved, loaded = full_state(model, None), full_state(other, None)
    assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
    entry = FileSystemReader(path).read_metadata().state_dict_metadata["model.hollow"]
    return [(*chunk.offsets, *chunk.sizes) for chunk in entry.chunks]


def collectives_of_a_save(strategy: str, path: str) -> dict[str, int]:
    """How often a save communicates tensors."""
    model, optimizer = zoo_run(strategy, seed=1)
    step(model, optimizer, 0)
    with counted() as counts:
        save_checkpoint(path, model, optimizer)
    return counts


def bytes_written(strategy: str, path: str) -> dict[str, int]:
    """Size of each data file of a saved run."""
    model, optimizer = decoder_run(strategy, seed=1)
    save_checkpoint(path, model, optimizer)
    return {file.name: file.stat().st_size for file in Path(path).glob("*.distcp")}
