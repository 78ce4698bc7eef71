"""What a leg checks before it goes on from a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.relay import job as job_module
from bridge.relay.config import Leg, RelayConfig
from bridge.relay.corpus import Corpus
from bridge.relay.job import Job, read_metrics, resume_position, train_state


def job() -> Job:
    config = RelayConfig.load("quick")
    leg = Leg("torch", 1, "optim", steps=1)
    return Job(config.model, config.data, config.optimizer, leg, Path("leg"), Path("source"), None)


def test_a_run_goes_on_at_the_position_it_had() -> None:
    corpus = Corpus.of_standard_library()
    assert resume_position(job(), corpus, train_state(job(), corpus, 7)) == 7


def test_a_checkpoint_of_other_text_another_seed_or_another_model_is_refused() -> None:
    corpus = Corpus.of_standard_library()
    train = train_state(job(), corpus, 7)
    with pytest.raises(ValueError, match="checkpoint source: expected text with SHA-256"):
        resume_position(job(), replace(corpus, sha256=bytes(32)), train)
    with pytest.raises(ValueError, match="expected data seed 21, got 20"):
        resume_position(replace(job(), data=replace(job().data, seed=21)), corpus, train)
    with pytest.raises(ValueError, match=r"expected model .*'d_ff': 59.* got .*'d_ff': 53"):
        resume_position(replace(job(), model=replace(job().model, d_ff=59)), corpus, train)


@pytest.mark.parametrize("leg", [Leg("torch", 1, "optim", steps=1), *RelayConfig.load("bfloat16").legs])
def test_a_job_survives_its_file(tmp_path: Path, leg: Leg) -> None:
    written = replace(job(), leg=leg, folder=tmp_path / "leg", destination=tmp_path / "leg" / "checkpoint")
    assert Job.read(written.write()) == written


def test_a_line_still_being_written_is_not_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 5.0}\n{"step": 1, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 5.0}]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("mesh: expected 2"), "ValueError: mesh: expected 2"),
        (KeyError("num_consts"), f"KeyError: 'num_consts' (at {__file__}:"),
    ],
)
def test_an_error_that_does_not_explain_itself_is_reported_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def rehearse(_: Job) -> None:
        raise error

    file = replace(job(), folder=tmp_path / "leg").write()
    monkeypatch.setattr(job_module, "end_with_parent", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["leg", job_module.REHEARSE, str(file)])
    job_module.main(lambda _: None, rehearse)
    summary = (tmp_path / "leg" / "error-rank0").read_text().split("\n\nTraceback")[0]
    assert summary.startswith(said)
    assert ("(at " in summary) == ("(at " in said)
