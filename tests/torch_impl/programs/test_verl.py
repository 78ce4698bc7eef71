"""A program in verl's shape, which needs no package but transformers, with torch's ``fully_shard`` and with ours.

Rank 0 has the weights of actor and reference, all other ranks are on the meta device. The reference is offloaded. Each
rank saves its part by ``torch.save`` and loads it. Rollouts get whole weights, tensor by tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    assert_equal_runs,
    assert_sharded,
    both,
    llama,
    needs,
    tokens,
    whole,
)

pytestmark = [pytest.mark.slow, needs("transformers")]


def placed(param: nn.Parameter) -> Shard:
    """The first dimension that the ranks divide: torch pads the others."""
    even = (dim for dim, size in enumerate(param.shape) if size % dist.get_world_size() == 0)
    return Shard(next(even, 0))


def built(seed: int, mesh: Any, offload: bool) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if dist.get_rank() == 0:
        model = llama(seed)
    else:
        with torch.device("meta"):
            model = llama(seed)
    state = model.state_dict() if dist.get_rank() == 0 else {}
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else None,
        "reshard_after_forward": True,
        "shard_placement_fn": placed,
    }
    if not offload:
        del options["offload_policy"]
    for layer in [*model.model.layers, model.model.embed_tokens]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert_sharded(model)

    model = model.to("cpu") if dist.get_rank() == 0 else model.to_empty(device="cpu")
    loading = StateDictOptions(full_state_dict=True, cpu_offload=offload, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=loading)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    if offload:
        model.to("cpu", non_blocking=True)
    return model


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def clipped(model: nn.Module, largest: float) -> float:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = nn.utils.get_total_norm(grads, 2.0, False, None)
    total = total.to("cpu", non_blocking=True)
    nn.utils.clip_grads_with_norm_(model.parameters(), largest, total, None)
    return (total.full_tensor() if isinstance(total, DTensor) else total).item()


def steps(
    actor: nn.Module, reference: nn.Module, optimizer: Any, numbers: range
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in numbers:
        ids = tokens(step, rows=4)
        with torch.no_grad():
            expected = log_probabilities(reference, ids)
        advantages = torch.linspace(0.2, 1.0, 4)[:, None]
        for rows in range(0, 4, 2):
            # Reduced in every microbatch, as verl does.
            part = slice(rows, rows + 2)
            log_probs = log_probabilities(actor, ids[part])
            ratio = expected[part] - log_probs
            divergence = (ratio.exp() - ratio - 1).clamp(-10, 10)
            loss = (0.01 * divergence - advantages[part] * log_probs).mean() / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(clipped(actor, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def trained_and_resumed(folder: str) -> Result:
    Path(folder).mkdir(parents=True, exist_ok=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    actor, reference = built(0, mesh, offload=False), built(0, mesh, offload=True)
    assert not any(param.is_meta for param in [*actor.parameters(), *reference.parameters()])
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = steps(actor, reference, optimizer, range(3))
    file = Path(folder) / f"rank_{dist.get_rank()}.pt"
    torch.save({"model": actor.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = steps(actor, reference, optimizer, range(3, 5))
    weights = whole(actor)
    # Of the rollout, which takes whole tensors by name.
    for name, value in actor.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), weights[name], rtol=0, atol=0)

    again = built(7, mesh, offload=False)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2, weight_decay=0.1)
    saved = torch.load(file, weights_only=False)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert steps(again, reference, optimizer, range(3, 5)) == straight, "goes on as the first one did"
    return Result(losses + straight[0], norms + straight[1], weights)


def job(folder: str) -> list[Any]:
    return both(trained_and_resumed, folder)


def test_actor_and_offloaded_reference_train_save_and_load(ranks: RankGroup, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path)), learned=0.1)
