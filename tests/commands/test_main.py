"""The `twinshard` command: output, exit status, and one clear message for every error."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import bridge
from bridge.commands.main import app
from bridge.commands.output import byte_progress, print_line, print_table
from bridge.core.mapping.language.rules import family_names
from bridge.core.text import human_bytes, plain_json
from tests.checkpoints.test_convert import HYPERPARAMETERS, tensors, write
from tests.support.bridge.decoder_trees import HEAD_DIM, dcp_arrays, expected_orbax
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, its output in pipes."""
    program = [sys.executable, "-c", "from bridge.commands.main import main; main()", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    write(tmp_path / "dcp", "dcp", dcp_arrays(), HYPERPARAMETERS)
    return tmp_path / "dcp"


HELPED = ("convert", "curves", "diff", "families", "inspect", "map", "parity", "plan", "relay", "verify")


@pytest.mark.parametrize("name", HELPED)
def test_the_help_of_every_command_shows_an_example_and_fits_a_terminal(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\n    twinshard {name} ", result.stdout)
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []


def test_convert_and_diff_in_processes(tmp_path: Path, dcp: Path) -> None:
    done = command("convert", dcp, tmp_path / "orbax", "--mapping", "decoder")
    assert (done.returncode, done.stderr) == (0, "")
    count = len(expected_orbax(dcp_arrays()))
    assert f"{dcp} (dcp) -> {tmp_path / 'orbax'} (orbax): {count} tensors, 5 objects" in done.stdout

    done = command("diff", dcp, tmp_path / "orbax", "--mapping", "decoder")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"{count} tensors, \d+ elements compared: all bits agree; within the tolerance of 0 ULP\n",
        done.stdout,
    )

    back = command(
        "convert", tmp_path / "orbax", tmp_path / "back", "--to", "dcp", "--mapping", "decoder", "--json"
    )
    report = json.loads(back.stdout)
    assert (report["source_format"], report["format"], report["tensors"]) == (
        "orbax",
        "dcp",
        len(dcp_arrays()),
    )
    assert {n: a.tobytes() for n, a in tensors(tmp_path / "back").items()} == {
        n: a.tobytes() for n, a in dcp_arrays().items()
    }


@pytest.mark.fast_cases(
    "arguments0-error: none does not exist: expected a checkpoint there", "arguments4-error: "
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "none", "new"), "error: none does not exist: expected a checkpoint there"),
        (("convert", "dcp", "dcp"), "error: dcp exists already: remove it first"),
        (
            ("convert", "dcp", "new", "--mapping", "other"),
            "or one of the families bert, decoder, decoder_stacked, ",
        ),
        (
            ("convert", "other", "new", "--mapping", "decoder"),
            "is this another model? 1 of 1 tensors match no rule: model.x",
        ),
        (("convert", "damaged", "new", "--mapping", "decoder"), "error: "),
        (("inspect", "empty"), "found an empty directory"),
        (("inspect", "file"), "error: file is a file of another kind"),
        (("diff", "dcp", "none"), "error: none does not exist: expected a checkpoint there"),
        (
            ("convert", "dcp", "new", "--to", "dcp", "--mapping", "decoder"),
            "leave the mapping out to keep the names",
        ),
        (("relay", "none.toml"), "error: relay file none.toml: expected a TOML file"),
    ],
)
def test_an_error_is_one_message_on_stderr_with_status_2(
    tmp_path: Path, dcp: Path, arguments: tuple[str, ...], message: str
) -> None:
    write(tmp_path / "other", "dcp", {"model.x": np.ones(2)}, {})
    write(tmp_path / "damaged", "dcp", dcp_arrays(), {})
    (data,) = (tmp_path / "damaged").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-50])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    here = sorted(p.name for p in tmp_path.iterdir())
    environment = importing_from(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", "from bridge.commands.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == here


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "a"), "Missing argument 'DST'"),
        (("convert", "a", "b", "--to", "zip"), "'zip' is not one of 'dcp', 'orbax'"),
        (("convert", "a", "b", "--workers", "0"), "Invalid value for '--workers'"),
        (
            ("convert", "a", "b", "--mapping", "decoder", "--axis", "d"),
            "expected --axis NAME=SIZE such as d=64, got 'd'",
        ),
        (("convert", "a", "b", "--mapping", "decoder", "--axis", "d=x"), "such as d=64, got 'd=x'"),
        (("convert", "a", "b", "--mapping", "decoder", "--axis", "=4"), "such as d=64, got '=4'"),
        (("convert", "a", "b", "--axis", "d=4"), "--axis needs --mapping"),
        (("diff", "a", "b", "--max-ulp", "-1"), "Invalid value for '--max-ulp'"),
        (("fly",), "No such command 'fly'"),
    ],
)
def test_wrong_usage_has_status_2_and_says_what_was_expected(
    arguments: tuple[str, ...], message: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_diff_of_different_checkpoints_has_status_1_and_lists_them(tmp_path: Path, dcp: Path) -> None:
    arrays = dcp_arrays()
    changed = arrays["optimizer.state.norm.weight.exp_avg"] = np.ones(6, np.float32)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].copy()
    arrays["model.norm.weight"].view(np.uint32)[0] ^= 1
    del arrays["model.embed.weight"]
    arrays["more"] = changed
    write(tmp_path / "b", "dcp", arrays, {**HYPERPARAMETERS, ("optimizer", "param_groups", 0, "lr"): 1.0})
    result = call("diff", dcp, tmp_path / "b")
    assert result.exit_code == 1
    assert re.search(r"^no +model\.norm\.weight +float32 +1 .* 1/6 +1 ", result.stdout, re.M)
    assert "only in A: model.embed.weight\n" in result.stdout
    assert "only in B: more\n" in result.stdout
    assert "optimizer.param_groups.0.lr: 0.003 in a, 1.0 in b\n" in result.stdout
    assert "beyond the tolerance of 0 ULP" in result.stdout
    assert "train.step" not in result.stdout
    assert "train.step" in call("diff", dcp, tmp_path / "b", "--all").stdout

    report = json.loads(call("diff", dcp, tmp_path / "b", "--json").stdout)
    assert report["within"] is False
    assert report["missing"] == ["model.embed.weight"]
    assert {t["name"] for t in report["tensors"] if t["difference"]["differing"]} == {
        "model.norm.weight",
        "optimizer.state.norm.weight.exp_avg",
    }


@pytest.mark.parametrize(
    ("options", "status"), [((), 1), (("--max-ulp", 1), 1), (("--max-ulp", 2), 0), (("--rtol", 1e-6), 0)]
)
def test_tolerances_decide_the_status_of_diff(
    tmp_path: Path, options: tuple[object, ...], status: int
) -> None:
    a = np.ones(4, np.float32)
    b = a.copy()
    b.view(np.uint32)[1] += 2
    write(tmp_path / "a", "dcp", {"w": a}, {})
    write(tmp_path / "b", "dcp", {"w": b}, {})
    assert call("diff", tmp_path / "a", tmp_path / "b", *options).exit_code == status
    assert call("diff", tmp_path / "a", tmp_path / "b", "--json", *options).exit_code == status


def test_inspect_lists_every_tensor_whole_in_a_pipe(tmp_path: Path) -> None:
    name = "model." + "a_rather_long_name." * 12 + "weight"
    write(
        tmp_path / "a",
        "dcp",
        {name: np.zeros((7, 3), np.float16), "train.step": np.asarray(3)},
        {("lr",): 0.25},
    )
    done = command("inspect", tmp_path / "a")
    assert done.returncode == 0
    assert re.search(rf"^{re.escape(name)}  float16 +\[7, 3\] +42 B +1$", done.stdout, re.M)
    assert re.search(r"^train +1 +1 +8 B$", done.stdout, re.M)
    assert "lr = 0.25\n" in done.stdout
    report = json.loads(command("inspect", tmp_path / "a", "--json").stdout)
    assert report["format"] == "dcp"
    assert report["bytes"] == 50
    assert report["objects"] == {"lr": 0.25}
    (tensor,) = (t for t in report["tensors"] if t["name"] == name)
    assert (tensor["shape"], tensor["dtype"], tensor["bytes"]) == ([7, 3], "float16", 42)
    assert tensor["chunks"] == [{"offsets": [0, 0], "sizes": [7, 3]}]


def test_an_axis_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    arrays = {name: a for name, a in dcp_arrays().items() if not name.startswith("train.")}
    write(tmp_path / "a", "dcp", arrays, {})
    failed = call("convert", tmp_path / "a", tmp_path / "b", "--mapping", "decoder")
    assert failed.exit_code == 2
    assert "--axis d=SIZE" in failed.stderr
    done = call("convert", tmp_path / "a", tmp_path / "b", "--mapping", "decoder", "--axis", f"d={HEAD_DIM}")
    assert done.exit_code == 0
    assert call("diff", tmp_path / "b", tmp_path / "a", "--mapping", "decoder").exit_code == 0


def test_dropped_tensors_are_named(tmp_path: Path) -> None:
    mapping = tmp_path / "mine.toml"
    mapping.write_text('drop = ["model.rope"]\n[[rule]]\ntorch = "w"\njax = "w"\n')
    write(tmp_path / "a", "dcp", {"model.w": np.ones(2), "model.rope": np.ones(2)}, {})
    done = call("convert", tmp_path / "a", tmp_path / "b", "--mapping", mapping)
    assert done.exit_code == 0
    assert "dropped 1: model.rope\n" in done.stdout


def test_the_version_is_printed() -> None:
    assert call("--version").stdout == f"twinshard {bridge.__version__}\n"


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a", "orbax", {"w": np.ones(2)}, {})
    (tmp_path / "a" / "commit_success.txt").unlink()
    done = command("inspect", tmp_path / "a")
    assert done.returncode == 0
    assert re.fullmatch(r"warning: .*has no commit_success\.txt.*\n", done.stderr)


def test_a_bug_keeps_its_traceback(dcp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bridge.checkpoints.inspect.summary.inspect", broken)
    assert isinstance(call("inspect", dcp).exception, ZeroDivisionError)


def test_a_terminal_gets_a_progress_bar_and_tables_that_fold_long_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=60, legacy_windows=False)
    with byte_progress(terminal, "convert") as progress:
        progress(500, 1000, "model.w")
    assert "convert" in screen.getvalue()
    assert "model.w" in screen.getvalue()
    screen.truncate(0)
    print_table(terminal, ("tensor", "size"), [("x" * 90 + "[red]", "1 B")])
    assert screen.getvalue().count("x") == 90
    assert "[red]" in re.sub(r"[^\[\]a-z]", "", screen.getvalue())


@pytest.mark.parametrize("dumb", [False, True])
def test_a_pipe_and_a_dumb_terminal_get_a_line_of_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, dumb: bool
) -> None:
    if dumb:
        monkeypatch.setenv("TERM", "dumb")
    pipe, now = io.StringIO(), iter([0.0, 1.0, 11.0, 21.0])
    console = Console(file=pipe, width=200, force_terminal=dumb)
    monkeypatch.setattr("bridge.commands.output.time.monotonic", lambda: next(now))
    with byte_progress(console, "convert") as progress:
        progress(100, 1000, "model.a")
        progress(100, 1000, "model.b")
        progress(520, 1000, "model.w")
    assert pipe.getvalue().splitlines() == [
        "convert: 100 B of 1 kB, 0 B/s, model.b",
        "convert: 520 B of 1 kB, 20 B/s, 24 s left, model.w",
    ]


def test_json_has_no_numbers_outside_the_standard() -> None:
    assert plain_json({"a": (float("inf"), float("nan"), 1.5), "b": Path("x")}) == {
        "a": ["inf", "nan", 1.5],
        "b": "x",
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4_740_000, "4.74 MB"), (2 * 10**12, "2 TB")],
)
def test_sizes_are_decimal_with_three_digits(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_names_and_values_are_printed_as_they_are_and_never_control_the_terminal(tmp_path: Path) -> None:
    names = {
        "w:smile:x": np.zeros(2, np.float32),
        "w[bold]y": np.ones(2, np.float32),
        "w\x1b[2Jz": np.ones(1),
    }
    write(tmp_path / "c", "dcp", names, {("note",): "at :100: \x1b]0;owned"})
    listed = json.loads(call("inspect", tmp_path / "c", "--json").stdout)
    assert [t["name"] for t in listed["tensors"]] == list(names)
    assert listed["objects"] == {"note": "at :100: \x1b]0;owned"}
    text = call("inspect", tmp_path / "c").stdout
    assert "w:smile:x" in text
    assert "w[bold]y" in text
    assert "w\\x1b[2Jz" in text
    assert "at :100:" in text
    assert "\x1b" not in text
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    print_table(terminal, ("name",), [["w[bold]x:smile:"], ["a\x1b[2J"], ["lone \udc80"]])
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert "w[bold]x:smile:" in shown
    assert "a\\x1b[2J" in shown
    assert "lone \\udc80" in shown


@pytest.mark.fast_cases("arguments1")
@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", "{dcp}", "{dcp}", "--max-ulp", str(10**30)),
        ("convert", "{dcp}", "{new}", "--mapping", "decoder", "--axis", "d=" + "9" * 5000),
        ("convert", "{dcp}", "{new}", "--mapping", "decoder", "--axis", "headdim=7"),
    ],
)
def test_numbers_and_axes_beyond_reason_are_one_message(
    tmp_path: Path, dcp: Path, arguments: tuple[str]
) -> None:
    done = command(*(a.format(dcp=dcp, new=tmp_path / "new") for a in arguments))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_bytes_are_printed_as_json_too(tmp_path: Path) -> None:
    for name, value in (("a", b"\x00\xff"), ("b", b"other")):
        write(tmp_path / name, "dcp", {"w": np.zeros(2, np.float32)}, {("state",): {"pickled": value}})
    written = {"state": {"pickled": {"$bytes": "AP8="}}}
    assert json.loads(call("inspect", tmp_path / "a", "--json").stdout)["objects"] == written
    planned = call("convert", tmp_path / "a", tmp_path / "c", "--dry-run", "--json")
    assert json.loads(planned.stdout)["objects"] == written
    completed = call("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert completed.exit_code == 1
    assert json.loads(completed.stdout)["objects"][0][1:] == [
        {"pickled": {"$bytes": "AP8="}},
        {"pickled": {"$bytes": "b3RoZXI="}},
    ]


def test_a_relay_without_a_framework_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "flax" else find_spec(name))
    done = call("relay", "quick", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert re.search(
        r"flax cannot be imported: pip install '\.\[torch,jax,pictures\]'", " ".join(done.stderr.split())
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "status", "tolerance"),
    [
        (("--rtol", "1e-6"), 1, "0 ULP or rtol 1e-06"),
        (("--max-error", "1e-5"), 0, "0 ULP or an error of 1e-05"),
        (("--max-error", "1e-9"), 1, "0 ULP or an error of 1e-09"),
        (("--atol", "2e-4"), 0, "0 ULP or atol 0.0002"),
        (("--noise", "noise"), 0, "0 ULP or 4 times the noise"),
        (("--noise", "b"), 1, "0 ULP or 4 times the noise"),
    ],
)
def test_tolerances_on_whole_tensors_decide_the_status_of_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], status: int, tolerance: str
) -> None:
    monkeypatch.chdir(tmp_path)
    a = np.ones(100_000, np.float32)
    for name, index in (("a", 3), ("b", 4), ("noise", 5)):
        run = a.copy()
        run[index] += np.float32(1e-4)
        write(tmp_path / name, "dcp", {"w": run, "n": np.arange(3)}, {})
    shown = call("diff", "a", "b", *options)
    assert shown.exit_code == status
    assert f"the tolerance of {tolerance}\n" in shown.stdout
    assert re.search(rf"^{'no' if status else 'yes'} +w ", shown.stdout, re.M)
    assert json.loads(call("diff", "a", "b", "--json", *options).stdout)["within"] is not bool(status)


def test_the_spread_of_the_worst_tensors_is_shown_in_a_pipe_and_in_json(tmp_path: Path) -> None:
    a = np.ones(1000)
    b = a + np.where(np.arange(1000) < 10, 3e-4, 2e-9)
    b[500:] = 1
    write(tmp_path / "a", "dcp", {"w": a, "same": a}, {})
    write(tmp_path / "b", "dcp", {"w": b, "same": a}, {})
    assert "1e-09" not in call("diff", tmp_path / "a", tmp_path / "b").stdout
    done = command("diff", tmp_path / "a", tmp_path / "b", "--histogram")
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert (
        "w: relative differences: 50 % within 0.0e+00, 90 % within 2.1e-09, 99 % within 2.1e-09, "
        in done.stdout
    )
    assert f"\n      0  500  {'#' * 50}\n  1e-09  490  {'#' * 49}\n  1e-08    0\n" in done.stdout
    assert "\n  1e-04   10  #\n" in done.stdout
    tensors = json.loads(call("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["tensors"]
    (worst,) = (tensor for tensor in tensors if tensor["name"] == "w")
    assert worst["histogram"] == {
        "0": 500,
        "1e-09": 490,
        **{f"1e-0{k}": 0 for k in (8, 7, 6, 5)},
        "1e-04": 10,
    }
    assert [*worst["percentiles"]] == ["50", "90", "99", "99.9"]


@pytest.mark.parametrize("option", ["--rtol", "--atol", "--max-error"])
def test_a_tolerance_of_diff_that_is_no_number_is_one_message(dcp: Path, option: str) -> None:
    done = call("diff", dcp, dcp, option, "nan")
    assert done.exit_code == 2
    # The first is of typer's own check, which not all its versions apply to NaN.
    assert re.search("greater than or equal to 0|tolerances of 0 or more", " ".join(done.stderr.split()))
    assert call("diff", dcp, dcp, option, "-1").exit_code == 2


def test_a_noise_checkpoint_that_lacks_tensors_is_one_message(tmp_path: Path, dcp: Path) -> None:
    write(tmp_path / "b", "dcp", {"w": np.ones(2)}, {})
    done = call("diff", dcp, dcp, "--noise", tmp_path / "b")
    assert done.exit_code == 2
    assert "missing: model.embed.weight, " in " ".join(done.stderr.split())


def on_terminal(width: int, color: Literal["standard"] | None = None) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(
        file=screen, force_terminal=True, color_system=color, width=width, legacy_windows=False
    ), screen


def test_a_narrow_terminal_gets_the_first_columns_and_the_names_of_the_others() -> None:
    columns = ("fits", "policy", "peak", "weights", "moments")
    row = ("yes", "fsdp.toml", "9.02 GB", "4.02 GB", "")
    rest = "(widen the terminal, pipe to less -S, or use --json)"
    shown = {}
    for width in (60, 43, 30, 5):
        terminal, screen = on_terminal(width)
        print_table(terminal, columns, [row], left=2)
        table, _, left_out = screen.getvalue().partition("not")
        lines = [" ".join(line.split()) for line in table.splitlines()]
        shown[width] = lines, " ".join(left_out.split())
        assert width == 5 or max(map(len, screen.getvalue().splitlines())) <= width
    assert shown[60] == (["fits policy peak weights moments", "yes fsdp.toml 9.02 GB 4.02 GB"], "")
    assert shown[43] == (["fits policy peak weights moments", "yes fsdp.toml 9.02 GB 4.02 GB"], "")
    assert shown[30] == (
        ["fits policy peak", "yes fsdp.toml 9.02 GB"],
        f"shown in 30 columns: weights, moments {rest}",
    )
    assert shown[5][1] == f"shown in 5 columns: peak, weights, moments {rest}"
    pipe = io.StringIO()
    print_table(Console(file=pipe, width=30), columns, [row], left=2)
    assert [line.split("  ")[0] for line in pipe.getvalue().splitlines()] == ["fits", "yes"]
    assert "moments" in pipe.getvalue()


def test_names_fold_between_words_and_lose_no_letter() -> None:
    row = ("deepseek", "hf, torchtitan_unfused, maxtext_unscanned_0_2_4", "mistral, ministral, ministral3")
    for width in range(20, 100):
        terminal, screen = on_terminal(width)
        print_table(terminal, ("family", "conventions", "models"), [row], left=3)
        letters = "".join(sorted("".join(screen.getvalue().split())))
        assert letters == "".join(sorted("".join(("family", "conventions", "models", *row)).replace(" ", "")))
        if width >= len("deepseek  maxtext_unscanned_0_2_4  ministral3"):
            assert {"torchtitan_unfused,", "maxtext_unscanned_0_2_4", "ministral3"} <= set(
                screen.getvalue().split()
            )


def test_messages_break_between_words_on_a_terminal_only() -> None:
    path = "/a/path/that/is/longer/than/the/terminal"
    message = f"error: {path}: expected a file there, got nothing at all"
    terminal, screen = on_terminal(20)
    print_line(terminal, message)
    assert screen.getvalue().splitlines() == [
        "error:",
        f"  {path}:",
        "  expected a file",
        "  there, got nothing",
        "  at all",
    ]
    pipe = io.StringIO()
    print_line(Console(file=pipe, width=20), message)
    assert pipe.getvalue() == message + "\n"


def test_the_first_word_of_an_error_has_a_colour_that_people_can_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, screen = on_terminal(80, "standard")
    print_line(terminal, "error: no such file")
    assert screen.getvalue() == "\x1b[1;31merror: \x1b[0mno such file\n"
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, screen = on_terminal(80, "standard")
    print_line(terminal, "error: no such file")
    assert "31" not in screen.getvalue()
    for stream in (on_terminal(80), (Console(file=(pipe := io.StringIO())), pipe)):
        print_line(stream[0], "error: no such file")
        assert stream[1].getvalue() == "error: no such file\n"


def test_families_are_listed_with_their_conventions() -> None:
    result = call("families", "--json")
    assert result.exit_code == 0
    listed = {entry["family"]: entry for entry in json.loads(result.stdout)["families"]}
    assert set(listed) == set(family_names())
    assert listed["qwen3_moe"] == {
        "family": "qwen3_moe",
        "conventions": [
            *("torch", "hf", "megatron", "jax"),
            *("torchtitan", "torchtitan_unfused", "torchtitan_fused", "torchtitan_0_2"),
            *("maxtext", "maxtext_unscanned"),
        ],
        "axes": ["vocab", "d", "r"],
        "models": ["qwen3_moe"],
    }
    assert "torchtitan" in call("families").stdout
