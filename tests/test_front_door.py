"""`import twinshard`: its names are lazy, and a type checker sees their types once `make` has installed it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import get_args

import pytest

import bridge.planning
import twinshard
from bridge.core.formats import FORMATS, Format
from bridge.core.sharding import ENGINES, STRATEGIES, Engine, StrategyName

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_importing_it_imports_no_framework_and_no_other_package() -> None:
    program = (
        "import sys; before = set(sys.modules); import twinshard\n"
        "print(*sorted({n.partition('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    assert run(sys.executable, "-c", program).stdout.split() == ["bridge", "twinshard"]


@pytest.mark.parametrize("name", sorted(set(twinshard.__all__) - {"__version__"}))
def test_a_name_is_what_its_home_has(name: str) -> None:
    home, attribute = twinshard._HOMES[name]
    module = importlib.import_module(home)
    assert getattr(twinshard, name) is (getattr(module, attribute) if attribute else module)
    assert name in dir(twinshard)


def test_a_misspelt_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'convrt': it has .*convert"):
        getattr(twinshard, "convrt")  # noqa: B009 (a name that type checkers refuse)


def test_the_stub_has_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse((ROOT / "twinshard-stubs" / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            homes |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign):
            assert sorted(ast.literal_eval(node.value)) == sorted(twinshard.__all__)
    assert homes == {**twinshard._HOMES, "__version__": ("bridge.core.version", "__version__")}


def test_types_of_words_are_the_words() -> None:
    assert get_args(Format) == FORMATS
    assert get_args(StrategyName) == tuple(STRATEGIES)
    assert get_args(Engine) == ENGINES


def test_it_is_the_command() -> None:
    assert (
        run(sys.executable, "-m", "twinshard", "--version").stdout.strip()
        == f"twinshard {twinshard.__version__}"
    )


def test_a_plan_takes_names() -> None:
    work = twinshard.Workload(batch=1, length=128)
    named = twinshard.plan("llama3-8b", "fsdp", 8, "torch", work)
    model = bridge.planning.resolve_models("llama3-8b")["torch"]
    made = twinshard.plan(model, bridge.planning.load_policy("fsdp"), 8, "torch", work)
    assert named.at_rest.total == made.at_rest.total > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_strangers_program_is_checked_with_full_types(tmp_path: Path) -> None:
    # In another folder and without PYTHONPATH, so that mypy sees only what `make` installed.
    paths = [
        Path(line.strip())
        for file in Path(sysconfig.get_path("purelib")).glob("*twinshard*.pth")
        for line in file.open()
    ]
    if not any(path.is_dir() for path in paths):
        pytest.skip("twinshard is not installed by a path file, as `make` does")
    (tmp_path / "program.py").write_text(
        "import twinshard\nfrom torch import nn\nfrom bridge import diff\n"
        "reveal_type(twinshard.convert)\nreveal_type(diff)\nreveal_type(twinshard.jax.fully_shard)\n"
        'twinshard.convert("a", "b", to="orbx")\n'
        'twinshard.torch.fully_shard(nn.Linear(2, 2), strategy="zero4")\n'
        "twinshard.convrt\n"
    )
    done = run(sys.executable, "-I", "-m", "mypy", "program.py", cwd=tmp_path)
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == 3, done.stdout
    assert not any('"Any"' in line for line in revealed)
    errors = [line.rpartition("[")[2] for line in done.stdout.splitlines() if "error:" in line]
    assert errors == ["arg-type]", "arg-type]", "attr-defined]"], done.stdout
