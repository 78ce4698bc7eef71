"""``plan --target`` from the command line to its texts, with the answers of a compiler that is not there.

If a change of a text is right, write the file again: ``python -m tests.planning.test_target_command``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.compiling import target_plan
from bridge.compiling.leg_process import LegError
from tests.planning.programs import FACTORS, GATHER_DONE, GATHER_START, PRODUCT, SHARD, program
from tests.support import golden

FILE = Path(__file__).with_name("golden") / "targets.json"
TEXT = program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE)
SHAPES = "x = { shape = [3, 4] }\nmask = { shape = [3], dtype = 'bool' }\n"
NAME = "tests.planning.test_target_command"
OWN = f"--model {NAME}:Net --loss {NAME}:loss --batch-shapes batch.toml --target"
LINES = (
    "fsdp zero1 hsdp --model llama3-8b --length 512 --micro 2 --target h100:8,v5e:3x3 --engine both --price 2",
    f"fsdp_bf16 {OWN} v5e:2x4 --tokens 6 --micro 2 --optimizer sgd --frozen *bias --reserve 20%",
    f"fsdp {OWN} h100:8 --memory 5GB --xla recommended --efficiency products=0.5 --devices 8",
    "fsdp --model mixtral-8x7b --stacked layers --target h100:8 --engine pjit --runtime jax",
)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(9)])


def loss(model: Any, batch: Any) -> Any:
    raise NotImplementedError


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a compiler says of a row: most fit, others fail, do not fit, cannot be read or use the host's memory."""
    row = request["source"].removesuffix(".toml"), request["target"], request["engine"]
    held = {"weights": 10**9, "moments": 2 * 10**9, "gradients": 10**9, "batch": 512, "variables": 0}
    common = {"held": held, "host": 0, "seconds": 1.25, "warnings": ["a layer is odd"], "cached": False}
    if row == ("fsdp", "v5e:3x3", "pjit"):
        raise LegError("INTERNAL:\n  no layout")
    if row == ("zero1", "v5e:3x3", "shard_map"):
        return {**common, "exhausted": 20 * 10**9, "programs": {}}
    memory = {"temporary": 3 * 10**8, "peak": 43 * 10**8}, {"temporary": 10**8, "peak": 4 * 10**9}
    common["memory"] = dict(zip(("gradients", "update"), memory, strict=True))
    if row == ("zero1", "h100:8", "pjit"):
        return {**common, "unread": "no operand", "programs": {}, "cached": True}
    gather = {"kind": "all_gather", "times": 66, "bytes": 10**9, "overlaps": row[0] == "zero1"}
    scatter = {"kind": "reduce_scatter", "times": 33, "bytes": 3 * 10**8, "overlaps": True}
    total = {"kind": "psum", "times": 2, "bytes": 10**8, "overlaps": False}
    common["collectives"] = [gather, {**gather, "bytes": 10**8, "overlaps": False}, scatter, total]
    common["programs"] = dict.fromkeys(("gradients", "update"), "text.hlo")
    return {**common, "host": 10**9} if row == ("zero1", "v5e:3x3", "pjit") else common


def said(line: str) -> Iterator[str]:
    """The requests, what the command prints, and the document's part about targets."""
    requests: list[str] = []

    def ask(request: dict[str, Any], platform: str) -> dict[str, Any]:
        requests.append(f"{platform} {json.dumps(request)}")
        return answer(request)

    def leg(_: str, platform: str) -> Any:
        return nullcontext(
            SimpleNamespace(platform=platform, running=True, ask=partial(ask, platform=platform))
        )

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(target_plan, "Leg", leg)
        patch.setattr(target_plan, "why_not", lambda _: None)
        patch.chdir(folder)
        Path("text.hlo").write_text(TEXT, encoding="utf-8")
        Path("batch.toml").write_text(SHAPES, encoding="utf-8")
        printed = CliRunner().invoke(app, ["plan", *line.split()])
        yield from (*requests, f"status {printed.exit_code}", *printed.stderr.splitlines())
        yield from printed.stdout.splitlines()
        document = json.loads(CliRunner().invoke(app, ["plan", *line.split(), "--json"]).stdout)
    yield from (json.dumps(row) for row in document["targets"].pop("rows"))
    yield json.dumps(document["targets"])


@pytest.mark.parametrize("line", LINES)
def test_rows_notes_and_times_of_targets_are_as_they_were(line: str) -> None:
    assert [*said(line)] == golden.kept(FILE, line)


if __name__ == "__main__":
    golden.write(FILE, {line: partial(said, line) for line in LINES})
