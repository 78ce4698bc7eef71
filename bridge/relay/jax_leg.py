"""One JAX leg of a relay: load, shard, train, save. One process.

Its devices are simulated if ``JAX_PLATFORMS`` is unset or ``cpu``; set it to run on the devices of an accelerator.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bridge.core.mapping import MappingTable, load_mapping
from bridge.relay.corpus import Corpus
from bridge.relay.job import Job, Metrics, main, resume_position, train_state, write_memory
from bridge.relay.norms import KINDS, Norms, in_torch_names
from jax_impl import (
    Offload,
    ShardingPlan,
    ShardingPolicy,
    TrainState,
    abstract_state,
    data_parallel_mesh,
    load_checkpoint,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    memory_report,
    parameter_norms,
    plan_sharding,
    save_checkpoint,
    simulate_devices,
)
from jax_impl.models.decoder import Decoder, DecoderConfig, next_token_loss


def run(job: Job) -> None:
    plan, leg, data = _plan(job), job.leg, job.data
    corpus = Corpus.of_standard_library()
    options = job.optimizer
    optimizer = main_weight_adamw(
        options.lr,
        *options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mu_dtype=leg.moments,
        nu_dtype=leg.moments,
    )
    assert job.source is not None
    placed = abstract_state(plan, optimizer, offload=Offload(moments=leg.offload))
    loaded = load_checkpoint(job.source, plan, optimizer, like=placed, moments="convert")
    start = resume_position(job, corpus, loaded.train)
    state = loaded.state
    step_fn = make_train_step(plan, _loss, optimizer, microbatches=leg.microbatches)
    metrics, mapping = Metrics(job), load_mapping("decoder")
    for step in range(start, start + leg.steps):
        batch = corpus.global_batch(seed=data.seed, step=step, batch=data.batch, length=data.length)
        state, measured = step_fn(state, jnp.asarray(batch))
        norms = _norms(plan, state, mapping, with_moments=leg.moments == "float32")
        metrics.add(step, float(measured["loss"]), norms)
    write_memory(job, memory_report(plan, state))
    if job.destination is not None:
        save_checkpoint(
            job.destination, plan, state, train_state(job, corpus, start + leg.steps), objects=loaded.objects
        )


def rehearse(job: Job) -> None:
    """Plan the leg and trace its gradients; this allocates and compiles nothing."""
    plan = _plan(job)
    weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
    rows = jax.ShapeDtypeStruct((job.data.batch, job.data.length + 1), "int32")
    jax.eval_shape(make_gradients(plan, _loss, job.leg.microbatches), weights, rows)


def _plan(job: Job) -> ShardingPlan:
    ranks, sharding = job.leg.ranks, job.leg.sharding
    if (os.environ.get("JAX_PLATFORMS") or "cpu") == "cpu":
        simulate_devices(ranks)
    policy = ShardingPolicy.parse(sharding.text, sharding.source)
    mesh = data_parallel_mesh(policy.mesh_sizes(ranks))
    config = DecoderConfig(**vars(job.model))
    return plan_sharding(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), mesh, policy)


def _norms(plan: ShardingPlan, state: TrainState, mapping: MappingTable, *, with_moments: bool) -> Norms:
    kinds = [state.weights]
    # Low-precision moments are too coarse to compare.
    if with_moments:
        kinds += [state.opt_state.mu, state.opt_state.nu]
    named = zip(KINDS, kinds, strict=False)
    return {
        norm_kind: in_torch_names(parameter_norms(plan, buffers), mapping) for norm_kind, buffers in named
    }


def _loss(model: Any, tokens: jax.Array) -> jax.Array:
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


if __name__ == "__main__":
    main(run, rehearse)
