"""Whole reports of small pairs with one fault each: every row's verdict and words, and its numbers within a tolerance.

Slow tests judge the tool by models and faults of others (``test_bugs_named.py``). This test sees within seconds that a
report changed. If the change is right, write the file again: ``python -m tests.parity.pair.test_golden_reports``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.text import plain_json
from bridge.parity import parity
from bridge.parity.report_page.report import ParityReport
from bridge.parity.torch.side import TorchSide
from tests.support.parity.option_models import VOCABULARY, ConvNet, Decoder, Options, Recurrent, filled
from tests.support.parity.torch_twice import RenamedSide, identity

FILE = Path(__file__).with_name("golden_reports.json")
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (4, 8))
IMAGES = RNG.standard_normal((4, 3, 5, 6)).astype(np.float32)
SERIES = RNG.standard_normal((3, 4, 3)).astype(np.float32)

Change = Callable[[dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Case:
    """Two models: of torch's options, and of these with ``changed`` for the side that stands for JAX.

    ``everywhere``: all of a decoder, not only its last block, has the changed options. ``blocks``: of a decoder.
    ``weights``: changes the weights of the second model. ``given``: arguments of ``parity``.
    """

    model: str
    changed: dict[str, Any] = field(default_factory=dict)
    base: Options = field(default_factory=Options)
    everywhere: bool = False
    blocks: int = 1
    weights: Change | None = None
    given: dict[str, Any] = field(default_factory=dict)


def _change(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].copy_(function(weights[name].clone()))

    return change


def _adam(weights: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2, **options)


QUERY = "blocks.0.attention.q.weight"
LOW = {"dtype": "bfloat16"}
ROUNDING = 6
"""The largest factor between the effects of rounding on two machines. Between this machine's instructions and those of
ATEN_CPU_CAPABILITY=default, avx2 and MKL_CBWR=COMPATIBLE the largest factor is 3.9."""
CASES = {
    "right": Case("decoder", blocks=3, given={"steps": 3}),
    "right, fused": Case("decoder", base=Options(fused="heads", norm="layer")),
    "right, convolutions with channels last": Case("convnet", {"last": True}),
    "right, bfloat16": Case("decoder", given=LOW),
    "right, recurrent": Case("recurrent", given={"steps": 2}),
    "self-test": Case("decoder", given={"self_test": True}),
    "epsilon": Case("decoder", {"eps": 1e-3}, blocks=2),
    "epsilon everywhere": Case("decoder", {"eps": 1e-4}, everywhere=True, blocks=2),
    "layer norm for RMS norm": Case("decoder", {"norm": "layer"}),
    "weights plus one": Case("decoder", {"norm": "plus one"}),
    "gelu": Case("decoder", {"activation": "gelu"}),
    "relu": Case("decoder", {"activation": "relu"}),
    "gate and up": Case("decoder", {"swapped": True}),
    "residual": Case("decoder", {"residual": 0.5}),
    "scores": Case("decoder", {"scale": 2.0}),
    "mask": Case("decoder", {"mask": "next"}),
    "no mask": Case("decoder", {"mask": "none"}),
    "window": Case("decoder", {"window": 3}, Options(window=4)),
    "softcap": Case("decoder", {"softcap": 0.0}, Options(softcap=2.0)),
    "heads": Case("decoder", {"heads": "tile"}),
    "rotated backwards": Case("decoder", {"rotate": "backwards"}),
    "rotated pairs": Case("decoder", {"rotate": "pairs"}),
    "not rotated": Case("decoder", {"rotate": ""}),
    "theta": Case("decoder", {"theta": 50.0}, everywhere=True, blocks=2),
    "fused in another order": Case("decoder", {"fused": "blocks"}, Options(fused="heads")),
    "key without gradient": Case("decoder", {"detach": "key"}, blocks=2),
    "up without gradient": Case("decoder", {"detach": "up"}),
    "softmax in float32": Case("decoder", {"coarse": "softmax"}, blocks=3, given=LOW),
    "norm in float32": Case("decoder", {"coarse": "norm"}, blocks=3, given=LOW),
    "rolled heads": Case("decoder", weights=_change(QUERY, lambda x: x.roll(4, 0))),
    "scaled weight": Case("decoder", weights=_change(QUERY, lambda x: x * 2)),
    "stale weight": Case("decoder", weights=_change("norm.weight", lambda x: x + 0.1)),
    "weight decay": Case("decoder", given={"jax_optimizer": partial(_adam, weight_decay=0.1), "steps": 3}),
    "optimizer": Case("recurrent", given={"jax_optimizer": partial(torch.optim.SGD, lr=0.1)}),
    "padding": Case("convnet", {"padding": "circular"}),
    "pooling": Case("convnet", {"pool": "largest", "last": True}),
    "momentum": Case("convnet", {"momentum": 0.9}, given={"steps": 3}),
    "unbiased": Case("convnet", {"norm": "unbiased", "last": True}),
    "statistics": Case("convnet", weights=_change("statistics.mean", lambda x: x + 1)),
    "time": Case("recurrent", {"backwards": True}),
    "hidden bias": Case("recurrent", weights=_change("cell.h.bias", lambda x: x * 0)),
}


def _model(case: Case, options: Options) -> torch.nn.Module:
    if case.model == "decoder":
        return filled(Decoder(options, options if case.everywhere else case.base, case.blocks), 1)
    return filled((ConvNet if case.model == "convnet" else Recurrent)(options), 2)


def report_of(case: Case) -> ParityReport:
    first, second = _model(case, case.base), _model(case, replace(case.base, **case.changed))
    if case.weights is not None:
        with torch.no_grad():
            case.weights({**dict(second.named_parameters()), **dict(second.named_buffers())})
    given = {"steps": 0, "torch_optimizer": _adam, "jax_optimizer": _adam, **case.given}
    loss = "next_token" if case.model == "decoder" else None
    sides = (
        TorchSide(first, loss, optimizer=given.pop("torch_optimizer")),
        RenamedSide(second, loss, optimizer=given.pop("jax_optimizer")),
    )
    batch = {"decoder": TOKENS, "convnet": IMAGES, "recurrent": SERIES}[case.model]
    return parity(*sides, batch, mapping=identity(first), progress=False, **given)


_WORDS = ("stage", "name", "partner", "leaf", "call", "kind", "shape", "verdict", "layout", "cause", "note")


def golden(report: ParityReport) -> dict[str, Any]:
    """What a report says, and numbers with three digits."""
    rows = []
    for row in report.rows:
        # No row of these cases is between 15 and 150 times its floor, so no machine sees another set of rows.
        size = row.error if row.error > 48 * row.floor else 0.0
        # A gradient that is zero but for rounding has any direction.
        error = (size, row.cosine if 0 < size < 0.95 else 0.0)
        local = row.local if row.verdict == "introduced" else 0.0
        numbers = [float(f"{number:.3g}") for number in (*error, row.floor, local)]
        rows.append(([getattr(row, word) for word in _WORDS], numbers))
    planted = [[*dataclasses.astuple(fault)[:3], float(f"{fault.ratio:.3g}")] for fault in report.revealed]
    begins = [[*cells[:4], cells[-1]] for cells in report.table(len(report.introduced))]
    told = [*report.remarks(), *report.not_compared]
    return json.loads(
        json.dumps(plain_json({"rows": rows, "begins": begins, "told": told, "planted": planted}))
    )


def _near(numbers: tuple[float, float], factor: float) -> bool:
    made, expected = map(float, numbers)
    same = made == expected or (math.isnan(made) and math.isnan(expected))
    return same or (expected != 0 and 1 / factor < made / expected < factor)


@pytest.fixture(scope="module")
def goldens() -> dict[str, Any]:
    """The reports of the file, in which rows have the numbers of their words in one list."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    for report in stored["reports"].values():
        report["rows"] = [[stored["words"][at], numbers] for at, *numbers in report["rows"]]
    return stored["reports"]


@pytest.mark.parametrize("name", CASES)
def test_a_report_is_as_it_was(goldens: dict[str, Any], name: str) -> None:
    made, expected = golden(report_of(CASES[name])), goldens[name]
    assert [words for words, _ in made["rows"]] == [words for words, _ in expected["rows"]]
    for (words, numbers), (_, known) in zip(made["rows"], expected["rows"], strict=True):
        error, cosine, floor, local = zip(numbers, known, strict=True)
        assert _near(error, 1.02), (words, "error", error)
        assert _near(cosine, 1.02), (words, "cosine", cosine)
        # Rounding depends on the machine's instructions, and a few numbers may be rounded right by chance.
        if math.prod(words[_WORDS.index("shape")]) >= 16:
            assert _near(floor, ROUNDING), (words, "floor", floor)
            assert _near(local, ROUNDING), (words, "alone", local)
    assert [fault[:3] for fault in made["planted"]] == [fault[:3] for fault in expected["planted"]]
    assert all(
        _near((fault[3], known[3]), ROUNDING)
        for fault, known in zip(made["planted"], expected["planted"], strict=True)
    )
    assert made["told"] == expected["told"]
    assert made["begins"] == expected["begins"]


def write() -> None:
    torch.set_num_threads(1)
    reports = {name: golden(report_of(case)) for name, case in CASES.items()}
    every = [words for report in reports.values() for words, _ in report["rows"]]
    distinct = dict.fromkeys(json.dumps(words) for words in every)
    number_of = {text: number for number, text in enumerate(distinct)}
    for report in reports.values():
        report["rows"] = [[number_of[json.dumps(words)], *numbers] for words, numbers in report["rows"]]
    text = json.dumps({"words": [*map(json.loads, distinct)], "reports": reports}, separators=(",", ":"))
    FILE.write_text(text.replace("],[", "],\n[").replace("},", "},\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
