"""All that commands print: of reports with every fact or with none, and just below and above each limit.

If a change of a text is right, write the file again: ``python -m tests.commands.test_printed_texts``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff_report import DiffReport, TensorDiff
from bridge.checkpoints.compare.ulp import Difference, Place, Tolerance
from bridge.checkpoints.convert.conversion import ConvertReport
from bridge.checkpoints.jobs.array_jobs import PartReport
from bridge.checkpoints.jobs.pieces import ConversionPiece, PartEstimate, PartPlan
from bridge.checkpoints.verify.verify_report import NotFinite, Problem, VerifyReport
from bridge.commands import convert, convert_parts, diff, inspect, verify
from bridge.commands.main import app
from bridge.commands.output import Console, print_line
from bridge.commands.plan_search import _how_to_check, options_to_repeat
from bridge.compiling import compiled
from bridge.compiling.compiled import CompiledCheck, Line
from bridge.parity.compare import parity as parity_run
from bridge.planning import Workload
from bridge.planning.answers.search import FewestDevices, Finding, LargestBatch, Nearest, Way
from bridge.planning.answers.search_report import answers
from bridge.relay import relay
from tests.support import golden

FILE = Path(__file__).with_name("golden") / "printed.json"
OUT = Console()


def tensor(number: int, **more: Any) -> TensorDiff:
    far = Place((number, 1), "1.0", "9.0")
    near = replace(far, b="1.5") if number % 3 else far
    difference = Difference(6, 2, number % 2, 1, number, 0.5, 0.25, 1.0, near, far if number % 5 else None)
    spread: Any = {"percentiles": {"50": 0.0, "90": 0.25}, "histogram": {"0": 40, "1e-01": 3}}
    fields = {"dtype_a": "float32", "dtype_b": "float32", "relative": number / 8, "within": False, **spread}
    return TensorDiff(f"w{number}", (3, 2), "float32", difference, **{**fields, **more})


EQUAL = replace(tensor(0), name="equal", difference=Difference(2), within=True)
VALUES = tuple((f"lr{number}", number, -number) for number in range(21))
EMPTY = DiffReport("a", "b", Tolerance(), (), (), (), (), (), (), (), ())
DIFFERENT = replace(
    EMPTY,
    tolerance=Tolerance(1, 0.1, 0.2, 0.3),
    tensors=(EQUAL, *map(tensor, range(1, 22))),
    missing=("x", "y"),
    extra=("z",),
    mismatched=(("m", "shape (2,) in a, (3,) in b"),),
    objects=VALUES,
    unreadable=(("odd", "pickled"),),
    objects_missing=("only.a", "told"),
    objects_extra=("only.b",),
    structure=(("told", "None in a, not in the tree of b"),),
    left_alone={"old.bin": "another model"},
)
WITHIN = tensor(1, within=True, noise=2.5), tensor(2, within=True, dtype_b="bfloat16")
NOISY = replace(DIFFERENT, tensors=WITHIN, tolerance=Tolerance(), noise="n", objects=(), structure=())


def differences(report: DiffReport, **listed: bool) -> None:
    diff._print_tensors(OUT, report, diff.ListingOptions(**listed))
    diff._print_rest(OUT, report, diff.ListingOptions(**listed))
    diff._print_verdict(OUT, report)


ODD = tuple(NotFinite(f"w{number}", number, 2) for number in range(21))
PROBLEMS = Problem("w", "CRC"), Problem("v", "short")
WHOLE = VerifyReport("c", "dcp", True, True, (), 1.5, 3, 4, 1, 5000, 5000)
DAMAGED = replace(
    *(WHOLE,), manifest=False, problems=PROBLEMS, protected=2000, not_finite=ODD, unread=("p", "q"),
    damaged=("w", "v"), left_alone={"old.bin": "another model"},
)  # fmt: skip
RUINED = replace(WHOLE, protected=None, damaged=("a", "b", "c"), problems=PROBLEMS, not_finite=ODD[:20])
CLOSED = replace(WHOLE, opened=False, problems=PROBLEMS[:1], error=ValueError("no index"))
PIECES = tuple(ConversionPiece(f"w{number}", 0, number, 1000 * number) for number in range(21))
ESTIMATES = [
    PartEstimate(number, 2, 3000 * number, 4000, 500, 64 << 20, 8000, 1.4, 2.6, 2.6, 2500.4, "storage")
    for number in range(1, 19)
]
PART = PartReport(Path("d"), 1, 3, 2, 5000, 1000, False, {"w": 3}, (2, 3), False, 2.0)
COMMITTED = replace(PART, missing=(), committed=True)
REPORT = ConvertReport("s", "d", "dcp", "orbax", 2, 1, 5000, 0, (), {"v": 1}, (), True, 2.0)


def conversion(**fields: Any) -> Any:
    dtypes = {name: SimpleNamespace(name=name) for name in ("float32", "bfloat16")}
    outputs = {
        name: SimpleNamespace(
            name=name, dtype=dtypes[dtype], is_cast=dtype == "bfloat16", sources=sources, shape=(2, 3), nbytes=24,
            planned=SimpleNamespace(dtype=dtypes["float32"]),
        )
        for name, dtype, sources in (("a", "float32", "x"), ("b", "bfloat16", "xyz"), ("c", "float32", ""))
    }  # fmt: skip
    files = SimpleNamespace(files=fields.pop("files", {}))
    nothing: dict[str, Any] = {"objects": {}, "conventions": None, "left_alone": {}, "filled": {}}
    nothing |= {"left_out": (), "inexact": (), "remarks": (), "companions": files}
    known = {"source": "s", "source_format": "dcp", "format": "orbax", "nbytes": 72, "outputs": outputs}
    return SimpleNamespace(**{**known, **nothing, **fields})


EVERYTHING: dict[str, Any] = {
    **{"objects": {"lr": (("lr",), 0.5)}, "conventions": ("hf", "flax"), "left_alone": {"old.bin": "odd"}},
    **{"filled": {"count": "3"}, "left_out": tuple("abcdefg"), "inexact": ("b",), "remarks": ("tied",)},
    "files": {"config.json": 1},
}
POLICY: Any = SimpleNamespace(source="fsdp.toml", to_toml=lambda: "[mesh]\n")
BATCHES = LargestBatch("jax", None), LargestBatch("torch", 7)
FEWEST = FewestDevices("jax", None), FewestDevices("torch", 4, 2)
SEARCHED = Finding(POLICY, 8, Workload(2, 16), "2 x 16", BATCHES, FEWEST, False)
WAY = Way(("compute in bfloat16", "recompute layers.*"), POLICY, 5000, 7000, BATCHES)
NEAREST = Nearest(WAY.changes, POLICY, 5000, "upper", FEWEST)
UNKNOWN = replace(NEAREST, bound="lower", above=False)
FINDINGS = (
    *(
        SEARCHED,
        replace(SEARCHED, fits=True),
        replace(SEARCHED, ways=(WAY,)),
        replace(SEARCHED, ways=(WAY,) * 5),
    ),
    replace(
        SEARCHED, fits=None, ways=(replace(WAY, changes=("x",)),) * 6, batches=(LargestBatch("jax", 0),) * 2
    ),
    *(replace(SEARCHED, nearest=nearest) for nearest in (NEAREST, replace(NEAREST, bound="lower"), UNKNOWN)),
    replace(
        SEARCHED,
        workload=Workload(2, 16, 3),
        fewest=(FewestDevices("jax", None, 5), FewestDevices("torch", 4)),
    ),
)


def searches() -> None:
    for finding in FINDINGS:
        print(finding.summary(), *finding.table(), sep="\n")
    print(*answers(FINDINGS), *answers(FINDINGS[:1]), sep="\n")
    for memory, reserve, optimizer, listed in (("80GB", "5%", "lion", ["a b"]), (None, "10%", "adamw", None)):
        asked: Any = SimpleNamespace(
            memory=memory,
            reserve=reserve,
            optimizer=optimizer,
            moments=memory,
            offload=memory,
            frozen=listed,
            stacked=listed,
        )
        for model, saved in (("my model", None), ("llama3-8b", Path("a b")), ("deepseek-v3", None)):
            print(_how_to_check(SEARCHED, model, saved, options_to_repeat(asked, asked)))


def on_terminal() -> None:
    terminal = Console(force_terminal=True, width=40, color_system=None)
    print_line(terminal, "few words  ")
    summary: Any = SimpleNamespace(
        summary=lambda: "title", tensors=(), left_alone={"old.bin": "odd"}, key_types={"rng": "fry"}, objects={},
        unreadable={"w": "pickled"}, certificate=None,
    )  # fmt: skip
    inspect._print(terminal, summary, inspect.DrawingOptions())


def report_of(*failures: str, complete: bool = True) -> Any:
    return SimpleNamespace(
        as_dict=lambda: {"ran": True}, table=lambda: [("leg", "a", "b", "c", "d"), ("torch", "1.5", "1", "2", "3")],
        summary=lambda: "summary", failures=lambda: list(failures), same=not failures, complete=complete,
        remarks=lambda: ["a remark"], conclusion=lambda: "the conclusion",
    )  # fmt: skip


def called(line: str, report: Any = None) -> None:
    """Run a command whose work is done by something that notes its arguments."""

    def check(model: str, policy: Any, devices: int, work: Workload, *more: Any) -> CompiledCheck:
        print("compiles", model, policy.source, devices, work, *more)
        figures = Line("calls", 5, 5, True), Line("peak", 90, 100, work.length == 8), Line("size", 1, 2, None)
        return CompiledCheck(policy.source, devices, work, figures)

    def train(config: Any, folder: Path, console: Console) -> Any:
        print("trains", len(config.legs), config.repeats, folder, console.stderr)
        return report

    def compare(file: Path, say: Callable[[str], None]) -> Any:
        say(f"compares {file}")
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "check_compiled", check)
        patch.setattr(relay, "run", train)
        patch.setattr("time.strftime", lambda text: text)
        patch.setattr("bridge.parity.compare.run_file.RunFile.load", lambda path: path)
        patch.setattr(parity_run, "compare_run_file", compare)
        patch.setattr(parity_run, "write_report", lambda _, folder: print(f"writes {folder}"))
        result = CliRunner().invoke(app, line.split())
    print(result.exit_code, result.stdout, result.stderr, sep="\n")


PLAN = "plan fsdp zero1 --model llama3-8b --runtime jax --devices 2 --stacked layers --compile --length 8"
CASES: dict[str, Callable[[], None]] = {
    "diff": partial(differences, DIFFERENT, histogram=True),
    "diff all": partial(differences, DIFFERENT, all_=True),
    "diff at limits": partial(
        differences, replace(DIFFERENT, tensors=DIFFERENT.tensors[:21], objects=VALUES[:20])
    ),
    "diff noisy": partial(differences, NOISY),
    "diff apart": partial(differences, replace(NOISY, tensors=())),
    "diff of nothing": partial(differences, EMPTY),
    "diff of equals": partial(differences, replace(EMPTY, tensors=(EQUAL,))),
    "verify": partial(verify._print, OUT, WHOLE),
    "verify damaged": partial(verify._print, OUT, DAMAGED),
    "verify ruined": partial(verify._print, OUT, RUINED),
    "verify closed": partial(verify._print, OUT, CLOSED),
    "verify json": partial(verify._print_json, OUT, WHOLE),
    "verify closed json": partial(verify._print_json, OUT, CLOSED),
    "pieces": partial(convert_parts._print_pieces, OUT, PartPlan(((), PIECES)), 2),
    "pieces at limit": partial(convert_parts._print_pieces, OUT, PartPlan((PIECES[:20],)), 1),
    "parts": partial(convert_parts._print_parts, OUT, ESTIMATES, 18),
    "parts at limit": partial(convert_parts._print_parts, OUT, ESTIMATES[:16], 1),
    "part": partial(convert_parts._print_part, PART, json=False),
    "part json": partial(convert_parts._print_part, PART, json=True),
    "part before": partial(convert_parts._print_part, replace(PART, found=True, missing=()), json=False),
    "part that commits": partial(convert_parts._print_part, COMMITTED, json=False),
    "part of a whole": partial(convert_parts._print_part, replace(COMMITTED, whole=REPORT), json=False),
    "dry run": partial(convert._print_plan, OUT, conversion(), "/"),
    "dry run of all": partial(convert._print_plan, OUT, conversion(**EVERYTHING), "/none/below/d"),
    "searches": searches,
    "terminal": on_terminal,
    "plan": partial(
        called, "plan hfsdp --model llama3-8b --devices 16 --runtime torch --length 512 --micro 2"
    ),
    "relay": partial(called, "relay quick --repeats 2", report_of()),
    "relay failed": partial(called, "relay --out folder", report_of("a hop", "a loss")),
    "relay json": partial(called, "relay quick --json", report_of()),
    "parity": partial(called, "parity a.toml", report_of()),
    "parity strict": partial(called, "parity a.toml --out folder --strict", report_of(complete=False)),
    "parity different": partial(called, "parity a.toml", report_of("a bug", complete=False)),
    "parity json": partial(called, "parity a.toml --json", report_of(complete=False)),
    "compile": partial(called, f"{PLAN},16 --moments bf16 --attention plain"),
    "compile as planned": partial(called, PLAN),
}


def said(case: str) -> list[str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        CASES[case]()
    return out.getvalue().splitlines()


@pytest.mark.parametrize("case", CASES)
def test_a_command_prints_what_it_printed(case: str) -> None:
    assert said(case) == golden.kept(FILE, case)


if __name__ == "__main__":
    golden.write(FILE, {case: partial(said, case) for case in CASES})
