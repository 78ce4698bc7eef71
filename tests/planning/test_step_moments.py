"""Every moment of a step, term by term, what an update stages, and each collective: a maximum or sum would hide some.

If a change of a number is right, write the file again: ``python -m tests.planning.test_step_moments``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.planning import CostPlan, Workload, make_plan, parse_policy
from bridge.planning.cost import peak_jax, peak_torch
from bridge.planning.cost.adapt import with_frozen
from bridge.planning.cost.moments import brought_together, staged
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.cost.peak import TERMS
from bridge.planning.models.formulas import Attention
from bridge.planning.models.shipped_models import DecoderShape, DenseMlp, Experts, GroupedQueries, shape_model
from tests.support import golden

FILE = Path(__file__).with_name("golden") / "step_moments.json"
MODULES: dict[str, Any] = {"torch": peak_torch, "jax": peak_jax}
# No two widths are equal, so that few sums are.
DENSE = DecoderShape(50, 12, 3, GroupedQueries(6, 2, 4), DenseMlp(20), tied=True)
MIXTURE = replace(DENSE, mlp=Experts(5, 2, 20), dense_layers=1, dense=DenseMlp(28), tied=False)
# The largest matrix is larger than a round of Muon, and than a batch of other optimizers.
LARGE = DecoderShape(500, 1024, 3, GroupedQueries(6, 2, 64), DenseMlp(3000))
BFLOAT16 = '[precision]\ncompute = "bfloat16"\nreduce = "float32"\n'
LAYERS, ROOT = '[[unit]]\nmatch = "layers.*"\n', '[[unit]]\nmatch = ""\n'
STYLE = '[[parallel]]\nmatch = ["layers.*.{}", "layers.*.{}", "{}"]\naxis = "tp"\nstyle = "{}"\n'
POLICIES = {
    "fsdp": LAYERS + ROOT,
    "serial": f"[mesh]\nprefetch = 0\ndp = 4\n{BFLOAT16}{LAYERS}recompute = true\n{ROOT}",
    "scanned": f'{BFLOAT16}{LAYERS}strategy = "optim"\n{ROOT}strategy = "optim_grads"\n',
    "scanned whole": f'{LAYERS}strategy = "no_shard"\n{ROOT}strategy = "no_shard"\n',
    "mixture": f'[mesh]\nouter = 2\ndp = 2\n{LAYERS}strategy = "hfsdp"\n{ROOT}strategy = "hsdp"\n',
    "float8": f'[precision]\ngather = "mxfp8"\n{LAYERS}{ROOT}strategy = "optim_grads"\n',
    "parts": f'[[unit]]\nmatch = "layers.*.mlp"\n{LAYERS}{ROOT}strategy = "optim_grads"\n',
    "remainders": f"{BFLOAT16}store_param_remainders = true\n{LAYERS}{ROOT}".replace(
        '*"\n', '*"\nstrategy = "optim_grads"\n'
    )
    + 'strategy = "optim"\n',
    "narrow": f'[precision]\nmain = "bfloat16"\ngrad = "bfloat16"\n{LAYERS}{ROOT}',
    "scanned magnitudes": f'[precision]\ngather = "float8_e4m3fn"\n{LAYERS}{ROOT}',
    "styles": f"[mesh]\ndp = 2\ntp = 2\n{LAYERS}recompute = true\n{ROOT}"
    + STYLE.format("attention.wq", "attention.wv", "lm_head", "colwise")
    + STYLE.format("attention.wo", "mlp.w2", "embed", "rowwise")
    + '[[parallel]]\nmatch = ["norm.weight", "norm.scale"]\naxis = "tp"\ndimension = 0\n',
}
HALF = Fraction(1, 2)
OPTIMIZERS = (
    Optimizer(moments=("bfloat16", "bfloat16"), offload=HALF),
    Optimizer(moments=("float8_e4m3fn", "float16"), offload=Fraction(1)),
    *(Optimizer(name, ("bfloat16", None), HALF) for name in ("sgd-momentum", "muon")),
    *(Optimizer(name) for name in ("muon", "adafactor", "lion")),
)


def planned(
    runtime: str, policy: str, shape: DecoderShape, microbatches: int, optimizer: Optimizer = ADAMW
) -> CostPlan:
    attention = Attention.fused if policy == "mixture" else Attention.plain
    model = with_frozen(shape_model(policy, shape, runtime, attention), ["*attention_norm*"])
    stacks = ("layers",) if runtime == "jax" and policy.startswith("scanned") else ()
    model, chosen = replace(model, stacks=stacks), parse_policy(POLICIES[policy], policy)
    return make_plan(model, chosen, 4, runtime, Workload(2, 8, microbatches), optimizer=optimizer)


def moments(runtime: str, policy: str) -> Iterator[str]:
    """A line for each moment, and for the peak, with the terms in the order of ``TERMS``."""
    module, listed = MODULES[runtime], list[tuple[str, Any]]()

    def noted(*arguments: Any, stock: Any = module.moments) -> Any:
        listed.extend(seen := list(stock(*arguments)))
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moments", noted)
        for microbatches in (1, 2):
            plan = planned(runtime, policy, MIXTURE if policy == "mixture" else DENSE, microbatches)
            listed.append((f"peak in {plan.peak.moment}", plan.peak.terms))
    yield from (
        f"{moment}: {' '.join(str(terms.get(name, '-')) for name in TERMS)}" for moment, terms in listed
    )


def updates(runtime: str, policy: str) -> Iterator[str]:
    """A line for each optimizer: bytes staged and brought together, and of moments on the device and the host."""
    for optimizer in OPTIMIZERS:
        if optimizer.why_not(runtime, ["layers"] if policy.startswith("scanned") else ()) is None:
            plan = planned(runtime, policy, LARGE, 1, optimizer)
            moved = staged(optimizer, plan.placed(), runtime, 0), brought_together(optimizer, plan.placed())
            yield f"{optimizer}: {moved} {plan.at_rest.moments} {plan.at_rest.host}"


def calls(runtime: str, policy: str) -> Iterator[str]:
    shape = replace(DENSE, tied=policy != "styles")
    for call, times in planned(runtime, policy, shape, 2).traffic.calls.items():
        yield f"{times} {call.kind} {call.axis} {call.size} {call.dtype} {call.nbytes}"


CASES = {
    f"{lines.__name__} {runtime} {policy}": partial(lines, runtime, policy)
    for lines, policies in (
        (moments, [*POLICIES][:-2]),
        (updates, ["fsdp", "scanned", "scanned whole", "mixture", "narrow"]),
        (calls, POLICIES),
    )
    for runtime in MODULES
    for policy in policies
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_as_they_were(case: str) -> None:
    assert [*CASES[case]()] == golden.kept(FILE, case)


if __name__ == "__main__":
    golden.write(FILE, CASES)
