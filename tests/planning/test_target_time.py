"""Times of rows of ``plan --target``, from programs by hand on an H100."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bridge.commands.plan_targets import TargetRequest
from bridge.compiling.compile_cache import cache_folder
from bridge.compiling.machines.targets import target_named
from bridge.compiling.target_plan import TargetPlan, TargetRow, Task
from bridge.compiling.target_step import BatchArray
from bridge.compiling.target_time import HEADINGS, PRICE, Roofline, notes, parse_efficiency, table, wide_share
from bridge.compiling.timing.step_time import Efficiency
from bridge.planning import Workload
from bridge.planning.cost.cost import parse_policy
from bridge.planning.cost.optimizers import Optimizer
from bridge.planning.models.errors import PlanError
from tests.planning.programs import FACTORS, PRODUCT, PRODUCT_FLOPS, program

POLICY = parse_policy('[precision]\ncompute = "bfloat16"\n[[unit]]\nmatch = ""\n', "own.toml")
IDEAL = Efficiency(1, 1, 1)


def row(answer: dict[str, Any] | None, **options: Any) -> TargetRow:
    return TargetRow(Task(POLICY, target_named("h100:8"), "shard_map"), 80, answer, **options)


def compiled(folder: Path, *texts: str) -> TargetRow:
    paths = {}
    for number, text in enumerate(texts):
        paths[str(number)] = folder / f"{number}.hlo"
        paths[str(number)].write_text(text)
    return row({"programs": {name: str(path) for name, path in paths.items()}})


def test_times_of_a_steps_programs_add_up(tmp_path: Path) -> None:
    once = Roofline(10, None, efficiency=IDEAL).estimate(compiled(tmp_path, program(*FACTORS, PRODUCT)))
    twice = Roofline(10, None, efficiency=IDEAL).estimate(
        compiled(tmp_path, program(*FACTORS, PRODUCT), program(*FACTORS, PRODUCT))
    )
    assert once.time is not None
    assert twice.time is not None
    assert once.time.total > 0
    assert twice.time.total == pytest.approx(2 * once.time.total)
    assert sum(twice.time.flops.values()) == 2 * PRODUCT_FLOPS
    # Without the number of tokens there is no rate.
    assert twice.rate is None
    cells = twice.cells(priced=False)
    assert len(cells) == len(HEADINGS)
    assert cells[8:10] == ("", "")


def test_rates_are_those_of_all_devices(tmp_path: Path) -> None:
    estimate = Roofline(1000, 64, price=2.0, efficiency=IDEAL).estimate(
        compiled(tmp_path, program(*FACTORS, PRODUCT))
    )
    assert estimate.time is not None
    assert estimate.rate is not None
    rate = 8 * 64 / estimate.time.total
    assert estimate.rate.tokens_per_second == pytest.approx(rate)
    # At the peak of the compute dtype, of 8 devices.
    assert estimate.rate.mfu == pytest.approx(6 * 1000 * rate / (8 * 989.4e12))
    assert estimate.rate.dollars == pytest.approx(8 * 2 / 3600 / rate * 1e6)
    headings, (cells,) = table([estimate], priced=True)
    assert len(cells) == len(headings)
    assert headings[-1] == PRICE
    said = estimate.as_dict()
    assert said is not None
    assert said["total"] == estimate.time.total
    assert said["rate"]["dollars"] == estimate.rate.dollars


def test_a_lower_efficiency_takes_longer(tmp_path: Path) -> None:
    target_row = compiled(tmp_path, program(*FACTORS, PRODUCT))
    ideal, half = (
        Roofline(1, None, efficiency=e).estimate(target_row).time for e in (IDEAL, Efficiency(0.5, 0.5, 0.5))
    )
    assert ideal is not None
    assert half is not None
    assert half.total == pytest.approx(2 * ideal.total)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (row(None, failed="broken"), "nothing was compiled"),
        (row({"exhausted": 10, "programs": {}}), "nothing was compiled"),
        (row({"unread": "an operand too many", "programs": {}}), "an operand too many"),
    ],
)
def test_where_there_is_no_time_the_reason_is_said(one: TargetRow, why: str) -> None:
    estimate = Roofline(1, 8).estimate(one)
    assert (estimate.time, estimate.why) == (None, why)
    assert estimate.as_dict() == {"unknown": why}
    assert estimate.cells(priced=True)[3] == "unknown"
    assert len(estimate.cells(priced=True)) == len(HEADINGS) + 1
    said = list(notes(Roofline(1, 8), [estimate]))
    assert (len(said) == 2) == (one.found is not None)
    assert "estimates from the compiled programs, not measurements: 75%" in said[-1]


def test_a_text_that_is_no_program_costs_a_row_its_time_alone(tmp_path: Path) -> None:
    estimate = Roofline(1, 8).estimate(compiled(tmp_path, "HloModule nothing"))
    assert estimate.time is None
    assert estimate.why


def test_each_row_of_the_document_has_its_time() -> None:
    document = TargetPlan((row(None), row(None))).as_dict([{"total": 1.0}, {"total": 2.0}])
    assert [entry["time"] for entry in document["rows"]] == [{"total": 1.0}, {"total": 2.0}]


def test_efficiencies_are_parsed_and_checked() -> None:
    assert parse_efficiency("products=0.5, links=1") == Efficiency(products=0.5, links=1)
    for wrong in ("0.5", "products=half", "products=2", "flops=0.5"):
        with pytest.raises(PlanError, match="--efficiency: expected products"):
            parse_efficiency(wrong)


def test_a_price_of_a_step_that_is_described_needs_its_tokens() -> None:
    batch = {"x": BatchArray((2, 3), "float32")}

    def ask(price: float | None, tokens: int | None) -> None:
        request = TargetRequest(
            (target_named("h100:8"),),
            ("shard_map",),
            "absent_net:loss",
            batch,
            price,
            Efficiency(),
            False,
            tokens,
        )
        request.step("absent_net:Net", [Workload()], (), Optimizer(), ())

    with pytest.raises(PlanError, match="--price: expected --tokens N"):
        ask(2.0, None)
    # With tokens or without a price, the request goes on to import the loss, and its module is absent.
    for price, tokens in ((2.0, 64), (None, 64), (None, None)):
        with pytest.raises(PlanError, match="absent_net"):
            ask(price, tokens)


def test_the_share_of_operations_with_float32_factors(tmp_path: Path) -> None:
    estimate = Roofline(10, None, efficiency=IDEAL).estimate(compiled(tmp_path, program(*FACTORS, PRODUCT)))
    assert estimate.time is not None
    assert wide_share(estimate.time) == 0
    mixed = dataclasses.replace(estimate.time, flops={"f32": 1.0, "bf16": 3.0})
    assert wide_share(mixed) == 0.25
    assert wide_share(dataclasses.replace(estimate.time, flops={})) == 0
    full = parse_policy('[precision]\ncompute = "float32"\n[[unit]]\nmatch = ""\n', "own.toml")
    for flops, compute, told in (
        ({"f32": 3.0, "bf16": 1.0}, POLICY, ["75% of the operations of products are in float32"]),
        ({"f32": 1.0, "bf16": 1.0}, POLICY, []),
        ({"f32": 3.0, "bf16": 1.0}, full, []),
    ):
        task = dataclasses.replace(estimate.row.task, policy=compute)
        wide = dataclasses.replace(
            estimate,
            row=dataclasses.replace(estimate.row, task=task),
            time=dataclasses.replace(estimate.time, flops=flops),
        )
        *warnings, _ = notes(Roofline(10, None, efficiency=IDEAL), [wide])
        assert len(warnings) == len(told)
        assert all(text in warning for text, warning in zip(told, warnings, strict=True))


def test_compiled_programs_are_kept_below_the_folder_of_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches/twinshard/compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home/.cache/twinshard/compiled"
