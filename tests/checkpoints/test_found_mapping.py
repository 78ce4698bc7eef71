"""A conversion that names no mapping finds the shipped one, or says which ones are near."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridge import convert, diff
from bridge.commands.main import app
from bridge.core.mapping.language.errors import MappingError
from bridge.examples.write import write_example


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of ``convert``: a Llama with its config.json."""
    folder = tmp_path_factory.mktemp("found")
    write_example("convert", folder / "checkpoints")
    return folder


def without_config(checkpoint: Path, folder: Path) -> Path:
    shutil.copytree(checkpoint, folder / "without_config")
    (folder / "without_config" / "config.json").unlink()
    return folder / "without_config"


def test_a_convention_is_enough_where_config_json_names_the_model(example: Path, tmp_path: Path) -> None:
    report = convert(example / "checkpoints" / "torch", tmp_path / "a", into="torchtitan")
    convert(example / "checkpoints" / "torch", tmp_path / "b", into="torchtitan", mapping="llama")
    assert diff(tmp_path / "a", tmp_path / "b").same
    assert report.conventions == ("hf", "torchtitan")
    assert report.remarks[0].startswith("mapping llama, for model_type llama in ")


def test_names_of_both_sides_are_enough_with_a_template(example: Path, tmp_path: Path) -> None:
    source = without_config(example / "checkpoints" / "torch", tmp_path)
    axes = {"d": 4, "llama3_rope": 0}
    convert(source, tmp_path / "own", mapping="llama", into="maxtext", axes=axes)
    report = convert(source, tmp_path / "arrived", like=tmp_path / "own", axes=axes)
    assert report.remarks[0] == "mapping llama, the only one that fits the names"
    assert diff(tmp_path / "arrived", tmp_path / "own").same


def test_the_command_needs_no_mapping(example: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(example / "checkpoints" / "torch"), str(tmp_path / "a"), "--into", "maxtext"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, "note: mapping llama" in done.output) == (0, True), done.output
    refused = CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "b"), "--axis", "d=4"])
    assert (refused.exit_code, "--axis needs --mapping" in refused.output) == (2, True)


def test_another_model_of_the_same_names_is_refused(example: Path, tmp_path: Path) -> None:
    source = tmp_path / "other"
    shutil.copytree(example / "checkpoints" / "torch", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    expected = r"for model_type 'never_heard_of' in .*: none that ships fits, nearest are llama \(\d+ names of weights"
    with pytest.raises(MappingError, match=expected):
        convert(source, tmp_path / "a", into="maxtext")
    assert not (tmp_path / "a").exists()


def test_what_the_nearest_mapping_lacks_is_said(example: Path, tmp_path: Path) -> None:
    source = without_config(example / "checkpoints" / "torch", tmp_path)
    with pytest.raises(
        MappingError, match=r"nearest are llama .*\. llama: .*expected --axis llama3_rope=1 or"
    ):
        convert(source, tmp_path / "a", into="maxtext")


def test_several_that_fit_are_named(example: Path, tmp_path: Path) -> None:
    """Mistral has Llama's names and another window of attention."""
    source = without_config(example / "checkpoints" / "torch", tmp_path)
    with pytest.raises(MappingError, match=r"the names fit .*llama.*, which may mean different models"):
        convert(source, tmp_path / "a", into="flax", axes={"d": 4})


def test_a_convention_that_no_mapping_has_is_refused(example: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="got 'maxtxt'; did you mean maxtext"):
        convert(example / "checkpoints" / "torch", tmp_path / "a", into="maxtxt")


def test_choices_of_a_mapping_are_refused_where_names_need_none(example: Path, tmp_path: Path) -> None:
    source = example / "checkpoints" / "torch"
    with pytest.raises(ValueError, match="expected a mapping for the axis sizes"):
        convert(source, tmp_path / "a", like=source, axes={"d": 4})
