"""The uninterrupted reference: one process, plain torch, no sharding and no hops, in fp32 or float64.

A repeat processes the rows of each global batch in another order. Losses and gradients are means over the rows, so only
rounding differs.

Without a source, the file writes the initial checkpoint of the relay instead: fresh weights, zero moments, step 0.
"""

from __future__ import annotations

import signal
import sys

import numpy as np
import torch

from bridge.relay.corpus import Corpus
from bridge.relay.job import Job, Metrics, report_errors, resume_position, train_state
from bridge.relay.lifetime import end_with_parent
from bridge.relay.torch_leg import state_norms
from torch_impl import load_checkpoint, save_checkpoint
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build(job: Job) -> tuple[Decoder, torch.optim.AdamW]:
    """The decoder with its initial weights in fp32, and torch's own fused AdamW."""
    model = Decoder(DecoderConfig(**vars(job.model)))
    model.init_weights(job.data.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(job.data.init_scale)
    return model, adamw(model, job)


def adamw(model: Decoder, job: Job) -> torch.optim.AdamW:
    options = vars(job.optimizer)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def run(job: Job, dtype: torch.dtype, repeat: int = 0) -> None:
    """Run the reference, or the repeat with this number."""
    corpus = Corpus.of_standard_library()
    model, optimizer = build(job)
    if job.source is None:
        assert job.destination is not None
        save_checkpoint(job.destination, model, optimizer, train_state(job, corpus, 0))
        return
    start = resume_position(job, corpus, load_checkpoint(job.source, model, optimizer))
    if start:
        raise ValueError(f"checkpoint {job.source}: a reference starts at step 0, got step {start}")
    model = model.to(dtype)
    optimizer = adamw(model, job)
    metrics = Metrics(job)
    for step in range(job.leg.steps):
        rows = corpus.global_batch(
            seed=job.data.seed, step=step, batch=job.data.batch, length=job.data.length
        )
        if repeat:
            # Keyed by both, so that each repeat has another order in each step, and a second relay the same orders.
            rows = np.random.default_rng([repeat, step]).permutation(rows)
        batch = torch.from_numpy(rows).long()
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.add(step, loss.item(), state_norms(model, optimizer))


if __name__ == "__main__":
    # One process runs them all, because importing torch takes longer than a short reference.
    for file, dtype, number in zip(*(iter(sys.argv[1:]),) * 3, strict=True):
        mine = Job.read(file)
        with report_errors(mine.folder, rank=0):
            end_with_parent(signal.SIGKILL)
            run(mine, DTYPES[dtype], int(number))
        mine.done.touch()
