import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.core.text import human_bytes
from jax_impl import (
    call_unit,
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    memory_report,
    shard_batch,
)
from jax_impl.models import Decoder, DecoderConfig
from tests.support.jax_impl.tiny import decoder, loss, tokens

LAYERED = DecoderConfig(
    vocab_size=64, d_model=64, n_layers=6, n_heads=2, n_kv_heads=2, head_dim=32, d_ff=256, rope_theta=100
)


@pytest.mark.fast_cases("optim_grads_params-4", "no_shard-1")
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_bytes_at_rest_equal_the_formula_on_every_device(strategy, devices):
    optimizer = main_weight_adamw(1e-2)
    plan, weights = fully_shard(decoder(), data_parallel_mesh(devices), strategy=strategy)
    state = init_state(plan, weights, optimizer)
    state, _ = make_train_step(plan, loss, optimizer)(state, tokens(devices))
    report = memory_report(plan, state)

    parameters = sum(int(np.prod(info.shape)) for info in plan.parameters.values())
    copies = devices if strategy == "no_shard" else 1
    shards = 1 if strategy == "no_shard" else devices
    padding = sum(unit.layout.padded_size - unit.layout.numel for unit in plan.units.values())
    for device in report.devices:
        assert device.main_weights + device.moments + device.padding == 12 * (parameters + padding) // shards
        assert device.moments == 2 * device.main_weights
        assert device.other == 4
    assert sum(d.main_weights for d in report.devices) == 4 * parameters * copies
    assert sum(d.padding for d in report.devices) == 12 * padding * copies
    stored = dict.fromkeys(map(str, plan.mesh.devices.flat), 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            stored[str(shard.device)] += shard.data.nbytes
    assert {d.device: d.total for d in report.devices} == stored
    assert f"{report.devices[-1].total:,}" in str(report)
    most = human_bytes(max(device.total for device in report.devices))
    assert repr(report) == f"<MemoryReport: {devices} devices: at most {most} at rest on one>"
    assert str(report) in report._repr_html_()


def test_float64_main_weights_count_eight_bytes():
    with jax.enable_x64(True):
        plan, weights = fully_shard(decoder(dtype=np.float64), data_parallel_mesh(2))
        report = memory_report(plan, init_state(plan, weights, main_weight_adamw(1e-2)))
        parameters = sum(int(np.prod(info.shape)) for info in plan.parameters.values())
        assert sum(d.main_weights for d in report.devices) == 8 * parameters


def test_a_step_takes_the_state_of_the_report_as_arguments():
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    batch = shard_batch(plan, tokens(4))
    compiled = jax.jit(make_gradients(plan, loss)).lower(weights, batch).compile()
    stored = sum(4 * unit.layout.shard_size for unit in plan.units.values())
    assert compiled.memory_analysis().argument_size_in_bytes == stored + batch.nbytes // 4


def temporary_bytes(strategy, microbatches):
    model = Decoder(LAYERED, rngs=nnx.Rngs(0))
    plan, weights = fully_shard(model, data_parallel_mesh(4), strategy=strategy)
    batch = shard_batch(plan, tokens(4 * microbatches, length=3), microbatches)
    compiled = jax.jit(make_gradients(plan, loss, microbatches)).lower(weights, batch).compile()
    gathered = sum(4 * unit.layout.padded_size for unit in plan.units.values())
    return compiled.memory_analysis().temp_size_in_bytes, gathered


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.optimized
def test_a_step_of_optim_grads_params_never_holds_all_gathered_weights(microbatches):
    # A step holds a unit's weights and gradients at a time, besides sharded gradients and few activations; each of
    # the three fences of the unit, if missing, lets XLA keep all weights in one of the two cases.
    temporary, gathered = temporary_bytes("optim_grads_params", microbatches)
    assert temporary < 0.75 * gathered


@pytest.mark.optimized
def test_a_step_of_optim_grads_does_hold_all_gathered_weights():
    temporary, gathered = temporary_bytes("optim_grads", 1)
    assert temporary > gathered


@pytest.mark.fast_cases("no_shard")
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_recomputed_unit_without_parameters_of_its_own_keeps_its_inputs_alone(strategy):
    def values(*shape):
        return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)

    def half(unit, x):
        return jnp.tanh(x @ unit["w"])

    def layer(unit, x):
        return call_unit(half, unit["b"], jnp.sin(call_unit(half, unit["a"], x)))

    def squares(tree, x):
        for unit in tree["layers"]:
            x = call_unit(layer, unit, x)
        return jnp.mean(x**2)

    # The root has no weights either: no gather is left whose barriers would keep the second forward from the first.
    model = {"layers": [{"a": {"w": values(64, 64)}, "b": {"w": values(64, 64)}} for _ in range(2)]}
    plan, weights = fully_shard(
        model, data_parallel_mesh(4), units=["layers/*", "layers/*/*"], strategy=strategy, recompute=True
    )
    batch = shard_batch(plan, np.ones((4096, 64), np.float32))
    compiled = jax.jit(make_gradients(plan, squares)).lower(weights, batch).compile()
    # Six activations; merged forwards keep one more of each layer.
    assert compiled.memory_analysis().temp_size_in_bytes < 7 * batch.nbytes // 4
