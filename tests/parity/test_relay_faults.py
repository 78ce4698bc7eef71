"""Faults planted in one leg of the quick relay: the relay fails, and names the leg, the step and the parameter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.relay import launch, relay
from bridge.relay.config import RelayConfig
from bridge.relay.job import Job, read_metrics
from bridge.relay.report import NAMED, RelayReport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[RelayReport, Path]:
    """The quick relay without a fault, and its folder."""
    out = tmp_path_factory.mktemp("relay") / "run"
    return relay.run(RelayConfig.load("quick"), out, Console(quiet=True)), out


def plant(monkeypatch: pytest.MonkeyPatch, fault: str, folder: str) -> None:
    """Start the leg of this folder with the fault."""
    command = launch.command

    def faulty(job: Job) -> list[str]:
        words = command(job)
        if job.folder.name != folder:
            return words
        where = words.index(f"bridge.relay.{job.leg.framework}_leg")
        return [
            *words[:where],
            "tests.support.parity.faulty_leg",
            fault,
            job.leg.framework,
            *words[where + 1 :],
        ]

    monkeypatch.setattr(launch, "command", faulty)


def with_leg_repeated(right: tuple[RelayReport, Path], number: int, folder: Path) -> RelayReport:
    """The report of the right relay, but for one leg, which runs again from where it started."""
    report, out = right
    leg, config = report.config.legs[number - 1], report.config
    name = f"leg{number}-{leg.framework}"
    hops = {"torch": f"hop{number}-dcp", "jax": f"hop{number}-orbax"}
    job = Job(
        config.model, config.data, config.optimizer, leg, folder / name, out / hops[leg.framework], None
    )
    launch.run_leg(job, lambda step, loss: None)
    lines = read_metrics(job.metrics)
    legs = list(report.legs)
    legs[number - 1] = replace(
        legs[number - 1],
        losses=tuple(line["loss"] for line in lines),
        norms=tuple(line["norms"] for line in lines),
    )
    return replace(report, legs=tuple(legs))


def test_a_right_leg_repeated_is_right(right: tuple[RelayReport, Path], tmp_path: Path) -> None:
    assert right[0].failures() == []
    # Room on both sides: rounding is far below what is allowed, and a fault far above.
    for by_quantity in right[0].largest_norm_differences():
        for quantity, distance in by_quantity.items():
            assert distance < right[0].norm_tolerances[-1][quantity] / 3 < 1e-4
    assert with_leg_repeated(right, 2, tmp_path).failures() == []


@pytest.mark.parametrize(("framework", "number"), [("jax", 2), ("torch", 3)])
@pytest.mark.parametrize(
    ("fault", "pattern"), [("rope", r"layers\.\d\.attention\.w[qk]\.weight"), ("beta2", "second moments of ")]
)
def test_a_fault_in_one_leg_is_named(
    right: tuple[RelayReport, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    number: int,
    fault: str,
    pattern: str,
) -> None:
    plant(monkeypatch, fault, f"leg{number}-{framework}")
    report = with_leg_repeated(right, number, tmp_path)
    departure = report.departure
    assert departure is not None
    assert departure.step == report.legs[number - 1].first_step
    # Not by chance, and a parameter that the fault is in is among those named.
    assert departure.norms[0].distance > 100 * departure.norms[0].allowed
    assert any(re.search(pattern, str(far)) for far in departure.norms[:NAMED])
    assert fault == "rope" or "first moments" not in {far.kind for far in departure.norms}
    said = f"leg {number} ({report.legs[number - 1].title}), step {departure.step}: expected the norms"
    assert any(failure.startswith(said) for failure in report.failures())
    # The first loss that the fault can reach: of the same step by a wrong model, of the next one by a wrong update.
    assert report.curves().departures[0].first == departure.step + (fault == "beta2")


def test_the_command_fails_and_names_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "rope", "leg2-jax")
    done = CliRunner().invoke(app, ["relay", "quick", "--out", str(tmp_path / "run")])
    assert done.exit_code == 1
    assert "failed: leg 2 (jax x4 zero1), step 2: expected the norms of the fp32 reference" in done.stderr
