"""A run on one or two ranks that saves asynchronously by the manager. ``Zygote`` forks and kills it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.support.killed_saves import KEPT, STEPS, acknowledge, serve
from torch_impl import CheckpointManager, MainWeightAdamW, fully_shard


def run(job: dict[str, Any], rank: int) -> None:
    world = job["world"]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['log']}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(31, 31) for _ in range(6)))
    fully_shard(model)
    optimizer = MainWeightAdamW(model.parameters(), lr=0.01)
    with CheckpointManager(job["directory"], max_to_keep=KEPT) as manager:
        first = 0
        if manager.latest_step() is not None:
            first = manager.load(model, optimizer)["step"]
        for index in range(first, STEPS):
            rows = np.random.default_rng(index).standard_normal((4, 31), np.float32)
            own = torch.from_numpy(rows[rank * 4 // world : (rank + 1) * 4 // world])
            model(own).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(index + 1, model, optimizer, {"step": index + 1}, metrics={"index": index})
            if index > first:
                acknowledge(job, rank, index)
    acknowledge(job, rank, STEPS)


if __name__ == "__main__":
    serve(run)
