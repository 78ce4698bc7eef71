"""States of torch in trees that stock Orbax restores for the chain that the result names."""

from __future__ import annotations

import re
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

from bridge.checkpoints.convert.conversion import convert
from bridge.core.mapping import make_plan, parse_mapping
from bridge.core.mapping.states.chains import completed
from tests.support.bridge.memory_reader import MemoryReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = (3, 4)


def table(node: str) -> Any:
    return parse_mapping(
        f'[convention.torch]\n[convention.jax]\nexp_avg = "{node}mu/{{w}}"\nexp_avg_sq = "{node}nu/{{w}}"\n'
        f'momentum_buffer = "{node}trace/{{w}}"\nstep = "{node}count"\n'
        '[[rule]]\ntorch = "a.weight : o m"\njax = "a/kernel : m o"\n',
        "chain.toml",
    )


def torch_state(*words: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {"model.a.weight": rng.normal(size=SHAPE).astype(np.float32)}
    arrays |= {f"optimizer.state.a.weight.{w}": rng.uniform(size=SHAPE).astype(np.float32) for w in words}
    if "exp_avg" in words:
        arrays["optimizer.state.a.weight.step"] = np.asarray(4, np.float32)
    return arrays


ADAM, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
CHAINS: dict[str, tuple[tuple[str, ...], str, optax.GradientTransformation]] = {
    "adamw": (ADAM, "opt_state/0/", optax.adamw(0.1)),
    "sgd": (MOMENTUM, "opt_state/0/", optax.sgd(0.1, momentum=0.9)),
    "clip, adamw": (ADAM, "opt_state/1/0/", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
    "two clips, sgd": (
        MOMENTUM,
        "opt_state/2/0/",
        optax.chain(optax.clip(1.0), optax.clip(2.0), optax.sgd(0.1, momentum=0.9)),
    ),
    "scale_by_adam": (ADAM, "opt_state/", optax.scale_by_adam()),
}


def written(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.fast_cases("sgd", "clip, adamw")
@pytest.mark.parametrize("chain", CHAINS)
def test_stock_orbax_restores_the_chain_that_is_named(tmp_path: Path, chain: str) -> None:
    words, node, optimizer = CHAINS[chain]
    arrays = torch_state(*words)
    source = written(tmp_path / "a", arrays)
    (remark,) = convert(source, tmp_path / "b", mapping=table(node), to="orbax").remarks
    assert ("optax.sgd" if words == MOMENTUM else "optax.adamw") in remark
    params = {"a": {"kernel": jnp.zeros(SHAPE[::-1])}}
    target = {"params": params, "opt_state": optimizer.init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "b", target)
    assert np.array_equal(restored["params"]["a"]["kernel"].T, arrays["model.a.weight"])


OTHERS: dict[str, tuple[str, optax.GradientTransformation]] = {
    "schedule": ("opt_state/0/", optax.adamw(lambda _: 0.1)),
    "MultiSteps": ("opt_state/inner_opt_state/0/", optax.MultiSteps(optax.adamw(0.1), 2)),
    "hyperparameters": ("opt_state/inner_state/0/", optax.inject_hyperparams(optax.adamw)(0.1)),
}


@pytest.mark.fast_cases("MultiSteps")
@pytest.mark.parametrize("chain", OTHERS)
def test_the_note_on_other_chains_says_what_works(tmp_path: Path, chain: str) -> None:
    node, optimizer = OTHERS[chain]
    arrays = torch_state(*ADAM)
    params = {"a": {"kernel": jnp.zeros(SHAPE[::-1])}}
    (remark,) = convert(written(tmp_path / "a", arrays), tmp_path / "b", mapping=table(node)).remarks
    assert "convert with a checkpoint that your program saved as the template (--like)" in remark
    program = {"params": params, "opt_state": optimizer.init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", program)
    convert(tmp_path / "a", tmp_path / "c", mapping=table(node), like=tmp_path / "own")
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "c", program)["opt_state"]

    def is_adam(state: Any) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    (mu,) = (s.mu for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s))
    assert np.array_equal(mu["a"]["kernel"].T, arrays["optimizer.state.a.weight.exp_avg"])


@pytest.mark.parametrize(
    ("words", "node", "said"),
    [
        (
            ADAM,
            "opt_state/0/",
            r"only for that chain\. For another chain, .* schedule, which also has opt_state/2/count: convert "
            r"with a checkpoint .* \(--like\)",
        ),
        (
            ADAM,
            "opt_state/inner_opt_state/0/",
            r"optax\.adamw inside inner_opt_state, .* for no optimizer: convert .* \(--like\)",
        ),
        (ADAM, "opt_state/'a'/inner_state/0/", r"inside a, "),
        (
            (*ADAM, *MOMENTUM),
            "opt_state/0/",
            r"the states of optax\.adamw and optax\.sgd .*, which no optax chain .* \(--like\)",
        ),
    ],
)
def test_what_is_no_whole_chain_is_said(words: tuple[str, ...], node: str, said: str) -> None:
    (remark,) = make_plan(MemoryReader("dcp", torch_state(*words)), "orbax", table(node)).remarks
    assert re.search(said, remark), remark


def test_a_count_that_came_along_makes_a_schedules_chain_whole() -> None:
    target = table("opt_state/0/").conventions["jax"]
    empty, remark = completed(target, ["exp_avg"], [("opt_state", 2, "count")])
    assert empty == {("opt_state", 1): None}
    assert remark == ""


def test_weights_alone_have_no_chain() -> None:
    assert make_plan(MemoryReader("dcp", torch_state()), "orbax", table("opt_state/0/")).remarks == ()
