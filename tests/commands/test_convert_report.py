"""Every line that the end of ``twinshard convert`` can print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.checkpoints.convert.conversion import ConvertReport
from bridge.checkpoints.prove.proof import Proof
from bridge.commands.convert_report import print_result

PLAIN = ConvertReport(
    "in",
    Path("out"),
    "dcp",
    "safetensors",
    tensors=2,
    objects=1,
    bytes=3 << 20,
    resumed_bytes=0,
    dropped=(),
    overflowed={},
    inexact=(),
    verified=True,
    seconds=1.5,
)
FULL = ConvertReport(
    **{
        **vars(PLAIN),
        "resumed_bytes": 1 << 20,
        "dropped": ("a", "b"),
        "overflowed": {"w": 3, "v": 3},
        "inexact": ("w",),
        "verified": False,
        "kept": ("tokenizer.json",),
        "companions": ("config.json",),
        "not_copied": {"notes.txt": "a link"},
        "conventions": ("flax", "hf"),
        "remarks": ("tied",),
        "left_alone": {"old.bin": "another model"},
        "filled": {"count": "the source's step, 3"},
        "faults": {"u": "damaged"},
    }
)
LINES = """\
in (dcp) -> out (safetensors): 2 tensors, 1 object, 3.15 MB, 1.05 MB of it before, in 1.5 s (1.4 MB/s), names of flax \
-> hf
note: tied
not in the source: count: the source's step, 3
copied along: config.json
kept from the checkpoint that was replaced: tokenizer.json
damaged in the source: u: damaged
not read: old.bin: another model
not copied: notes.txt: a link
warning: not verified: damage in the source was copied into the new checkpoint, whose checksums confirm the \
damaged bytes
rounded, 1: w
warning: w: 3 finite elements became infinite or NaN by the cast
warning: v: 3 finite elements became infinite or NaN by the cast
dropped 2: a, b
proof: proven by torch
proof: 2 tensors restored, with every bit; no optimizer state to take a step from
"""
PROOF = Proof(("torch",), 2, ())


def test_a_result_with_everything_has_a_line_for_each_fact(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(FULL, json=False, proof=PROOF)
    assert capsys.readouterr().out.splitlines() == LINES.splitlines()


def test_a_plain_result_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(PLAIN, json=False)
    line = "in (dcp) -> out (safetensors): 2 tensors, 1 object, 3.15 MB in 1.5 s (2.1 MB/s)\n"
    assert capsys.readouterr().out == line


def test_a_folder_for_transformers_without_a_config_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, noted in (
        ({}, True),
        ({"companions": ("config.json",)}, False),
        ({"kept": ("config.json",)}, False),
        ({"conventions": ("flax", "maxtext")}, False),
        ({"destination": "out.safetensors"}, False),
        ({"format": "dcp"}, False),
    ):
        given = {**vars(PLAIN), "conventions": ("flax", "hf"), **changes}
        print_result(ConvertReport(**given), json=False)
        assert ("no config.json went along" in capsys.readouterr().out) is noted, changes


def test_the_document_has_the_proof(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(FULL, json=True, proof=PROOF)
    document = json.loads(capsys.readouterr().out)
    assert document["proof"]["libraries"] == ["torch"]
    assert document["filled"] == FULL.filled
    print_result(PLAIN, json=True)
    assert "proof" not in json.loads(capsys.readouterr().out)
