"""What the shells propose at TAB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.commands import completion
from bridge.core.mapping.language.rules import family_names, load_mapping
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; sys.argv[0] = 'twinshard'; from bridge.commands.main import main; main()"


def proposed(line: str, shell: str = "bash", *, cwd: Path = ROOT) -> list[str]:
    """The proposals for the last word of ``line``."""
    words = line.split(" ")
    environment = {
        **importing_from(ROOT),
        "_TWINSHARD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=cwd, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split() if shell == "bash" else [done.stdout]


LLAMA, UNKNOWN, NONE = ({"mapping": mapping} for mapping in ("llama", "none.toml", None))


@pytest.mark.parametrize(
    ("proposals", "arguments", "expected"),
    [
        (completion.conventions, (LLAMA, "torchtitan_0"), ["torchtitan_0_2"]),
        (completion.conventions, (NONE, "t5"), ["t5x"]),
        (completion.conventions, (UNKNOWN, ""), []),
        (completion.axes, (LLAMA, "query"), ["query_scale="]),
        (completion.axes, (LLAMA, "v"), ["vocab=", "vd="]),
        (completion.axes, (NONE, ""), []),
        (completion.casts, ("*=bf",), ["*=bfloat16"]),
        (completion.casts, ("model.*=float8_e5m2",), ["model.*=float8_e5m2", "model.*=float8_e5m2fnuz"]),
        (completion.casts, ("model",), []),
        (completion.policies, ("zero",), ["zero1", "zero2"]),
        (completion.relays, ("q",), ["quick"]),
        (completion.models, ("llama3-7",), ["llama3-70b"]),
        (completion.models, ("dec",), ["decoder:default"]),
        (completion.optimizers, ("ada",), ["adamw", "adafactor"]),
    ],
)
def test_proposals_begin_with_what_is_typed(
    proposals: Callable[..., list[tuple[str, str]]], arguments: tuple[Any, ...], expected: list[str]
) -> None:
    words = [SimpleNamespace(params=word) if isinstance(word, dict) else word for word in arguments]
    assert proposals(*words) == [(name, "") for name in expected]


def test_families_are_proposed_with_their_models_and_casts_of_all_names_first() -> None:
    assert completion.families("lla") == [("llama", ", ".join(load_mapping("llama").models)[:60])]
    assert {name[:2] for name, _ in completion.casts("")} == {"*="}


@pytest.mark.slow
def test_families_and_their_conventions_are_proposed() -> None:
    assert proposed("twinshard convert a b --mapping lla") == ["llama"]
    assert set(proposed("twinshard diff a b --mapping ")) == set(family_names())
    conventions = proposed("twinshard convert a b --mapping llama --into ")
    assert conventions == [*load_mapping("llama").conventions]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("twinshard con", ["convert"]),
        ("twinshard convert a b --to ", ["dcp", "orbax", "safetensors"]),
        ("twinshard convert a b --mapping llama --from torchtitan_0", ["torchtitan_0_2"]),
        ("twinshard convert a b --mapping llama --axis query", ["query_scale="]),
        ("twinshard convert a b --cast *=bf", ["*=bfloat16"]),
        ("twinshard plan fsdp_b", ["fsdp_bf16"]),
        ("twinshard plan fsdp zero", ["zero1", "zero2"]),
        ("twinshard plan fsdp --model llama3-7", ["llama3-70b"]),
        ("twinshard plan fsdp --optimizer ada", ["adamw", "adafactor"]),
        ("twinshard relay q", ["quick"]),
        # The shell proposes files.
        ("twinshard inspect runs/", []),
        ("twinshard convert a b --mapping ./mine", []),
        ("twinshard convert a b --mapping none.toml --into ", []),
    ],
)
def test_names_are_proposed_by_what_is_typed(line: str, expected: list[str]) -> None:
    assert sorted(proposed(line)) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_names(shell: str) -> None:
    (names,) = proposed("twinshard convert a b --mapping lla", shell)
    assert "llama" in names
    assert "qwen" not in names


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_for_bash_completes_names_and_falls_back_to_files(tmp_path: Path) -> None:
    twinshard = tmp_path / "bin/twinshard"
    twinshard.parent.mkdir()
    twinshard.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    twinshard.chmod(0o755)
    path = f"{twinshard.parent}:{os.environ['PATH']}"
    environment = {**importing_from(ROOT), "PATH": path, "_TWINSHARD_COMPLETE": "source_bash"}
    script = subprocess.run(
        [str(twinshard)], capture_output=True, text=True, env=environment, timeout=60, check=True
    ).stdout
    assert "complete -o default -F" in script
    ask = (
        "COMP_WORDS=(twinshard convert a b --mapping qwen2); COMP_CWORD=5; "
        '$(complete -p twinshard | sed "s/.*-F \\([^ ]*\\).*/\\1/") twinshard; echo "${COMPREPLY[@]}"'
    )
    environment.pop("_TWINSHARD_COMPLETE")
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.split() == ["qwen2"], done.stderr
