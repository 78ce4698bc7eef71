"""One torch leg of a relay, started by torchrun: load, shard, train, save. Every rank runs this file."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from bridge.relay.corpus import Corpus, rank_slice
from bridge.relay.job import Job, Metrics, main, resume_position, train_state, write_memory
from bridge.relay.norms import KINDS
from torch_impl import FSDPModule, MainWeightAdamW, ShardingPolicy, load_checkpoint, save_checkpoint
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss
from torch_impl.parallel.cuts import plan_cuts

STATE = dict(zip(KINDS[1:], ("exp_avg", "exp_avg_sq"), strict=True))


def state_norms(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, with_moments: bool = True
) -> dict[str, dict[str, float]]:
    """The norms of whole parameters and of their moments after a step, in float64. Collective.

    ``with_moments``: False leaves out moments that are stored in low precision, which are too coarse to compare.
    """
    named = dict(model.named_parameters())
    kinds: dict[str, dict[str, torch.Tensor]] = {KINDS[0]: dict(named)}
    if with_moments:
        kinds |= {
            norm_kind: {name: optimizer.state[parameter][key] for name, parameter in named.items()}
            for norm_kind, key in STATE.items()
        }
    return {
        norm_kind: {
            name: float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
            for name, tensor in tensors.items()
        }
        for norm_kind, tensors in kinds.items()
    }


def run(job: Job) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != job.leg.ranks:
        # Before they form a group: a rank that raises earlier than another rank breaks the other's connections.
        raise ValueError(
            f"expected {job.leg.ranks} ranks as the relay file says, got {world} from the launcher"
        )
    # NCCL refuses two ranks on one GPU, so a leg with more ranks than GPUs runs on the CPU.
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        _train(job, torch.device(device))
    finally:
        dist.destroy_process_group()


def _train(job: Job, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    leg, data = job.leg, job.data
    corpus = Corpus.of_standard_library()
    model = Decoder(DecoderConfig(**vars(job.model))).to(device)
    model.init_weights(data.seed)
    sharding = leg.sharding
    # Ranks along model axes, which are innermost, get the same rows.
    alike = world // sharding.data_ranks(world)
    sharded = cast(FSDPModule, ShardingPolicy.parse(sharding.text, sharding.source).apply(model))
    moments = getattr(torch, leg.moments)
    optimizer = MainWeightAdamW(
        model.parameters(),
        **vars(job.optimizer),
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        offload_fraction=leg.offload,
    )

    assert job.source is not None
    start = resume_position(job, corpus, load_checkpoint(job.source, model, optimizer, moments="convert"))
    metrics = Metrics(job) if rank == 0 else None
    for step in range(start, start + leg.steps):
        batch = corpus.global_batch(seed=data.seed, step=step, batch=data.batch, length=data.length)
        own = torch.from_numpy(rank_slice(batch, rank // alike, world // alike)).long().to(device)
        mean = torch.zeros((), dtype=torch.float64, device=device)
        for number, part in enumerate(own.chunk(leg.microbatches)):
            sharded.set_is_last_backward(number == leg.microbatches - 1)
            loss = next_token_loss(model(part[:, :-1]), part[:, 1:]) / leg.microbatches
            loss.backward()
            mean += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        # In float64, so that the mean of the ranks' losses adds no rounding.
        dist.all_reduce(mean)
        norms = state_norms(model, optimizer, with_moments=leg.moments == "float32")
        if metrics is not None:
            metrics.add(step, mean.item() / world, norms)
    if rank == 0:
        write_memory(job, sharded.memory_report(optimizer))
    if job.destination is not None:
        save_checkpoint(job.destination, model, optimizer, train_state(job, corpus, start + leg.steps))


def rehearse(job: Job) -> None:
    """Shard the leg's model by its policy, on one rank instead of many, and run it forward and back on two tokens."""
    sharding = job.leg.sharding
    policy = ShardingPolicy.parse(sharding.text, sharding.source)
    sizes = policy.mesh_sizes(job.leg.ranks)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Decoder(DecoderConfig(**vars(job.model)))
        # With one rank nothing is cut, so the cuts of the model axes are checked separately.
        plan_cuts(policy, model, sizes)
        replace(policy, mesh=dict.fromkeys(policy.mesh, 1)).apply(model)
        tokens = torch.zeros(1, 3, dtype=torch.long)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(run, rehearse, rank=int(os.environ.get("RANK", "0")))
    # All files are written. Torch can abort during interpreter shutdown: gloo's threads may outlive their group, which
    # DTensor's caches keep alive, and request the interpreter lock too late.
    os._exit(0)
