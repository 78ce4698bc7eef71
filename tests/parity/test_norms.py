"""Norms of states: one set of names for both frameworks, and the first step at which they depart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flax import nnx

from bridge.core.mapping import load_mapping
from bridge.relay.config import Leg, RelayConfig
from bridge.relay.job import Job
from bridge.relay.norms import (
    KINDS,
    LEAST,
    NORM_CLOSENESS,
    Norms,
    distances,
    first_departure,
    in_torch_names,
    tolerances,
)
from bridge.relay.report import RelayReport
from bridge.relay.torch_leg import state_norms
from bridge.relay.torch_reference import build
from jax_impl.models import decoder as jax_decoder
from tests.parity.test_report import report
from torch_impl.models import decoder as torch_decoder

CONFIG = RelayConfig.load("quick")


def norms(**weights: float) -> Norms:
    return {quantity: dict(weights) for quantity in KINDS}


@pytest.mark.parametrize("tied", [False, True])
def test_the_jax_decoder_s_norms_have_the_torch_decoder_s_names(tied: bool) -> None:
    sizes = {**vars(CONFIG.model), "tied": tied}
    model = nnx.eval_shape(lambda: jax_decoder.Decoder(jax_decoder.DecoderConfig(**sizes), rngs=nnx.Rngs(0)))
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    named = torch_decoder.Decoder(torch_decoder.DecoderConfig(**sizes)).named_parameters()
    renamed = in_torch_names(dict.fromkeys(paths, 1.0), load_mapping("decoder"))
    assert renamed.keys() == {name for name, _ in named}
    # The fused projection is made of two parameters.
    assert renamed["layers.1.mlp.w13.weight"] == pytest.approx(math.sqrt(2))
    assert renamed["norm.weight"] == 1.0


def test_a_path_that_the_mapping_does_not_know_is_an_error() -> None:
    with pytest.raises(
        KeyError, match="layers/0/other/kernel: expected a parameter that mapping decoder knows"
    ):
        in_torch_names({"layers/0/other/kernel": 1.0}, load_mapping("decoder"))


def test_the_norms_of_a_state_are_those_of_weights_and_moments() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    measured = state_norms(model, optimizer)
    assert [*measured] == [*KINDS]
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for quantity, tensor in zip(
            KINDS, (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True
        ):
            assert measured[quantity][name] == pytest.approx(float(tensor.double().norm()), rel=1e-12)


def test_initial_matrices_are_scaled_and_nothing_else() -> None:
    def weights(scale: float) -> dict[str, torch.Tensor]:
        data = replace(CONFIG.data, init_scale=scale)
        job = Job(CONFIG.model, data, CONFIG.optimizer, Leg("torch", 1, "optim", steps=1), Path(), None, None)
        return dict(build(job)[0].named_parameters())

    plain, scaled = weights(1.0), weights(8.0)
    for name, weight in plain.items():
        assert torch.equal(scaled[name], weight * (8 if weight.ndim > 1 else 1))


def test_distances_are_relative_and_infinite_where_there_is_no_number() -> None:
    relative = distances(
        norms(near=1.1, zero=0.0, none=1.0, nan=math.nan, less=1.0),
        norms(near=1.0, zero=0.0, none=0.0, nan=1.0, more=1.0),
    )["weights"]
    assert relative["near"] == pytest.approx(0.1)
    assert relative["zero"] == 0.0
    assert {relative[name] for name in ("none", "nan", "less", "more")} == {math.inf}


def test_what_is_allowed_is_a_multiple_of_the_references_distance_and_at_least_of_a_rounding() -> None:
    exact = [norms(a=1.0, b=2.0)] * 2
    assert tolerances(exact, exact) == [dict.fromkeys(KINDS, NORM_CLOSENESS * LEAST)] * 2
    # The references' distance of an early step says what is allowed from there on, and nothing of steps before.
    apart = [exact[0], norms(a=1.0 + 1e-5, b=2.0), exact[0]]
    allowed = [step["weights"] for step in tolerances(apart, [exact[0]] * 3)]
    assert allowed == pytest.approx([NORM_CLOSENESS * LEAST, NORM_CLOSENESS * 1e-5, NORM_CLOSENESS * 1e-5])


def test_the_first_step_that_departs_is_found_with_the_farthest_first() -> None:
    reference = [norms(a=1.0, b=1.0)] * 3
    allowed = [{"weights": 1e-3, "first moments": 1e-2, "second moments": 1e-2}] * 3
    assert first_departure([norms(a=1.0005, b=1.0)] * 3, reference, allowed) is None
    half = [dict.fromkeys(KINDS, 0.5)] * 3
    assert first_departure([norms(a=1.5, b=1.0)] * 3, reference, half) is None
    departure = first_departure(
        [norms(a=1.0, b=1.0), norms(a=1.002, b=1.03), norms(a=9.0, b=9.0)], reference, allowed
    )
    assert departure is not None
    assert departure.step == 1
    assert [(far.kind, far.name) for far in departure.norms] == [
        ("weights", "b"),
        ("first moments", "b"),
        ("second moments", "b"),
        ("weights", "a"),
    ]


def with_norms(bad_step: int | None, *precision: str) -> RelayReport:
    """A right relay whose norms depart from a step on, if any is given; leg 3 and those after it in ``precision``."""
    measured = report()
    right = [norms(**{"layers.0.attention.wk.weight": 1.0, "norm.weight": 1.0})] * CONFIG.steps
    run = [
        norms(**{"layers.0.attention.wk.weight": 1.5, "norm.weight": 1.0})
        if bad_step is not None and step >= bad_step
        else step_norms
        for step, step_norms in enumerate(right)
    ]
    legs = [
        replace(
            leg,
            norms=tuple(run[leg.first_step : leg.first_step + len(leg.losses)]),
            precision=precision if number >= 2 else (),
        )
        for number, leg in enumerate(measured.legs)
    ]
    return replace(measured, legs=tuple(legs), norms_fp32=tuple(right), norms_fp64=tuple(right))


@pytest.mark.parametrize(("step", "leg"), [(0, 1), (3, 2), (4, 3), (7, 4)])
def test_a_norm_that_departs_fails_the_relay_by_leg_step_and_parameter(step: int, leg: int) -> None:
    assert with_norms(None).failures() == []
    broken = with_norms(step)
    (failure,) = broken.failures()
    assert failure.startswith(f"leg {leg} ({broken.legs[leg - 1].title}), step {step}: expected the norms")
    assert "weights of layers.0.attention.wk.weight 5.0e-01 (allowed 1.2e-06); first moments of" in failure
    assert "norm.weight" not in failure
    stored = broken.as_dict()
    assert stored["failures"] == [failure]
    assert stored["largest_norm_differences"][leg - 1]["weights"] == 0.5
    assert stored["norm_tolerances"][step]["weights"] == pytest.approx(1.2e-6, rel=0.01)
    assert not {"norms", "norms_fp32", "norms_fp64"} & {*stored, *stored["legs"][0]}


def test_from_the_first_bfloat16_leg_on_norms_are_not_judged() -> None:
    assert with_norms(4, "bfloat16").departure is None
    assert with_norms(3, "bfloat16").departure is not None
