"""`twinshard plan`: text, JSON, pictures, exit status, and one clear message for every error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

import jax_impl
import torch_impl
from bridge.commands.main import app
from bridge.planning import Workload, load_policy, make_plan, resolve_models


def with_blocks() -> nn.Module:
    """With layers of another name, in two places."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model.tops = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
    return model


def own_model() -> nn.Module:
    """With the layers that the shipped policies name."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    return model


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_help_shows_an_example() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert (
        "Example:\n    twinshard plan --example policies\n    twinshard plan fsdp_bf16 zero1 "
        in result.stdout
    )


def test_one_plan_is_shown_unit_by_unit() -> None:
    result = call("hfsdp", "--model", "llama3-8b", "--devices", "64", "--runtime", "torch")
    assert result.exit_code == 0, result.stderr
    plan = make_plan(resolve_models("llama3-8b")["torch"], load_policy("hfsdp"), 64, "torch", Workload())
    assert f"({plan.at_rest.total:,} B) at rest" in result.stdout
    assert "layers.0 ... layers.31 (32)" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["all-gather", "dp_outer", "32", "33"] in [row[:4] for row in rows]
    assert ["all-gather", "dp", "2", "66"] in [row[:4] for row in rows]
    assert ["reduce-scatter", "dp_outer", "32", "33"] in [row[:4] for row in rows]


def test_scanned_layers_hold_more_in_a_step() -> None:
    arguments = ("zero2", "--model", "decoder:default", "--length", "64", "--runtime", "jax", "--json")
    plain, scanned = (
        json.loads(call(*arguments, *more).stdout)["plans"][0] for more in ((), ("--stacked", "layers"))
    )
    assert scanned["at_rest"] == plain["at_rest"]
    assert scanned["peak"]["total"] > plain["peak"]["total"]


def test_a_comparison_names_the_cheapest_that_fits_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "plans.png"
    arguments = ("no_shard", "fsdp_bf16", "--model", "llama3-8b", "--devices", "8,64", "--memory", "80GB")
    result = call(*arguments, "--chart", picture)
    assert result.exit_code == 0, result.stderr
    assert "8 devices: fsdp_bf16.toml is the cheapest that fits" in result.stdout
    assert "64 devices: fsdp_bf16.toml is the cheapest that fits" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_that_fits_is_exit_status_1() -> None:
    result = call("fsdp", "--model", "llama3-405b", "--devices", "8", "--memory", "80GB")
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "8 devices: no policy fits in both runtimes; --runtime jax or torch asks for one" in words


def test_the_reserve_decides_what_fits() -> None:
    arguments = ("fsdp", "--model", "llama3-8b", "--devices", "8", "--runtime", "torch", "--memory")
    peak = json.loads(call(*arguments, "1TB", "--json").stdout)["plans"][0]["peak"]["total"]
    short = call(*arguments, f"{peak}B")
    assert (short.exit_code, "less 10 % of reserve" in short.stdout) == (1, True)
    assert call(*arguments, f"{peak}B", "--reserve", "0").exit_code == 0


def test_a_users_own_model_is_never_said_to_fit() -> None:
    model = f"{__name__}:own_model"
    arguments = ("fsdp", "--model", model, "--devices", "8", "--runtime", "torch", "--memory", "40MB")
    result = call(*arguments)
    assert result.exit_code == 1, result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("unknown "))
    assert row[1] == "fsdp.toml"
    assert "1 batch of any size and shape per device and step" in result.stdout
    assert "--batch and --length have no effect" in result.stdout
    assert "tokens" not in result.stdout
    assert "8 devices: unknown whether fsdp.toml fits" in result.stdout
    assert "cheapest" not in result.stdout
    document = json.loads(call(*arguments, "--json").stdout)
    assert document["plans"][0]["fits"] is None
    work = {"batch": 1, "length": 4096, "microbatches": 1}
    assert document["cheapest"] == [
        {"devices": 8, "workload": work, "policy": None, "unknown": ["fsdp.toml"]}
    ]
    assert call(*arguments[:-1], "200B").exit_code == 1
    assert "8 devices: no policy fits" in call(*arguments[:-1], "200B").stdout


def test_lists_of_lengths_and_microbatches_are_rows_of_one_table() -> None:
    arguments = ("fsdp", "zero2", "--model", "llama3-8b", "--devices", "8,16", "--runtime", "torch")
    lists = ("--length", "64,512", "--micro", "1,4", "--memory", "80GB")
    result = call(*arguments, *lists)
    assert result.exit_code == 0, result.stderr
    (heading,) = (line.split() for line in result.stdout.splitlines() if line.startswith("fits "))
    columns = [heading.index(name) for name in ("policy", "devices", "microbatches", "length")]
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[2:3] == ["torch"]]
    wanted = [
        (policy, devices, micro, length)
        for policy in ("fsdp.toml", "zero2.toml")
        for devices in ("8", "16")
        for micro in ("1", "4")
        for length in ("64", "512")
    ]
    assert [tuple(row[column] for column in columns) for row in rows] == wanted
    document = json.loads(call(*arguments, *lists, "--json").stdout)
    for plan, (policy, devices, micro, length) in zip(document["plans"], wanted, strict=True):
        options = ("--devices", devices, "--length", length, "--microbatches", micro, "--runtime", "torch")
        alone = json.loads(call(policy.split(".")[0], "--model", "llama3-8b", *options, "--json").stdout)
        assert plan["workload"] == alone["workload"] == alone["plans"][0]["workload"]
        assert (plan["peak"], plan["traffic"]) == (alone["plans"][0]["peak"], alone["plans"][0]["traffic"])
    assert len(document["cheapest"]) == 8
    assert "16 devices, 4 x 1 sequences of 512 tokens: zero2.toml is the cheapest that fits" in result.stdout
    assert "length" not in call(*arguments).stdout.split("policy ")[1].splitlines()[0]


def test_units_of_another_name() -> None:
    arguments = ("fsdp", "--model", f"{__name__}:with_blocks", "--runtime", "torch", "--json")
    assert "expected modules that 'layers.*' matches" in call(*arguments).stderr
    (plan,) = json.loads(call(*arguments, "--units", "blocks.*", "--units", "tops.*").stdout)["plans"]
    assert [unit["paths"] for unit in plan["units"]] == [
        ["blocks.0", "blocks.1"],
        ["tops.0", "tops.1", "tops.2"],
        [""],
    ]
    assert {unit["strategy"] for unit in plan["units"]} == {"optim_grads_params"}
    assert plan["policy"] == "fsdp.toml"


def test_the_devices_of_a_node() -> None:
    arguments = ("fsdp", "hsdp", "hfsdp", "--model", "llama3-8b", "--devices", "16,64", "--runtime", "torch")
    plans = json.loads(call(*arguments, "--node", 8, "--json").stdout)["plans"]
    assert [plan["mesh"] for plan in plans] == [
        {"dp": 16},
        {"dp": 64},
        *2 * [{"dp_outer": 2, "dp": 8}, {"dp_outer": 8, "dp": 8}],
    ]


def test_a_search_prints_and_saves_a_policy_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "found.toml"
    model = ("--model", "llama3-8b", "--attention", "fused", "--length", "2048")
    arguments = ("no_shard", *model, "--devices", "8", "--memory", "80GB")
    assert call(*arguments).exit_code == 1
    printed = call(*arguments, "--search")
    assert printed.exit_code == 0, printed.stderr
    assert (
        "no_shard.toml on 8 devices, 1 x 1 sequences of 2048 tokens: does not fit; with 1 change"
        in printed.stdout
    )
    rows = [line.split() for line in printed.stdout.splitlines()]
    assert ["no_shard.toml", "8", "torch", "none", ">", "16,384"] in rows
    saved = call(*arguments, "--search", "--save", path)
    assert saved.exit_code == 0, saved.stderr
    assert f"saved {path}" in saved.stdout
    text = path.read_text()
    assert text.rstrip() in printed.stdout
    assert text not in saved.stdout
    assert text.startswith(
        "# no_shard.toml with strategy optim_grads_params: found by twinshard plan --search\n"
    )
    assert jax_impl.ShardingPolicy.load(path).to_toml() == torch_impl.ShardingPolicy.load(path).to_toml()
    assert call(path, *arguments[1:]).exit_code == 0
    (searched,) = json.loads(call(*arguments, "--search", "--json").stdout)["search"]
    assert (searched["file"], searched["fits"]) == (text, False)
    assert searched["largest_batch"] == {"torch": 0, "jax": 0}
    assert searched["fewest_devices"]["torch"] == {"devices": None, "not_below": None}
    assert searched["ways"][0]["changes"] == ["strategy optim_grads_params"]
    assert json.loads(call(*arguments, "--json").stdout)["search"] is None


@pytest.mark.slow
def test_a_search_tells_how_to_compile_what_it_found() -> None:
    arguments = ("fsdp", "--model", "decoder:quick", "--devices", "8", "--memory", "5MB", "--length", 32)
    result = call(*arguments, "--runtime", "jax", "--search")
    assert result.exit_code == 0, result.stderr
    assert (
        "twinshard plan FILE --model decoder:quick --batch 1 --length 32 --microbatches 1 --memory 5MB --target h100:8"
        in result.stdout
    )
    result = call("fsdp", "--model", "llama3-405b", "--memory", "80GB", "--runtime", "jax", "--search")
    assert result.exit_code == 1
    assert "no set of changes is known to fit; the lowest peak is" in result.stdout


def test_an_optimizer_that_one_runtime_lacks_is_planned_for_the_other() -> None:
    arguments = ("fsdp", "--model", "llama3-8b", "--optimizer", "lion", "--frozen", "embed.*", "--json")
    document = json.loads(call(*arguments).stdout)
    assert [plan["runtime"] for plan in document["plans"]] == ["jax"]
    assert document["refused"] == ["torch: lion: torch.optim has none"]
    assert document["frozen"] == 128256 * 4096
    assert document["optimizer"] == {"name": "lion", "moments": [None, None], "offload": 0.0}
    (plan,) = document["plans"]
    trained = document["parameters"] - document["frozen"]
    assert plan["at_rest"]["moments"] == pytest.approx(4 * trained / 8, rel=0.001)
    text = call(*arguments[:-1])
    assert "torch: lion: torch.optim has none" in text.stdout
    assert "frozen: 525,336,576 parameters" in text.stdout


def test_the_document_is_complete() -> None:
    result = call(
        "fsdp",
        "zero1",
        "--model",
        "decoder:default",
        "--devices",
        "4,8",
        "--memory",
        "1GiB",
        "--length",
        64,
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert (document["format"], document["version"], document["memory"]) == ("twinshard.plan", 1, 2**30)
    assert document["workload"] == {"batch": 1, "length": 64, "microbatches": 1}
    keys = [(plan["policy"], plan["devices"], plan["runtime"]) for plan in document["plans"]]
    assert sorted(keys) == sorted(
        (p, n, r) for p in ("fsdp.toml", "zero1.toml") for n in (4, 8) for r in ("torch", "jax")
    )
    for plan in document["plans"]:
        parts = {part: size for part, size in plan["at_rest"].items() if part != "total"}
        assert sum(parts.values()) == plan["at_rest"]["total"]
        assert sum(plan["peak"]["terms"].values()) == plan["peak"]["total"]
        assert sum(entry["wire_bytes"] for entry in plan["traffic"]) == pytest.approx(
            plan["wire_bytes"], abs=2
        )
        assert (
            sum(len(unit["paths"]) * unit["parameters"] for unit in plan["units"]) == document["parameters"]
        )
        for part in (*parts, "total"):
            held = sum(len(unit["paths"]) * unit["at_rest"][part] for unit in plan["units"])
            assert held == plan["at_rest"][part]
        calls = sum(entry["calls"] for entry in plan["traffic"])
        assert calls == sum(
            len(unit["paths"]) * entry["calls"] for unit in plan["units"] for entry in unit["traffic"]
        )
        assert plan["fits"] is True
    assert {choice["devices"]: choice["policy"] for choice in document["cheapest"]} == {
        4: "zero1.toml",
        8: "zero1.toml",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fsdp", "--model", "llama9"), "expected decoder:CONFIG"),
        (("no_such_policy", "--model", "llama3-8b"), "no_such_policy: expected a TOML file or one of fsdp"),
        (("fsdp", "--model", "llama3-8b", "--devices", "eight"), "expected numbers such as 8,64,512"),
        (("fsdp", "--model", "llama3-8b", "--memory", "lots"), "expected an amount such as 80GB"),
        (("fsdp", "--model", "llama3-8b", "--memory", "80"), "an amount with its unit, got '80'; write 80GB"),
        (
            ("hsdp", "--model", "llama3-8b", "--node", "8", "--devices", "8,12"),
            "--node: expected numbers of devices that 8 divides, got 12",
        ),
        (("fsdp", "--model", "llama3-8b", "--node", "8"), "--node: expected a policy with two mesh axes"),
        (
            ("mixture", "--model", "llama3-8b", "--units", "blocks.*"),
            "one [[unit]] in addition to the root's, got 'lay",
        ),
        (
            ("fsdp", "--model", "llama3-8b", "--units", ""),
            "--units: expected patterns such as 'blocks.*', got ''",
        ),
        (("fsdp", "--model", "llama3-8b", "--units", "a..b"), "--units: match: expected a dotted path"),
        (("fsdp", "--model", "llama3-8b", "--length", "64;8"), "length: expected numbers such as 8,64,512"),
        (("fsdp", "--model", "llama3-8b", "--micro", "0"), "microbatches: expected numbers such as 8,64,512"),
        (("fsdp", "--model", "llama3-8b", "--reserve", "10"), "got '10'; write 10%"),
        (("hsdp", "--model", "llama3-8b", "--devices", "3"), "expected axes of 3 devices"),
        (("fsdp", "--model", "llama3-8b", "--chart", "x.doc"), "x.doc"),
        (
            ("fsdp", "--model", "llama3-8b", "--stacked", "blocks"),
            "expected a stack with layers, got 'blocks'",
        ),
        (
            ("fsdp", "--model", "tests.commands.test_plan:own_model", "--compile"),
            "expected decoder:CONFIG, a config.json or a built-in shape",
        ),
        (("fsdp", "--model", "llama3-8b", "--compile", "--attention", "fused"), "run plain attention"),
        (("fsdp", "--model", "deepseek-v3", "--compile"), "got one with latent attention"),
        (("fsdp", "--model", "decoder:quick", "--attention", "fused"), "its own code, which runs plain"),
        (("fsdp", "--model", "no/such/config.json"), "no/such/config.json: expected a config.json"),
        (("fsdp", "--model", "llama3-8b", "--search"), "--search: expected --memory SIZE"),
        (("fsdp", "--model", "llama3-8b", "--save", "x.toml"), "--save: expected --search"),
        (
            ("fsdp", "--model", "decoder:quick", "--memory", "1GB", "--search", "--target", "h100:8"),
            "--search: expected no --target",
        ),
        (
            ("fsdp", "zero1", "--model", "llama3-8b", "--memory", "1TB", "--search", "--save", "x.toml"),
            "--save: expected one policy, one number of devices and one workload, got 2 searches",
        ),
        (
            ("fsdp", "--model", "llama3-8b", "--frozen", "head.*"),
            "--frozen: expected patterns of parameter paths",
        ),
        (
            ("fsdp", "--model", "decoder:quick", "--frozen", "embed.*", "--compile"),
            "--compile: expected no --frozen",
        ),
        (
            ("fsdp", "--model", "decoder:quick", "--offload", "100%", "--compile"),
            "--compile: expected no --offload",
        ),
        (
            ("fsdp", "--model", "llama3-8b", "--optimizer", "lion", "--runtime", "torch"),
            "torch: lion: torch.optim has none",
        ),
    ],
)
def test_errors_are_one_message_and_exit_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_an_escape_sequence_in_a_policys_name_does_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m.toml"
    path.write_text('[[unit]]\nmatch = ""\n')
    result = call(path, "--model", "llama3-8b", "--runtime", "torch")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--engine", "both"),
            "--engine: expected --target NAME,... with --engine, got --engine both alone",
        ),
        (("--compile", "--target", "h100:8"), "--compile: expected no --target"),
        (("--compile", "--runtime", "torch"), "--compile: expected --runtime jax or none"),
        (("--length", "9999999999"), "each from 1 to 999999999"),
        (("--memory", "0GB"), "memory: expected at least one byte"),
        (
            ("--memory", "80GB", "--search", "--save", "none/x.toml"),
            "--save: expected a file in a folder that",
        ),
    ],
)
def test_options_without_effect_and_numbers_without_sense_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    result = call("fsdp", "--model", "llama3-8b", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected JSON"), ('{"a": ', "expected JSON"), ("[1]", "expected a table of names and values")],
)
def test_a_broken_configuration_is_told_as_such(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    result = call("fsdp", "--model", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_a_search_names_the_command_that_compiles_a_built_in_model() -> None:
    arguments = ("--devices", "64", "--memory", "800GB", "--search")
    assert "--model llama3-8b --batch 1 " in call("fsdp", "--model", "llama3-8b", *arguments).stdout
    assert "deepseek-v3 cannot be compiled" in call("fsdp", "--model", "deepseek-v3", *arguments).stdout


def test_a_policy_that_cannot_be_saved_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "mine.toml"
    saved.write_text("old", encoding="utf-8")

    def full(path: Path, *_: object, **__: object) -> None:
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    arguments = ("--model", "llama3-8b", "--memory", "800GB", "--search", "--save", saved)
    assert call("fsdp", *arguments).exit_code == 2
    assert saved.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_search_says_no_where_even_lower_bounds_are_above_the_memory() -> None:
    arguments = ("fsdp", "--model", "tests.commands.test_plan:own_model", "--devices", "2", "--search")
    small, large = (call(*arguments, "--memory", memory) for memory in ("10B", "80GB"))
    assert (small.exit_code, large.exit_code) == (1, 1)
    assert "no set of changes fits; the fewest bytes at rest are" in small.stdout
    assert "unknown, because the peak is incomplete" in large.stdout


@pytest.mark.parametrize(
    ("runtime", "model", "more"),
    [
        ("jax", "decoder:quick", ()),
        ("torch", "decoder:quick", ()),
        ("torch", "tests.commands.test_plan:own_model", ()),
        ("torch", "decoder:quick", ("--frozen", "layers.0.*")),
        ("jax", "decoder:quick", ("--optimizer", "muon")),
    ],
)
def test_between_the_bytes_at_rest_and_the_peak_the_answer_is_unknown(
    runtime: str, model: str, more: tuple[str, ...]
) -> None:
    """Table, text, JSON and exit status say one thing: a device may hold less."""
    arguments = ("fsdp", "--model", model, "--devices", "2", "--runtime", runtime, "--reserve", "0", *more)
    (plan,) = json.loads(call(*arguments, "--json").stdout)["plans"]
    rest, peak = plan["at_rest"]["total"], plan["peak"]["total"]
    assert plan["peak"]["least"] == rest < peak
    for memory, fits, words in (
        (rest - 1, False, "no policy fits"),
        ((rest + peak) // 2, None, "unknown whether fsdp.toml fits: run one step of each and measure"),
    ):
        result = call(*arguments, "--memory", f"{memory}B")
        assert result.exit_code == 1
        assert words in result.stdout
        document = json.loads(call(*arguments, "--memory", f"{memory}B", "--json", "--search").stdout)
        assert [plan["fits"] for plan in document["plans"]] == [fits]
        assert [answer["fits"] for answer in document["search"]] == [fits]
        assert document["cheapest"][0]["unknown"] == ([] if fits is False else ["fsdp.toml"])
        largest = document["search"][0]["largest_batch"][runtime]
        assert largest == (0 if fits is False else None)
