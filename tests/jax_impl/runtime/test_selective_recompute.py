"""``recompute`` by a name of ``jax.checkpoint_policies``: products are kept, the rest is computed again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from bridge.core.sharding.policy.recompute import SELECTIVE
from jax_impl import count_compiled_collectives, data_parallel_mesh, fully_shard, make_gradients
from jax_impl.models import Decoder, DecoderConfig, next_token_loss

DEVICES = 4
CONFIG = DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, d_ff=48)


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


class Run:
    """Gradients of the decoder with one kind of recomputation, and what is in their program."""

    def __init__(self, recompute: bool | str, *, stacked: bool, engine: str, strategy: str) -> None:
        options: dict[str, Any] = {"stacked": ["layers"]} if stacked else {}
        plan, weights = fully_shard(
            Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=stacked),
            data_parallel_mesh(DEVICES),
            units=["layers/*"],
            recompute=recompute,
            engine=engine,
            strategy=strategy,
            **options,
        )
        tokens = np.random.default_rng(0).integers(0, 64, (DEVICES, 257)).astype(np.int32)
        rows = jax.device_put(tokens, jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec))
        gradients = make_gradients(plan, loss, 1)
        self.products = str(jax.make_jaxpr(gradients)(weights, rows)).count("dot_general[")
        program = jax.jit(gradients).lower(weights, rows).compile()
        self.temporary = program.memory_analysis().temp_size_in_bytes
        self.gathers = sum(
            times
            for collective, times in count_compiled_collectives(program).items()
            if collective.kind == "all_gather"
        )
        self.value, reduced, *_ = program(weights, rows)
        self.gradients = {key: np.asarray(value) for key, value in reduced.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stacked", "engine", "strategy"),
    [
        (False, "shard_map", "optim_grads_params"),
        pytest.param(True, "shard_map", "optim_grads_params", marks=pytest.mark.slow),
        pytest.param(False, "shard_map", "optim", marks=pytest.mark.slow),
        pytest.param(False, "pjit", "optim_grads_params", marks=pytest.mark.slow),
    ],
)
def test_products_are_kept_and_the_rest_is_computed_again(stacked: bool, engine: str, strategy: str) -> None:
    plain, again, dots, weighted = (
        Run(recompute, stacked=stacked, engine=engine, strategy=strategy)
        for recompute in (False, True, *SELECTIVE)
    )
    for other in (again, dots, weighted):
        np.testing.assert_allclose(other.value, plain.value, rtol=1e-6)
        for key, value in plain.gradients.items():
            np.testing.assert_allclose(other.gradients[key], value, rtol=1e-4, atol=1e-6)
    assert plain.products == dots.products < weighted.products < again.products
    assert again.temporary < weighted.temporary < dots.temporary < plain.temporary
    if engine == "shard_map":
        assert plain.gathers == again.gathers == dots.gathers == weighted.gathers
