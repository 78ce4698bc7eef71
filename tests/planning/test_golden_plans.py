"""Exact numbers of plans: bytes at rest and at the peak by kind, collectives, warnings, and the report's text.

Slow tests hold plans to measured steps and to compiled programs (``test_plan_peak.py``, ``test_cost.py``,
``test_optimizers.py``). This test sees within seconds that a number changed. If the change is right, write the file
again: ``python -m tests.planning.test_golden_plans``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridge.commands.main import app

FILE = Path(__file__).with_name("golden") / "plans.json"
POLICIES = {
    "uneven": """
        [precision]
        main = "bfloat16"
        grad = "bfloat16"
        [[unit]]
        match = "layers.*"
        align = 1
        granularity = "tensor"
        [[unit]]
        match = ""
        strategy = "optim"
        """,
    "remainders": """
        [precision]
        compute = "bfloat16"
        store_param_remainders = true
        [[unit]]
        match = "layers.*"
        strategy = "optim_grads"
        recompute = true
        [[unit]]
        match = ""
        strategy = "optim_grads"
        """,
    "parts": """
        [mesh]
        dp_outer = 2
        dp = 6
        [[unit]]
        match = "layers.*.attention"
        strategy = "hfsdp"
        [[unit]]
        match = "layers.*"
        strategy = "hsdp"
        recompute = true
        [[unit]]
        match = ""
        strategy = "optim_grads"
        """,
}
CASES = (
    "no_shard zero1 zero2 fsdp --model llama3-8b --devices 1,3,8 --length 512",
    "fsdp_bf16 fsdp_mxfp8 --model llama3-8b --devices 7,64 --length 1024 --microbatches 1,3",
    "hsdp hfsdp mixture --model llama3-70b --devices 16 --node 4 --batch 2 --length 2048",
    "fsdp_tp --model llama3-8b --devices 16 --length 1024",
    "fsdp zero1 --model llama3-8b --devices 8 --length 256 --stacked layers --attention plain",
    "fsdp_bf16 --model mixtral-8x7b --devices 8,24 --length 512 --attention fused",
    "zero2 --model deepseek-v3 --devices 128 --length 512",
    "uneven remainders --model llama3-8b --devices 5 --length 512",
    "parts --model llama3-8b --devices 12 --length 512 --microbatches 2",
    "fsdp uneven --model llama3-8b --devices 8 --length 256 --offload 30%",
    "fsdp --model llama3-8b --devices 8 --length 256 --moments bfloat16,float8_e4m3fn --offload 100%",
    "fsdp --model llama3-8b --devices 8 --length 256 --optimizer sgd --frozen embed.*",
    "fsdp uneven --model llama3-8b --devices 8 --length 256 --optimizer sgd-momentum",
    "fsdp zero1 --model llama3-8b --devices 8 --length 256 --optimizer lion --frozen *_norm.*",
    "fsdp zero1 --model llama3-8b --devices 8 --length 256 --optimizer adafactor",
    "fsdp uneven --model llama3-8b --devices 8 --length 256 --optimizer muon --offload 50%",
    "no_shard hsdp --model llama3-8b --devices 8 --length 512 --memory 80GB --search",
)


def answered(case: str, folder: Path) -> Iterator[str]:
    """The lines of a plan's answer: one for each plan, then the text for people."""
    arguments = [f"{word}.toml" if word in POLICIES else word for word in case.split()]
    for name, text in POLICIES.items():
        (folder / f"{name}.toml").write_text(text)
    # A path would be as wide as the folder's.
    with contextlib.chdir(folder):
        results = [CliRunner().invoke(app, ["plan", *arguments, *more]) for more in (["--json"], [])]
    assert all(result.exit_code in (0, 1) for result in results), results[0].output
    document = json.loads(results[0].stdout)
    for plan in document.pop("plans"):
        yield json.dumps(plan | {"units": [_unit(unit) for unit in plan["units"]]}, sort_keys=True)
    yield json.dumps(document, sort_keys=True)
    yield from (line.rstrip() for line in results[1].stdout.splitlines())


def _unit(unit: dict[str, Any]) -> dict[str, Any]:
    paths = unit["paths"]
    return unit | {"paths": [paths[0], len(paths), paths[-1]]}


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_words_of_a_plan_are_as_they_were(case: str, tmp_path: Path) -> None:
    assert [*answered(case, tmp_path)] == json.loads(FILE.read_text(encoding="utf-8"))[case]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        answers = {case: [*answered(case, Path(scratch))] for case in CASES}
    FILE.write_text(json.dumps(answers, indent=0) + "\n", encoding="utf-8")
