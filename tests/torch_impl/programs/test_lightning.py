"""Lightning's ``ModelParallelStrategy`` in Trainer and Fabric, with torch's ``fully_shard`` and with ours.

The strategy makes a mesh of two axes, materializes modules, clips, saves and loads. The ``fully_shard`` is the user's:
in ``LightningModule.configure_model``, or in Fabric's ``parallelize_fn``. Lightning takes CPUs for it as they are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    assert_equal_runs,
    assert_sharded,
    both,
    needs,
    whole,
)

pytestmark = [pytest.mark.slow, needs("lightning")]

Sharding = Callable[..., nn.Module]
# Of this rank in an epoch, and of each of them two make a step.
BATCHES = 8


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Lightning initializes what was on the meta device by methods of this name."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Network(nn.Module):
    """Of sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.scale = Scale(7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.scale(x))


def parallelized(network: nn.Module, mesh: DeviceMesh, sharding: Sharding | None) -> nn.Module:
    """By ``sharding``, or else by what the program imports, of which ``install`` has taken the place or not."""
    from torch.distributed.fsdp import fully_shard

    fully_shard = sharding or fully_shard
    for layer in network.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])
    if sharding is None:
        assert_sharded(network)
    assert isinstance(network, torch_impl.FSDPModule) == (fully_shard is torch_impl.fully_shard)
    return network


def loss_of(network: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return (network(batch[0]) - batch[1]).square().mean()


def dataset() -> TensorDataset:
    """For all ranks: Lightning's sampler gives each of them rows of its own."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3 * BATCHES * dist.get_world_size(), 7, generator=generator)
    return TensorDataset(inputs, torch.stack([inputs.sum(1), inputs[:, 0], inputs[:, 1] * inputs[:, 2]], 1))


@contextmanager
def launched() -> Iterator[None]:
    """As by a launcher, which starts the processes before Lightning is called."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "NODE_RANK": "0"}
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        # Hints about workers of data loaders, and about folders that exist.
        warnings.filterwarnings("ignore", module="lightning")
        yield


def by_trainer(folder: str, sharding: Sharding | None, distributed: bool, empty_init: bool) -> Result:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Program(lightning.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.network = Network()
            self.losses: list[float] = []
            self.norms: list[float] = []

        def configure_model(self) -> None:
            parallelized(self.network, self.device_mesh, sharding)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = loss_of(self.network, batch)
            self.losses.append(loss.item())
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *clipping: Any, **options: Any) -> None:
            self.norms.append(number(nn.utils.get_total_norm([param.grad for param in self.parameters()])))
            self.clip_gradients(optimizer, *clipping, **options)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    def fit(seed: int, epochs: int, checkpoint: str | None = None) -> tuple[Any, Program]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=distributed),
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with trainer.init_module(empty_init=empty_init and checkpoint is not None):
            program = Program(seed)
        trainer.fit(program, DataLoader(dataset(), batch_size=3), ckpt_path=checkpoint)
        return trainer, program

    with launched():
        _, straight = fit(0, 2)
        trainer, first = fit(0, 1)
        checkpoint = str(Path(folder) / "epoch.ckpt")
        trainer.save_checkpoint(checkpoint)
        assert Path(checkpoint).is_dir() == distributed
        _, second = fit(7, 2, checkpoint)
        assert first.losses + second.losses == straight.losses, "goes on as the first one did"
        assert first.norms + second.norms == straight.norms
        return Result(straight.losses, straight.norms, whole(straight.network))


def number(norm: torch.Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def is_reduced(grad: torch.Tensor | None) -> bool:
    return isinstance(grad, DTensor) and not any(placement.is_partial() for placement in grad.placements)


def by_fabric(folder: str, sharding: Sharding | None, distributed: bool, empty_init: bool) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def prepared(seed: int, empty: bool = False) -> tuple[Any, Any, Any]:
        strategy = ModelParallelStrategy(
            lambda network, mesh: parallelized(network, mesh, sharding),
            dist.get_world_size(),
            1,
            save_distributed_checkpoint=distributed,
        )
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        torch.manual_seed(seed)
        with fabric.init_module(empty_init=empty):
            network = Network()
        network = fabric.setup(network)
        return fabric, network, fabric.setup_optimizers(torch.optim.AdamW(network.parameters(), lr=0.05))

    def epoch(fabric: Any, network: Any, optimizer: Any) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        for index, batch in enumerate(fabric.setup_dataloaders(DataLoader(dataset(), batch_size=3))):
            last = index % 2 == 1
            with fabric.no_backward_sync(network, enabled=not last):
                loss = loss_of(network, batch)
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if sharding is None and not last:
                assert not any(is_reduced(param.grad) for param in network.parameters())
            if last:
                norms.append(number(fabric.clip_gradients(network, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
        return losses, norms

    # Fabric does not make the folder of a checkpoint that is one file.
    Path(folder).mkdir(parents=True, exist_ok=True)
    with launched():
        fabric, network, optimizer = prepared(0)
        first = epoch(fabric, network, optimizer)
        checkpoint = Path(folder) / "epoch.ckpt"
        fabric.save(checkpoint, {"network": network, "optimizer": optimizer, "epoch": 1})
        assert checkpoint.is_dir() == distributed
        second = epoch(fabric, network, optimizer)
        fabric, again, optimizer = prepared(7, empty_init)
        state = {"network": again, "optimizer": optimizer, "epoch": 0}
        fabric.load(checkpoint, state)
        assert state["epoch"] == 1
        assert epoch(fabric, again, optimizer) == second, "goes on as the first one did"
        return Result(first[0] + second[0], first[1] + second[1], whole(network.module))


def job(folder: str, part: str, by_install: bool, distributed: bool, empty_init: bool) -> list[Any]:
    train = {"trainer": by_trainer, "fabric": by_fabric}[part]
    if by_install:
        return both(lambda folder: train(folder, None, distributed, empty_init), folder)
    return [
        train(str(Path(folder) / library.__name__), library.fully_shard, distributed, empty_init)
        for library in (fsdp, torch_impl)
    ]


@pytest.mark.parametrize("part", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("by_install", "distributed", "empty_init"),
    [
        pytest.param(True, True, True, id="installed-sharded"),
        pytest.param(True, False, False, id="installed-whole"),
        pytest.param(False, True, False, id="imported"),
    ],
)
def test_lightning_trains_clips_saves_and_loads(
    ranks: RankGroup, tmp_path: Path, part: str, by_install: bool, distributed: bool, empty_init: bool
) -> None:
    runs = ranks.run(2, job, str(tmp_path), part, by_install, distributed, empty_init)
    assert_equal_runs(runs, learned=0.3)
