"""Arguments of another type: one error that names the argument, what was expected and what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_impl import MainWeightAdamW, MainWeightMuon, MainWeightSGD

EVERY = (MainWeightAdamW, MainWeightSGD, MainWeightMuon)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3))]


CASES = [
    *(
        (made, options, text)
        for made in EVERY
        for options, text in (
            ({"lr": "0.1"}, "lr: expected a number, got '0.1'"),
            ({"weight_decay": None}, "weight_decay: expected a number, got None"),
            ({"offload_fraction": "half"}, "offload_fraction: expected a number from 0 to 1, got 'half'"),
        )
    ),
    *(
        (made, options, text)
        for made in (MainWeightSGD, MainWeightMuon)
        for options, text in (
            ({"momentum": None}, "momentum: expected a number, got None"),
            ({"momentum": True}, "momentum: expected a number, got True"),
            ({"nesterov": "yes"}, "nesterov: expected True or False, got 'yes'"),
        )
    ),
    (MainWeightSGD, {"dampening": "x"}, "dampening: expected a number, got 'x'"),
    (MainWeightSGD, {"maximize": 1}, "maximize: expected True or False, got 1"),
    (MainWeightMuon, {"eps": None}, "eps: expected a number, got None"),
    (MainWeightMuon, {"ns_steps": 5.5}, "ns_steps: expected an integer, got 5.5"),
    (MainWeightMuon, {"ns_coefficients": 3}, "ns_coefficients: expected 3 numbers, got 3"),
    (MainWeightMuon, {"ns_coefficients": ("a", 1, 2)}, "ns_coefficients: expected a number, got 'a'"),
    (MainWeightMuon, {"use_muon": True}, "use_muon: expected a function of a parameter's name"),
    (MainWeightMuon, {"adamw_lr": "x"}, "adamw_lr: expected a number, got 'x'"),
    (MainWeightMuon, {"adamw_betas": 0.9}, "adamw_betas: expected 2 numbers, got 0.9"),
    (MainWeightMuon, {"adamw_weight_decay": "x"}, "adamw_weight_decay: expected a number, got 'x'"),
    (MainWeightAdamW, {"betas": None}, "betas: expected 2 numbers, got None"),
    (MainWeightAdamW, {"eps": "x"}, "eps: expected a number, got 'x'"),
    (MainWeightAdamW, {"capturable": "yes"}, "capturable: expected True or False, got 'yes'"),
]


@pytest.mark.parametrize(("made", "options", "text"), CASES)
def test_an_argument_of_another_type_is_named(
    made: Callable[..., Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        made(weights(), **options)


@pytest.mark.parametrize("made", EVERY)
@pytest.mark.parametrize(
    ("params", "text"),
    [
        (5, "params: expected an iterable of parameters, (name, parameter) pairs or groups, got 5"),
        (None, "got None"),
        (nn.Linear(2, 2), "got the module itself; pass its parameters()"),
        ([1, 2], "params: expected parameters, got 1"),
        (["name"], "params: expected parameters, got 'name'"),
        ([{"lr": 0.1}], 'expected a group with its parameters under "params", got keys lr'),
    ],
)
def test_what_has_no_parameters_is_named(made: Callable[..., Any], params: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        made(params)


@pytest.mark.parametrize("made", EVERY)
def test_all_that_torch_takes_for_parameters_is_taken(made: Callable[..., Any]) -> None:
    model = nn.Linear(2, 3)
    for params in (
        model.parameters(),
        list(model.parameters()),
        model.named_parameters(),
        [{"params": model.parameters(), "lr": 0.5}],
        [{"params": model.weight}, {"params": [model.bias]}],
    ):
        optimizer = made(params, lr=torch.tensor(0.1))
        assert {id(param) for group in optimizer.param_groups for param in group["params"]} == {
            id(param) for param in model.parameters()
        }
