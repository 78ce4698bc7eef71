"""One JAX leg of a relay: load, shard, train, save. One process.

Its devices are simulated where ``JAX_PLATFORMS`` is unset or ``cpu``; set it to run on an accelerator's.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bridge.parity.corpus import Corpus
from bridge.parity.job import Job, Metrics, main, resume_position, train_state, write_memory
from jax_impl import (
    data_parallel_mesh,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    memory_report,
    plan_sharding,
    save_checkpoint,
    simulate_devices,
)
from jax_impl.models.decoder import Decoder, DecoderConfig, next_token_loss


def run(job: Job) -> None:
    leg = job.leg
    if (os.environ.get("JAX_PLATFORMS") or "cpu") == "cpu":
        simulate_devices(leg.ranks)
    corpus = Corpus.of_standard_library()
    config = DecoderConfig(**vars(job.model))
    low = leg.precision == "bfloat16"
    plan = plan_sharding(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))),
        data_parallel_mesh(leg.ranks),
        strategy=leg.strategy,
        granularity=leg.granularity,
        param_dtype="bfloat16" if low else None,
        reduce_dtype="float32" if low else None,
    )
    options = job.optimizer
    optimizer = main_weight_adamw(
        options.lr, *options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    assert job.source is not None
    loaded = load_checkpoint(job.source, plan, optimizer)
    start = resume_position(job, corpus, loaded.train)
    state = loaded.state

    def loss_fn(model: Any, tokens: jax.Array) -> jax.Array:
        return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    step_fn = make_train_step(plan, loss_fn, optimizer, microbatches=leg.microbatches)
    metrics = Metrics(job)
    for step in range(start, start + leg.steps):
        batch = corpus.global_batch(
            seed=job.data.seed, step=step, batch=job.data.batch, length=job.data.length
        )
        state, measured = step_fn(state, jnp.asarray(batch))
        metrics.add(step, float(measured["loss"]))
    write_memory(job, memory_report(plan, state))
    if job.destination is not None:
        save_checkpoint(
            job.destination, plan, state, train_state(job, corpus, start + leg.steps), objects=loaded.objects
        )


if __name__ == "__main__":
    main(run)
