"""Memory of converting and comparing a checkpoint of a gigabyte, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bridge.core.formats import create_checkpoint

D, HEADS, HEAD_DIM, FF, VOCAB, LAYERS = 1536, 12, 128, 4211, 8011, 3
LIMIT_MB = {1: 200, 2: 300}
"""By workers."""

PROGRAM = """
import json, sys
import bridge.checkpoints.convert.conversion, bridge.checkpoints.compare.diff
import bridge.core.formats.dcp.reader, bridge.core.formats.dcp.writer
import bridge.core.formats.orbax.reader, bridge.core.formats.orbax.writer
from tests.support.process_memory import status_bytes
command, a, b, workers = sys.argv[1:]
before = status_bytes("VmHWM")
if command == "convert":
    result = bridge.checkpoints.convert.conversion.convert(a, b, mapping="decoder", workers=int(workers)).bytes
else:
    result = bridge.checkpoints.compare.diff.diff(a, b, mapping="decoder").max_ulp
print(json.dumps([(status_bytes("VmHWM") - before) / 1e6, result]))
"""


def run(command: str, a: Path, b: Path, workers: int = 1) -> tuple[float, int]:
    """The process's peak memory above its imports, in MB, and its result."""
    arguments = [command, str(a), str(b), str(workers)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True, timeout=500
    )
    above, result = json.loads(done.stdout)
    print(f"{command} {a.name} {b.name}, {workers} workers: {above:.0f} MB above the imports")
    return above, result


def make_source(path: Path) -> int:
    """A DCP checkpoint of 1 GB, written chunk by chunk; returns the bytes of its tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, D),
        "norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{norm}.weight": (D,) for norm in ("attention_norm", "mlp_norm")}
        shapes |= {f"layers.{i}.attention.{w}.weight": (HEADS * HEAD_DIM, D) for w in ("wq", "wk", "wv")}
        shapes[f"layers.{i}.attention.wo.weight"] = (D, HEADS * HEAD_DIM)
        shapes |= {f"layers.{i}.mlp.w13.weight": (2 * FF, D), f"layers.{i}.mlp.w2.weight": (D, FF)}
    rng = np.random.default_rng(0)
    with create_checkpoint(path, "dcp") as writer:
        for name, shape in shapes.items():
            for entry in (
                ("model", name),
                ("optimizer", "state", name, "exp_avg"),
                ("optimizer", "state", name, "exp_avg_sq"),
            ):
                stored = writer.add_tensor(entry, shape, np.dtype(np.float32)).name
                for box in writer.chunks(stored):
                    writer.write(stored, box, rng.standard_normal(box.sizes, np.float32))
            stored = writer.add_tensor(("optimizer", "state", name, "step"), (), np.dtype(np.float32)).name
            writer.write(stored, writer.chunks(stored)[0], np.asarray(5, np.float32))
        stored = writer.add_tensor(("train", "model", "head_dim"), (), np.dtype(np.int64)).name
        writer.write(stored, writer.chunks(stored)[0], np.asarray(HEAD_DIM))
    return sum(3 * 4 * int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.slow
def test_a_gigabyte_converts_both_ways_and_compares_in_300_megabytes(tmp_path: Path) -> None:
    assert make_source(tmp_path / "dcp") > 1e9
    for workers, source, target in ((1, "dcp", "orbax"), (1, "orbax", "back"), (2, "dcp", "orbax2")):
        above, _ = run("convert", tmp_path / source, tmp_path / target, workers)
        assert above < LIMIT_MB[workers]
    for a, b in (("back", "orbax"), ("orbax", "dcp")):
        above, ulp = run("diff", tmp_path / a, tmp_path / b)
        assert above < LIMIT_MB[1]
        assert ulp == 0
