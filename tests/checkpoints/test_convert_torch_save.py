"""A training that torch.save kept goes on in JAX and, by way of JAX's checkpoint, in torch again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.mapping import parse_mapping

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)
RULES = """
[convention.torch]
[convention.flax]
[[rule]]
torch = "{i}.weight : o i"
flax = "layers_{i}/kernel : i o"
[[rule]]
torch = "{i}.bias : o"
flax = "layers_{i}/bias : o"
"""
RATE, DECAY = 0.1, 0.01


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = (net(torch.linspace(-1, 1, 12).reshape(3, 4)) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained(named: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = model()
    weights = net.named_parameters() if named else net.parameters()
    optimizer = torch.optim.AdamW(weights, RATE, weight_decay=DECAY)
    step(net, optimizer)
    step(net, optimizer)
    return net, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("model", "optimizer"), False),
        pytest.param(("model_state_dict", "optimizer_state_dict"), True, marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_in_jax_and_in_torch_again(
    tmp_path: Path, keys: tuple[str, str], named: bool
) -> None:
    net, optimizer = trained(named)
    saved = {keys[0]: net.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "a.pt")
    losses = [step(net, optimizer), step(net, optimizer)]
    rules = parse_mapping(RULES, "test")
    # Two layers have one shape, so that nothing in the file tells their moments apart.
    order = None if named else "model"
    convert(tmp_path / "a.pt", tmp_path / "jax", mapping=rules, into="flax", optimizer_order=order)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "jax")
    params = jax.tree.map(jnp.asarray, tree["params"])

    def loss(params: Any) -> jax.Array:
        x = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 4)
        for k in (0, 2, 4):
            x = x @ params[f"layers_{k}"]["kernel"] + params[f"layers_{k}"]["bias"]
            x = jnp.tanh(x) if k < 4 else x
        return jnp.sum(x**2)

    optax_step = optax.adamw(RATE, weight_decay=DECAY)
    kept = tree["opt_state"]
    adam = optax.ScaleByAdamState(
        jnp.asarray(kept["count"]), *(jax.tree.map(jnp.asarray, kept[k]) for k in ("mu", "nu"))
    )
    state = (adam, *optax_step.init(params)[1:])
    jax_losses = []
    for _ in losses:
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optax_step.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        jax_losses.append(float(value))
    assert np.allclose(jax_losses, losses, rtol=1e-5)
    assert (
        diff(tmp_path / "a.pt", tmp_path / "jax", mapping=rules, into="flax", optimizer_order=order).max_ulp
        == 0
    )
    assert (
        diff(tmp_path / "jax", tmp_path / "a.pt", mapping=rules, into="torch", optimizer_order=order).max_ulp
        == 0
    )

    convert(tmp_path / "jax", tmp_path / "dcp", to="dcp", mapping=rules, into="torch")
    again = model()
    fresh = torch.optim.AdamW(again.parameters(), RATE, weight_decay=DECAY)
    step(again, fresh)
    weights, states = get_state_dict(again, fresh)
    content = {keys[0]: weights, keys[1]: {"state": states["state"]}}
    dcp.load(content, checkpoint_id=tmp_path / "dcp")
    set_state_dict(again, fresh, model_state_dict=weights, optim_state_dict=states)
    assert [step(again, fresh), step(again, fresh)] == losses
