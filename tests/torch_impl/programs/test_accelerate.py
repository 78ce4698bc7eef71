"""accelerate's own FSDP2 preparation, its save and its load, with torch's ``fully_shard`` and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    accelerate_on_cpus,
    assert_equal_runs,
    assert_sharded,
    both,
    llama,
    needs,
    tokens,
    whole,
)

pytestmark = [pytest.mark.slow, needs("accelerate", "transformers")]


def prepared(seed: int, state_dict_type: str, tied: bool, **options: Any) -> tuple[Any, Any, Any]:
    """Only rank 0 has the values of ``seed``, as after accelerate's RAM-efficient loading."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        state_dict_type=state_dict_type,
        **options,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    model = llama(seed + dist.get_rank(), tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert_sharded(model)
    return accelerator, model, optimizer


def steps(accelerator: Any, model: Any, optimizer: Any, numbers: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in numbers:
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def trained_and_resumed(folder: str, state_dict_type: str, tied: bool, options: dict[str, Any]) -> Result:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with accelerate_on_cpus():
        accelerator, model, optimizer = prepared(0, state_dict_type, tied, **options)
        losses, norms = steps(accelerator, model, optimizer, range(3))
        accelerator.save_state(folder)
        straight = steps(accelerator, model, optimizer, range(3, 5))
        weights = whole(model)
        state = accelerator.get_state_dict(model)
        if dist.get_rank() == 0:
            for name, weight in weights.items():
                torch.testing.assert_close(state[name], weight, rtol=0, atol=0)
    with accelerate_on_cpus():
        accelerator, model, optimizer = prepared(7, state_dict_type, tied, **options)
        accelerator.load_state(folder)
        again = steps(accelerator, model, optimizer, range(3, 5))
    assert again == straight, "the resumed run goes on as the first one did"
    return Result(losses + straight[0], norms + straight[1], weights)


def job(folder: str, state_dict_type: str, tied: bool, options: dict[str, Any]) -> list[Any]:
    def program(folder: str) -> Result:
        return trained_and_resumed(folder, state_dict_type, tied, options)

    return both(program, folder)


@pytest.mark.parametrize(
    ("state_dict_type", "tied", "options"),
    [
        pytest.param("SHARDED_STATE_DICT", False, {}, id="sharded"),
        pytest.param("FULL_STATE_DICT", False, {}, id="full"),
        pytest.param("SHARDED_STATE_DICT", True, {"activation_checkpointing": True}, id="tied-checkpointing"),
        pytest.param(
            "SHARDED_STATE_DICT", False, {"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, id="offloaded"
        ),
    ],
)
def test_accelerate_prepares_trains_saves_and_loads(
    ranks: RankGroup, tmp_path: Path, state_dict_type: str, tied: bool, options: dict[str, Any]
) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path), state_dict_type, tied, options), learned=0.3)
