"""Every example of `twinshard plan` in the documents and in its help exits 0."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.compiling.machines.targets import targets_named
from tests.support.compilers.worker import unavailable
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]
FILES = {
    "my_policy.toml": '[[unit]]\nmatch = "layers.*"\n[[unit]]\nmatch = ""\n',
    "fsdp_2d.toml": '[mesh]\ndp_outer = "all"\ndp = 2\n[[unit]]\nmatch = ""\n',
    "my_8b.toml": "[model]\nvocab_size = 272\nd_model = 64\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\n"
    "head_dim = 16\nd_ff = 128\n",
    "batch.toml": "tokens = { shape = [2, 17], dtype = 'int32' }\n",
    "llama/config.json": '{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "intermediate_size": 128, "rms_norm_eps": 1e-5}',
    "my/__init__.py": "",
    "my/gpt.py": """
from jax_impl.models import Decoder, DecoderConfig, next_token_loss


def GPT(*, rngs):
    return Decoder(DecoderConfig(d_model=64, n_layers=2, d_ff=128), rngs=rngs, stacked=STACKED)


def loss(model, batch):
    tokens = batch["tokens"]
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
""",
}


def examples() -> Iterator[str]:
    """Command lines, each once; those with placeholders in capitals or dots are none."""
    runner = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"})
    # Those of README.md are run by tests/test_readme.py.
    pages = [path for folder in ("start", "how-to") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    texts = [*(page.read_text() for page in pages), runner.invoke(app, ["plan", "--help"]).output]
    lines: dict[str, None] = {}
    for text in texts:
        # A long line goes on after a backslash.
        text = re.sub(r"\\\s*\n[\s│]*", "", text)
        for line in re.findall(r"^[\s│]*(twinshard plan [^#\n│]+)", text, re.MULTILINE):
            if "..." not in line and "MODEL" not in line:
                lines[line.strip()] = None
    yield from lines


def unrunnable(line: str) -> str | None:
    """Why a line cannot be run here."""
    words = shlex.split(line)
    if "--target" not in words:
        return None
    platforms = {target.platform for target in targets_named(words[words.index("--target") + 1])}
    return next((reason for platform in sorted(platforms) if (reason := unavailable(platform))), None)


EXAMPLES = list(examples())
SLOW = ("--target", "--compile", "--search")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6
    assert any("--compile" in line for line in EXAMPLES)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if any(word in line for word in SLOW) else ())
        for line in EXAMPLES
    ],
)
def test_every_example_exits_0(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := unrunnable(line):
        pytest.skip(reason)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("STACKED", str("--stacked" in line)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # The processes that compile look there, too.
    monkeypatch.setenv("PYTHONPATH", importing_from(tmp_path, ROOT)["PYTHONPATH"])
    for name in [module for module in sys.modules if module == "my" or module.startswith("my.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
