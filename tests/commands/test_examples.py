"""``--example`` of the commands: each example is written as it ships, and runs as its README says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.examples.write import FILES, write_example
from bridge.relay.config import BUILT_IN, ConfigError, RelayConfig
from jax_impl.models import CausalLMConfig
from tests.support.bridge.example_checkpoints import CHECKPOINTS, write_checkpoints

EXAMPLES = ("convert", "parity", "plan", "relay")


def call(*arguments: object) -> Result:
    words = [*map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["twinshard", *words])
        return CliRunner().invoke(app, words)


def commands(text: str) -> list[list[str]]:
    """The command lines of a README, without the name of the program."""
    lines = re.findall(r"^    twinshard (.+)$", text, re.MULTILINE)
    assert lines
    return [shlex.split(line) for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_is_written_as_it_ships_and_says_what_to_run(command: str, here: Path) -> None:
    first = call(command, "--example", "one")
    assert (first.exit_code, first.stderr) == (0, "")
    assert first.stdout.strip() == (here / "one" / "README.md").read_text().strip()
    (here / "an empty one").mkdir()
    second = call(command, "--example", "an empty one", "--json")
    assert second.exit_code == 0
    told = json.loads(second.stdout)["example"]
    assert told["folder"] == "an empty one"
    assert all(any(word.startswith("an empty one/") for word in line) for line in commands(told["text"]))
    shipped = contents(FILES / command)
    for folder in ("one", "an empty one"):
        written = contents(here / folder)
        assert set(written) == set(shipped)
        assert [name for name in written if written[name] != shipped[name]] == ["README.md"]
        assert b"{folder}" not in written["README.md"]


@pytest.mark.parametrize("command", EXAMPLES)
def test_arguments_that_an_example_would_ignore_are_refused(command: str, here: Path) -> None:
    result = call(command, "--example", "new", "other")
    assert result.exit_code == 2
    assert "--example" in result.stderr
    assert "expected a folder and no other arguments, got other" in " ".join(result.stderr.split())
    assert [*here.iterdir()] == []


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_replaces_nothing(command: str, here: Path) -> None:
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("mine")
    (here / "file").write_text("mine")
    for target, expected in (
        ("full", "full exists already: expected a new or an empty folder for --example"),
        ("file", "file exists already: expected a new or an empty folder for --example"),
        ("no/folder", f"{here / 'no'} does not exist: expected the directory for no/folder"),
    ):
        result = call(command, "--example", target)
        assert result.exit_code == 2
        assert expected in " ".join(result.stderr.split())
    assert contents(here) == {"full/mine.txt": b"mine", "file": b"mine"}


def test_proposals_of_the_shell_write_no_example(here: Path) -> None:
    environment = {
        "_TWINSHARD_COMPLETE": "complete_bash",
        "COMP_WORDS": "twinshard relay --example new q",
        "COMP_CWORD": "4",
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="twinshard")
    assert done.stdout.split() == ["quick"]
    assert contents(here) == {}


def test_the_checkpoints_of_convert_are_those_that_their_generator_makes(tmp_path: Path) -> None:
    """After a change of a format: ``python -m tests.support.bridge.example_checkpoints``."""
    write_checkpoints(tmp_path)
    for name in CHECKPOINTS:
        made, shipped = contents(tmp_path / name), contents(FILES / "convert" / name)
        assert set(made) == set(shipped)
        assert [file for file in made if made[file] != shipped[file]] == []


def test_the_example_of_convert_has_what_a_model_and_its_way_there_and_back_need(here: Path) -> None:
    """The notes of a conversion are one line; a way back from another program's save says what it lost."""
    write_example("convert", "ck")
    fields = json.loads((here / "ck" / "torch" / "config.json").read_text())
    assert CausalLMConfig.from_hf(fields).norm_eps == 1e-5
    assert call("convert", "ck/torch", "ck/jax", "--mapping", "llama").exit_code == 0
    told = call("inspect", "ck/jax", "--depth", 2).stdout.splitlines()
    assert "twinshard/places: the places of hf, for the way back (--json prints them)" in told
    back = call("convert", "ck/jax", "ck/back", "--mapping", "llama")
    assert (back.exit_code, "at the root" in back.stdout) == (0, False)
    with open_checkpoint("ck/jax") as reader:
        tree = {tensor.path: reader.read(name) for name, tensor in reader.tensors.items()}
    with create_checkpoint("ck/other", "orbax") as writer:
        for path, array in tree.items():
            name = writer.add_tensor(path, array.shape, array.dtype).name
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
    words = ("--mapping", "llama", "--into", "hf", "--axis", "d=4")
    state = call("convert", "ck/other", "ck/again", *words, "--to", "dcp").stdout
    assert (
        "note: the weights are at the root, without model in front of their names: load them by dcp.load({**w"
        in state
    )
    weights = call("convert", "ck/other", "ck/hf", *words, "--to", "safetensors", "--weights-only").stdout
    assert "note: no config.json went along, and from_pretrained needs it" in weights
    assert "at the root" not in weights
    shutil.copy("ck/torch/config.json", "ck/other")
    weights = call("convert", "ck/other", "ck/whole", *words, "--to", "safetensors", "--weights-only").stdout
    assert "note: no config.json" not in weights


def test_the_example_of_convert_finds_the_matrix_that_was_not_transposed(here: Path) -> None:
    *right, wrong = commands(write_example("convert", "ck"))
    for line in right:
        assert call(*line).exit_code == 0
    found = call(*wrong, "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    differing = [tensor["name"] for tensor in report["tensors"] if not tensor["within"]]
    assert differing == ["params.layers.1.attention.out.kernel"]
    assert f"The command names {differing[0]}." in (here / "ck" / "README.md").read_text()


def test_the_example_of_plan_has_a_policy_that_does_not_fit_and_says_how_it_fits(here: Path) -> None:
    compare, search = commands(write_example("plan", "p"))
    result = call(*compare, "--json")
    assert result.exit_code == 0
    fits = {(plan["policy"], plan["runtime"]): plan["fits"] for plan in json.loads(result.stdout)["plans"]}
    assert fits == {
        (f"p/{name}.toml", runtime): name == "fsdp"
        for name in ("ddp", "fsdp")
        for runtime in ("torch", "jax")
    }
    assert call(*search).exit_code == 0
    saved = call("plan", "p/mine.toml", *compare[3:], "--json")
    assert {plan["fits"] for plan in json.loads(saved.stdout)["plans"]} == {True}


def test_examples_of_convert_and_plan_need_no_framework(here: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'jax', 'jaxlib', 'flax', 'optax', 'matplotlib']))\n"
        "from typer.testing import CliRunner\n"
        "from bridge.commands.main import app\n"
        "def call(*words): assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "call('convert', '--example', 'c')\n"
        "call('convert', 'c/torch', 'c/jax', '--mapping', 'llama')\n"
        "call('plan', '--example', 'p')\n"
        "call('plan', 'p/ddp.toml', 'p/fsdp.toml', '--model', 'llama3-8b', '--memory', '80GB')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def correct(folder: Path) -> None:
    """Change the line of the port that the README names to the one that it shows."""
    text = (folder / "README.md").read_text()
    number = int(re.search(r"jax_model.py and change line (\d+) to", text)[1])
    (line,) = re.findall(r"^    (self\..*)$", text, re.MULTILINE)
    port = (folder / "jax_model.py").read_text().splitlines()
    assert port[number - 1].strip().partition("=")[0] == line.partition("=")[0]
    port[number - 1] = f"        {line}"
    (folder / "jax_model.py").write_text("\n".join(port) + "\n")


@pytest.mark.slow
def test_the_example_of_parity_names_its_mistake_and_passes_once_that_is_corrected(here: Path) -> None:
    ((*line,),) = commands(write_example("parity", "port"))[:1]
    environment_of_a_user = [sys.executable, "-m", "bridge.commands.main", *line]
    found = subprocess.run(environment_of_a_user, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1, found.stderr
    assert "first diverge in mlp_norm (LayerNorm)" in found.stdout
    assert "torch: layer norm, epsilon 1e-05; JAX: layer norm, epsilon 1e-06" in found.stdout
    correct(here / "port")
    corrected = subprocess.run(
        [*environment_of_a_user[:-1], "port/again"], capture_output=True, text=True, timeout=300
    )
    assert corrected.returncode == 0, corrected.stdout


def epsilons(port: Any) -> tuple[float, float]:
    return port.attention_norm.epsilon, port.mlp_norm.epsilon


def test_the_example_of_parity_differs_in_the_epsilon_of_one_norm_alone(here: Path) -> None:
    """The models are built, and nothing is compared."""
    from bridge.parity.compare.run_file import RunFile

    write_example("parity", "port")
    run = RunFile.load("port/run.toml")
    with run.importing():
        assert run.build("torch").mlp_norm.eps == 1e-5
        assert epsilons(run.build("jax")) == (1e-5, 1e-6)
    for name in ("torch_model", "jax_model"):
        del sys.modules[name]
    correct(here / "port")
    with run.importing():
        assert epsilons(run.build("jax")) == (1e-5, 1e-5)
    del sys.modules["jax_model"]


def test_the_help_of_relay_names_every_built_in_relay() -> None:
    text = " ".join(call("relay", "--help").stdout.split())
    names = [file.stem for file in BUILT_IN.glob("*.toml")]
    assert re.search(r"built-in relay \((.*?)\)", text)[1].split(", ") == sorted(
        names, key=lambda name: (name != "default", name)
    )


def test_the_example_of_relay_is_a_relay_and_its_refusal_names_the_leg(here: Path) -> None:
    text = write_example("relay", "hop")
    config = RelayConfig.load("hop/relay.toml")
    assert [(leg.framework, leg.ranks) for leg in config.legs] == [("torch", 2), ("jax", 2)]
    assert "Change batch = 8 in relay.toml to batch = 7" in " ".join(text.split())
    with pytest.raises(ConfigError, match=r"leg 1 \(torch x2 fsdp\): .*global batch of 7"):
        replace(config, data=replace(config.data, batch=7))


@pytest.mark.slow
def test_the_example_of_relay_keeps_its_promises(here: Path) -> None:
    (line,) = commands(write_example("relay", "hop"))
    done = subprocess.run(
        [sys.executable, "-m", "bridge.commands.main", *line], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Every promise of the relay held." in done.stdout
