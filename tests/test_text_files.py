"""Text inputs of all commands: nothing hangs, nothing traces back, and errors name file and line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.compiling.target_step import load_batch_shapes
from bridge.core import text_files
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import load_mapping
from bridge.core.sharding import PolicyError, ShardingPolicy
from bridge.core.text_files import load_json, load_toml
from bridge.parity.compare.run_file import RunFile, RunFileError
from bridge.parity.curves.metrics_files import read_metrics
from bridge.parity.curves.series import MetricsError
from bridge.planning.models.errors import PlanError
from bridge.planning.models.language_models import causal_lm_config, decoder_config
from bridge.relay.config import ConfigError, RelayConfig

Read = Callable[[Path], object]
TOML: dict[str, tuple[Read, type[Exception]]] = {
    "mapping": (load_mapping, MappingError),
    "run file": (RunFile.load, RunFileError),
    "relay file": (RelayConfig.load, ConfigError),
    "policy": (ShardingPolicy.load, PolicyError),
    "batch shapes": (load_batch_shapes, PlanError),
    "decoder": (lambda path: decoder_config(str(path)), PlanError),
}
OTHERS: dict[str, tuple[Read, type[Exception]]] = {
    "config.json": (lambda path: causal_lm_config(str(path)), PlanError),
    "metrics": (read_metrics, MetricsError),
}
BAD = {
    "deep": (b"x = 1\ny = " + b"[" * 100_000, "nested too deeply in line 2"),
    "deep tables": (b"x = " + b"{a=" * 50_000, "nested too deeply in line 1"),
    "digits": (b"x = 1\n\ny = " + b"9" * 5000, "too many digits in line 3"),
    "parts": (b"x = 1\n" + b".".join([b"a"] * 100_000) + b" = 1", "a key of more than 1000 parts in line 2"),
    "parts in a table": (
        b"x = {y = 1, " + b".".join([b"a"] * 5_000) + b" = 1}",
        "more than 1000 parts in line 1",
    ),
    "bytes": (b"x = 1\ny = '\xff'", "line 2: .*UTF-8, got byte 0xff"),
    "syntax": (b"x = 1\ny = ]\nz = 2", "at: .*line 2"),
    "large": (b"#" * (text_files.MAX_TOML + 1), "at most 4194304 bytes, got a larger one"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reader", TOML)
def test_toml_that_cannot_be_read_is_refused_with_file_and_line(
    tmp_path: Path, reader: str, bad: str
) -> None:
    read, error = TOML[reader]
    content, text = BAD[bad]
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(error, match=f"x.toml.*{text}") as raised:
        read(tmp_path / "x.toml")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("reader", [*TOML, *OTHERS])
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path, reader: str) -> None:
    read, error = (TOML | OTHERS)[reader]
    os.mkfifo(tmp_path / "x.toml")
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    for name in ("x.toml", "device.toml"):
        with pytest.raises(error, match=f"{name}.*(a pipe or a device|found nothing there)"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "text", ['{"step": ' + "9" * 5000 + ', "loss": 1}', "[" * 100_000, '{"loss": \udcff']
)
def test_lines_of_metrics_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    line = text.encode("utf-8", "surrogateescape")
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1, "loss": 1}\n' + line + b'\n{"step": 3, "loss": 1}\n')
    with pytest.raises(MetricsError, match=r"m\.jsonl, line 2: ") as raised:
        read_metrics(tmp_path / "m.jsonl")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "too many digits"),
        (b"{", "line 1"),
        (b"\xff", "UTF-8"),
    ],
)
def test_json_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(PlanError, match=rf"config\.json.*{said}"):
        causal_lm_config(str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{said}"):
        load_json(tmp_path / "config.json", CheckpointError)


def test_what_people_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    # A byte order mark, as Windows' editors write it; many dots that belong to no key.
    path.write_bytes(
        b'\xef\xbb\xbfmatch = ["' + b'", "'.join([b"a.b.c.d"] * 2000) + b'"]\nnote = "' + b"." * 999 + b'"'
    )
    table = load_toml(path, ValueError)
    assert len(table["match"]) == 2000
    assert list(table) == ["match", "note"]


def test_the_error_of_a_folder_has_its_path(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match=str(tmp_path)):
        load_mapping(tmp_path)
