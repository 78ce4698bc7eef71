"""The certificate in the manifest of a conversion's result: its content, and that a changed one is noticed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bridge import CheckpointError, ConvertOptions, Selection, convert, inspect, open_checkpoint, verify
from bridge.checkpoints.jobs.array_jobs import convert_part
from bridge.checkpoints.prove.noted import note_proof
from bridge.checkpoints.prove.proof import Proof, StateProof
from bridge.commands.main import app
from bridge.core.formats.files.certificate import Certificate
from bridge.core.formats.files.manifest import MANIFEST_FILE, Manifest, object_checksum, parse_manifest
from tests.support.bridge.verify_files import arrays, write

RULES: dict[str, Any] = {
    "name": "turned",
    "rule": [
        {"torch": "w.float32 : r c", "jax": "v.first : c r"},
        {"torch": "w.large : r c", "jax": "v.large : c r"},
    ],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    write(path, "dcp", {name: array for name, array in arrays().items() if name in ("w.float32", "w.large")})
    return path


def certificate_of(checkpoint: str | Path, items: tuple[str, ...] = ()) -> Certificate:
    certificate = inspect(checkpoint, items=items).certificate
    assert certificate is not None
    assert verify(checkpoint, items=items).certificate == certificate
    return certificate


def test_it_says_from_what_and_how(tmp_path: Path, source: Path) -> None:
    convert(
        source,
        tmp_path / "a",
        mapping=RULES,
        into="jax",
        selection=Selection(drop=("run.*",)),
        casts=("model/v.large=bfloat16",),
    )
    certificate = certificate_of(tmp_path / "a")
    # As anybody can calculate them: the text before the certificate is a manifest of its own.
    text = (tmp_path / "a" / MANIFEST_FILE).read_text()
    before = text[: text.index(', "certificate": [{')] + "}"
    assert "certificate" not in json.loads(before)
    assert certificate.digests["manifest"] == hashlib.sha256(before.encode()).hexdigest()
    own = (source / MANIFEST_FILE).read_bytes()
    assert certificate.digests["source manifest"] == hashlib.sha256(own).hexdigest()
    assert (certificate.source, certificate.source_format) == (str(source), "dcp")
    assert (certificate.mapping, certificate.conventions) == ("turned", ["torch", "jax"])
    assert (certificate.rounded, certificate.cast) == (["model/v.large"], ["model/v.large=bfloat16"])
    assert sorted(certificate.dropped) == ["run.betas", "run.note"]
    assert str(certificate).endswith(
        "mapping turned, names of torch -> jax; 2 dropped; 1 rounded; not proven (--prove)"
    )


def test_a_template_and_what_it_fills_are_named(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "like", "dcp", arrays())
    convert(source, tmp_path / "a", like=tmp_path / "like", mapping=RULES)
    certificate = certificate_of(tmp_path / "a")
    assert certificate.digests.keys() == {"source", "source manifest", "template", "plan", "manifest"}
    assert certificate.filled.keys() == arrays().keys() - {"w.float32", "w.large"}


@pytest.mark.parametrize("destination", ["whole", "one.safetensors", "memory://certified/step", "parts"])
def test_every_destination_has_it(tmp_path: Path, source: Path, destination: str) -> None:
    path: str | Path = destination if "://" in destination else tmp_path / destination
    if destination == "parts":
        for part in (1, 2):
            convert_part(source, path, ConvertOptions("orbax"), part, 2)
    else:
        convert(source, path)
    certificate = certificate_of(path)
    assert certificate.source == str(source)
    assert certificate.digests.keys() == {"source", "source manifest", "plan", "manifest"}


def test_each_item_of_a_step_has_it(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "step", to="orbax", write_items=("w", "run"))
    for item in ("w", "run"):
        assert certificate_of(tmp_path / "step" / item).source == str(source)
    assert certificate_of(tmp_path / "step", ("run", "w")).source == str(source)


def test_every_changed_byte_is_noticed(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "a.safetensors")
    file = tmp_path / f"a.safetensors.{MANIFEST_FILE.removeprefix('twinshard_')}"
    data = file.read_bytes()
    start = data.index(b', "certificate": ')
    for position in range(start, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            manifest = parse_manifest(bytes(changed), "the manifest")
        except CheckpointError:
            continue
        assert manifest.certificate is None
        assert manifest.certificate_problem
    # A checksum of the manifest itself, by somebody who can calculate the checksums of chunks, too.
    file.write_bytes(data.replace(b'"format": "safetensors"', b'"format":  "safetensors"', 1))
    report = verify(tmp_path / "a.safetensors")
    problem = "its certificate is damaged, or of another manifest: expected the SHA-256 of all before it, found another"
    assert [(problem.where, problem.text) for problem in report.problems] == [(file.name, problem)]
    assert (report.certificate, report.protected) == (None, report.bytes)
    assert inspect(tmp_path / "a.safetensors").unreadable == {file.name: problem}
    with pytest.raises(CheckpointError, match="its certificate is damaged"):
        convert(tmp_path / "a.safetensors", tmp_path / "b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": 1},
        {"filled": []},
        {"dropped": {}},
        {"proof": []},
        {"proof": {"libraries": 1}},
        {"further": ""},
        {"digests": {}},
    ],
)
def test_a_malformed_certificate_is_refused(tmp_path: Path, source: Path, wrong: dict[str, Any]) -> None:
    data = (source / MANIFEST_FILE).read_bytes()
    certificate = Certificate("a", "dcp", "0.1.0", {"manifest": hashlib.sha256(data).hexdigest()})

    def parsed(entry: dict[str, Any]) -> Manifest:
        entry = json.loads(json.dumps(entry))
        text = json.dumps([entry, f"{object_checksum(entry):08x}"])
        return parse_manifest(data[:-1] + b', "certificate": ' + text.encode() + b"}", "m")

    assert parsed(vars(certificate)).certificate is not None
    manifest = parsed({**vars(certificate), **wrong})
    assert manifest.certificate is None
    assert manifest.certificate_problem.startswith("its certificate is damaged, or of another manifest: ")


def test_names_that_look_like_a_certificate_stay_names(tmp_path: Path) -> None:
    hostile = {', "certificate": [{': np.ones(3), "certificate": np.ones(2)}
    with open_checkpoint(_written(tmp_path / "a", hostile)) as reader:
        assert sorted(reader.tensors) == sorted(hostile)
    convert(tmp_path / "a", tmp_path / "b")
    assert verify(tmp_path / "a").good
    assert certificate_of(tmp_path / "b").source == str(tmp_path / "a")


def _written(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    write(path, "dcp", tensors)
    return path


def test_a_proof_is_noted_once_and_a_wrong_one_is_a_problem(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "step", to="orbax", write_items=("w", "run"))
    states = (StateProof("opt/mu/*", 2, 1e-13, "w", 1e-6),)
    note_proof(tmp_path / "step", Proof(("orbax 1, optax 2",), 2, states))
    for path in (tmp_path / "step/w", tmp_path / "step/run"):
        certificate = certificate_of(path)
        assert (certificate.verdict, certificate.proof["states"][0]["largest"]) == ("proven", 1e-13)
        assert str(certificate).endswith("; proven by orbax 1, optax 2")
        assert verify(path).good
    before = {file.name for file in (tmp_path / "step").rglob("*")}
    note_proof(tmp_path / "step", Proof((), 2, (replace(states[0], largest=float("inf")),)))
    assert {file.name for file in (tmp_path / "step").rglob("*")} == before
    report = verify(tmp_path / "step/w")
    assert [problem.where for problem in report.problems] == [MANIFEST_FILE]
    assert "the result is wrong" in report.problems[0].text
    # JSON as everybody reads it.
    text = (tmp_path / "step/w" / MANIFEST_FILE).read_text()
    assert (
        json.loads(text, parse_constant=pytest.fail)["certificate"][0]["proof"]["states"][0]["largest"]
        == "inf"
    )


def test_the_commands_show_it(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "a")
    sentence = f"converted from {source} (dcp) by twinshard"
    for command in ("verify", "inspect"):
        answer = CliRunner().invoke(app, [command, str(tmp_path / "a")])
        assert answer.exit_code == 0
        assert sentence in answer.output.replace("\n", "")
        document = json.loads(CliRunner().invoke(app, [command, str(tmp_path / "a"), "--json"]).output)
        assert document["certificate"]["source"] == str(source)
    note_proof(tmp_path / "a", Proof((), 0, (), problems=("w: other bits",)))
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "a")]).exit_code == 1


def test_the_same_conversion_has_the_same_certificate(tmp_path: Path, source: Path) -> None:
    for name in ("a", "b"):
        convert(source, tmp_path / name, to="safetensors")
    assert (tmp_path / "a" / MANIFEST_FILE).read_bytes() == (tmp_path / "b" / MANIFEST_FILE).read_bytes()
