"""The error of a missing optional package names commands that work, from a clone and from an index."""

from __future__ import annotations

import html
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridge.checkpoints.inspect.chart import PictureError, check_picture_path, layout_figure, save_picture
from bridge.commands.main import app
from bridge.core.extras import install_advice, why_no_pictures
from bridge.core.sharding import plan_layout
from bridge.parity.compare.parity import write_report
from bridge.parity.compare.run_file import RunFileError, resolve
from bridge.parity.curves.compare import compare_runs
from tests.parity.pair.reports import llama

ROOT = Path(__file__).parents[1]
REQUIREMENTS = [
    "numpy<3,>=2.0",
    'torch<3,>=2.11; extra == "torch"',
    "jax<0.13,>=0.10; extra == 'jax'",
    'flax<0.13,>=0.12.8; extra == "jax"',
    'libtpu<0.1; sys_platform == "linux" and extra == "tpu-compiler"',
    'twinshard[jax,torch]; extra == "all"',
]


def test_advice_has_a_command_for_a_clone_and_the_packages_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIREMENTS)
    assert install_advice("jax") == (
        "pip install '.[jax]' in a clone of Twinshard; without a clone: "
        "pip install 'jax<0.13,>=0.10' 'flax<0.13,>=0.12.8'"
    )
    assert install_advice("torch", "jax").startswith("pip install '.[torch,jax]' in a clone")
    assert install_advice("tpu-compiler").endswith("pip install 'libtpu<0.1'")


def test_sources_that_are_not_installed_still_advise(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_advice("torch") == "pip install '.[torch]' in a clone of Twinshard"


def test_no_text_tells_a_user_to_install_twinshard_from_an_index() -> None:
    paths = [path for room in ("bridge", "torch_impl", "jax_impl") for path in (ROOT / room).rglob("*.py")]
    paths += [ROOT / "README.md", ROOT / "twinshard.py", *(ROOT / "docs").rglob("*.md")]
    named = {
        str(path.relative_to(ROOT)): found
        for path in paths
        if path != ROOT / "bridge" / "core" / "extras.py"
        if (found := re.findall(r"install \S*twinshard\b.*", path.read_text(encoding="utf-8")))
    }
    assert named == {}


def test_each_extra_that_is_advised_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(
        path.read_text()
        for room in ("bridge", "torch_impl", "jax_impl")
        for path in (ROOT / room).rglob("*.py")
    )
    advised = {
        name
        for call in re.findall(r"install_advice\(([^)]*)\)", text)
        for name in re.findall(r"['\"]([a-z]+)['\"]", call)
    }
    assert {"torch", "jax", "ray", "pictures"} <= advised <= set(extras)
    assert {"gpu-compiler", "tpu-compiler"} <= set(extras)


def test_a_run_file_whose_model_needs_an_absent_framework_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "model_without_jax.py").write_text("import flax\n")
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(
        RunFileError, match=r"^\[jax\] model: cannot import .*flax.*: pip install '\.\[jax\]'"
    ):
        resolve("model_without_jax:build", "[jax] model")
    with pytest.raises(RunFileError) as told:
        resolve("no_such_module:build", "[jax] model")
    assert "pip" not in str(told.value)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = why_no_pictures()
    assert reason is not None
    assert reason.startswith("pictures need matplotlib, which is not installed: pip install '.[pictures]'")
    return reason


@pytest.mark.parametrize("option", ["--chart=plan.png", "--html=plan.html"])
def test_a_picture_of_a_plan_is_refused_without_matplotlib(
    option: str, no_matplotlib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "fsdp", "--model", "llama3-8b", option])
    assert result.exit_code == 2
    assert no_matplotlib in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_curves_compare_without_matplotlib_and_refuse_a_picture(no_matplotlib: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n0,1.0\n1,0.5\n")
    report = compare_runs([tmp_path / "a.csv"], [tmp_path / "a.csv"])
    assert report.same
    with pytest.raises(ValueError, match="pictures need matplotlib"):
        report.plot(tmp_path / "curves.png")


def test_a_parity_report_is_written_without_matplotlib_and_says_why_it_has_no_picture(
    no_matplotlib: str, tmp_path: Path
) -> None:
    write_report(llama(2), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}
    assert no_matplotlib in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_a_drawing_of_a_layout_is_refused_without_matplotlib(no_matplotlib: str, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="pictures need matplotlib"):
        save_picture(layout_figure(plan_layout({"w": (4, 3)}, 2)), tmp_path / "layout.png")
    with pytest.raises(PictureError, match="pictures need matplotlib"):
        check_picture_path(tmp_path / "layout.png")
