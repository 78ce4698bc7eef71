"""The public names of `bridge` exist, are typed, and cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

import bridge

ROOT = Path(__file__).parents[1]


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_importing_bridge_imports_no_other_package() -> None:
    program = (
        "import sys; before = set(sys.modules); import bridge\n"
        "print(*sorted({n.partition('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('bridge.')))"
    )
    assert run(program).split() == ["bridge", "bridge.core", "bridge.core.version", "bridge.old_paths"]


def test_converting_needs_neither_runtime() -> None:
    program = (
        "import sys; from bridge import *; print({'torch', 'jax'} & set(sys.modules), callable(convert))"
    )
    assert run(program).strip() == "set() True"


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    assert set(bridge.__all__) - {"__version__"} == set(bridge._HOMES)
    assert set(bridge.__all__) <= set(dir(bridge))
    text = Path(bridge.__file__).read_text()
    checked = text.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    for name in bridge._HOMES:
        assert getattr(bridge, name).__name__ == name
        assert f"{bridge._HOMES[name]} import" in checked
        assert name in checked.replace(",", " ").split()
    with pytest.raises(AttributeError, match="no attribute 'converted'"):
        getattr(bridge, "converted")  # noqa: B009 (a name that type checkers refuse)


def test_the_surface_works(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with bridge.create_checkpoint(tmp_path / "a", "dcp") as writer:
        name = writer.add_tensor(("w",), array.shape, array.dtype).name
        for box in writer.chunks(name):
            writer.write(name, box, array[box.slices()])
    bridge.convert(tmp_path / "a", tmp_path / "b", to="orbax")
    assert bridge.verify(tmp_path / "b").good
    report = bridge.diff(
        tmp_path / "a", tmp_path / "b", tolerance=bridge.Tolerance(), selection=bridge.Selection()
    )
    assert report.max_ulp == 0
    assert [tensor.shape for tensor in bridge.inspect(tmp_path / "b").tensors] == [(3, 4)]
    with bridge.open_checkpoint(tmp_path / "b") as reader:
        np.testing.assert_array_equal(reader.read("w", bridge.Box((1, 0), (1, 4))), array[1:2])
    with pytest.raises(bridge.CheckpointError):
        bridge.convert(tmp_path / "a", tmp_path / "c", mapping="llama")
    assert typing.get_type_hints(bridge.convert)["return"].__name__ == "ConvertReport"


# As documents of the release before had them.
SHOWN = {
    "bridge.checkpoints.convert": "ConvertOptions convert planned",
    "bridge.checkpoints.diff": "diff",
    "bridge.checkpoints.picture": "layout_figure",
    "bridge.checkpoints.selection": "Selection",
    "bridge.checkpoints.verify": "verify",
    "bridge.commands.output": "human_bytes print_line print_table",
    "bridge.formats": "Box create_checkpoint open_checkpoint",
    "bridge.parity": "capture_jax capture_torch compare_traces parity write_report",
    "bridge.parity.config": "RelayConfig",
    "bridge.parity.corpus": "Corpus",
    "bridge.parity.curves.compare": "compare_runs",
    "bridge.parity.pair.picture": "write_picture",
    "bridge.parity.plot": "COLOURS relay_figure",
    "bridge.parity.relay": "run",
    "bridge.planning": "Workload load_policy make_plan resolve_models",
    "bridge.planning.compilers": "why_not",
    "bridge.planning.target_chart": "memory_figure timeline_figure",
    "bridge.planning.target_plan": "plan_targets",
    "bridge.planning.target_step": "StepRequest",
    "bridge.planning.target_time": "Roofline",
    "bridge.planning.targets": "targets_named",
    "bridge.sharding": "Layout Placements plan_layout",
}


def test_paths_that_documents_showed_still_import() -> None:
    lines = [f"from {module} import {', '.join(names.split())}" for module, names in SHOWN.items()]
    lines += [
        "import bridge.sharding, bridge.core.sharding",
        "assert bridge.sharding is bridge.core.sharding",
        "import bridge.formats.npz.reader as old, bridge.core.formats.npz.reader as new",
        "assert old is new",
        "try: import bridge.formats.nothing",
        "except ModuleNotFoundError as error: print(error.name)",
    ]
    assert run("\n".join(lines)).strip() == "bridge.core.formats.nothing"
