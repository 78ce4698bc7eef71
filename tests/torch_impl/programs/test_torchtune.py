"""torchtune's full finetuning: its sharding, loads and gathers, with torch's ``fully_shard`` and with ours.

In the order of ``recipes/full_finetune_distributed.py``, which itself needs CUDA. No ``to_empty``: the load gives a
model on the meta device its memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    assert_equal_runs,
    assert_sharded,
    both,
    needs,
    tokens,
    whole,
)

# torchtune reads torchao's NF4 from where torchao 0.13 has it last.
pytestmark = [pytest.mark.slow, needs("torchtune", "torchao.dtypes.nf4tensor")]


def built(seed: int, offload: bool) -> nn.Module:
    from torchtune import training
    from torchtune.models.llama3 import llama3
    from torchtune.training import _distributed

    make = partial(
        llama3,
        vocab_size=67,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=24,
        max_seq_len=16,
        intermediate_dim=41,
    )
    torch.manual_seed(seed)
    # On CPUs torchtune loads from whole state dicts on all ranks.
    state = make().state_dict()
    with torch.device("meta"):
        model = make()
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    # A CPU has no memory to pin.
    unpinned = partial(CPUOffloadPolicy, pin_memory=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_distributed, "CPUOffloadPolicy", unpinned)
        training.shard_model(
            model=model, shard_conditions=conditions, cpu_offload=offload, reshard_after_forward=True
        )
    assert_sharded(model)
    with torch.device("cpu"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    training.load_from_full_model_state_dict(
        model, state, torch.device("cpu"), strict=True, cpu_offload=offload
    )
    training.validate_no_params_on_meta_device(model)
    return model


def steps(model: nn.Module, optimizer: Any, numbers: range) -> tuple[list[float], list[float]]:
    from torchtune import training

    losses, norms = [], []
    for step in numbers:
        # Ranks have different numbers of tokens.
        ids = tokens(step, rows=4, length=8 + dist.get_rank())
        count = torch.tensor(0.0)
        for part in ids.chunk(2):
            targets = part[:, 1:].flatten()
            logits = model(part)[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
            loss.backward()
            losses.append(loss.item() / targets.numel())
            count += targets.numel()
        dist.all_reduce(count)
        training.scale_grads(model, dist.get_world_size() / count)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, norms


def trained_and_gathered(offload: bool, folder: str) -> Result:
    from torchtune import training

    device = torch.device("cpu")
    model = built(0, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = steps(model, optimizer, range(5))
    first = dist.get_rank() == 0
    shared = [
        training.gather_cpu_state_dict(model, first, device=device),
        training.get_full_optimizer_state_dict(model, optimizer, first, device=device),
    ]
    dist.broadcast_object_list(shared, src=0)
    state, moments = shared
    weights = whole(model)
    again = built(7, offload)
    training.load_from_full_model_state_dict(again, dict(state), device, strict=True, cpu_offload=offload)
    for name, weight in whole(again).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    training.load_from_full_optimizer_state_dict(again, optimizer, moments, device)
    for name, param in again.named_parameters():
        found = optimizer.state[param]["exp_avg"].full_tensor()
        torch.testing.assert_close(found, moments["state"][name]["exp_avg"], rtol=0, atol=0)
    return Result(losses, norms, weights)


def job(folder: str, offload: bool) -> list[Any]:
    return both(partial(trained_and_gathered, offload), folder, fresh=("torchtune",))


@pytest.mark.parametrize("offload", [False, True])
def test_torchtune_loads_into_meta_trains_gathers_and_loads(
    ranks: RankGroup, tmp_path: Path, offload: bool
) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path), offload), learned=0.3)
