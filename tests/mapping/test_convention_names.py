"""Names of conventions: two names of one thing, and which convention is meant where none is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.mapping import MappingError, load_mapping, make_plan, parse_mapping
from bridge.core.mapping.language.conventions import usual_in
from bridge.core.mapping.language.rules import family_names
from bridge.core.mapping.one_rule.sizes import with_stored_sizes
from tests.support.bridge.family_checkpoints import flat, orbax_tree, same_bits
from tests.support.bridge.family_models import flax_weights, hf_model
from tests.support.bridge.memory_reader import MemoryReader

HUB = [name for name in family_names() if load_mapping(name).models]


@pytest.mark.parametrize("family", HUB)
def test_each_family_has_one_tree_that_is_meant_and_one_file_of_the_hub(family: str) -> None:
    # Models without their heads have conventions of their own.
    conventions = [c for c in load_mapping(family).conventions.values() if not getattr(c, "without", "")]
    (tree,) = usual_in("orbax", conventions)
    assert tree.name in ("jax", "flax")
    assert len(usual_in("safetensors", [c for c in conventions if c is not tree])) == 1


@pytest.mark.parametrize("family", HUB)
def test_flax_and_jax_are_one_convention_in_every_family_and_so_are_hf_and_torch(family: str) -> None:
    table = load_mapping(family)
    assert table.convention_of("flax") == table.convention_of("jax")
    assert {table.convention_of("hf"), table.convention_of("torch")} <= set(table.conventions)
    assert table.convention_of("mlx") is None
    assert table.between("hf", "flax").conventions.keys() == table.between("hf", "jax").conventions.keys()


def test_a_llama_from_the_hub_and_back_without_into(tmp_path: Path) -> None:
    model = hf_model("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "hub")
    for into in (None, "jax"):
        convert(tmp_path / "hub", tmp_path / f"{into}", mapping="llama", into=into)
        same_bits(dict(flat(orbax_tree(tmp_path / f"{into}")["params"])), flax_weights(model))
    back = tmp_path / "back"
    convert(tmp_path / "jax", back, to="safetensors", mapping="llama", from_="jax", axes={"d": 10})
    assert diff(tmp_path / "hub", back).max_ulp == 0
    with pytest.raises(MappingError, match=r"expected a convention.* other than hf.*; got 'torch'"):
        convert(tmp_path / "hub", tmp_path / "no", mapping="llama", into="torch")


def test_both_names_of_a_pair_in_one_mapping_are_two_things() -> None:
    table = parse_mapping(
        "[convention.hf]\n[convention.jax]\n[convention.flax]\n"
        '[[rule]]\nhf = "w.a : x"\njax = "j/a : x"\nflax = "f/a : x"\n',
        "test",
    )
    reader = MemoryReader("dcp", {"model.w.a": np.arange(3.0)})
    for into in ("jax", "flax"):
        assert list(make_plan(reader, "orbax", table, into=into).tensors) == [f"params/{into[0]}/a"]
    with pytest.raises(MappingError, match=r"of hf, is not clear; choose one \(--into\): jax, flax; in"):
        make_plan(reader, "orbax", table)
    with pytest.raises(MappingError, match="expected two conventions or more of mapping test"):
        table.between("hf", "torch")


def state_below(root: str, family: str) -> dict[str, np.ndarray]:
    model = hf_model(family, num_hidden_layers=1)
    return {f"{root}.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("root", ["model", "state_dict", "module"])
def test_a_part_of_a_model_below_a_key_is_found_where_the_whole_is(family: str, root: str) -> None:
    """Of a part no rule requires anything, so that one short name, such as norm.weight, fits in many places."""
    table = load_mapping(family).with_axes({"d": 8 if family == "gpt2" else 10})
    reader = MemoryReader("dcp", state_below(root, family))
    whole = make_plan(reader, "orbax", table, into="flax")
    part = make_plan(reader, "orbax", with_stored_sizes(table, reader).part(), into="flax")
    assert part.tensors.keys() == whole.tensors.keys()
    assert all(part.tensors[name].sources == whole.tensors[name].sources for name in part.tensors)


def test_a_part_that_is_in_two_places_is_refused_and_a_smaller_second_one_is_named() -> None:
    state, ema = state_below("model", "llama"), state_below("ema_model", "llama")
    table = load_mapping("llama").with_axes({"d": 10})
    reader = MemoryReader("dcp", state | ema)
    part = with_stored_sizes(table, reader).part()
    with pytest.raises(MappingError, match=r"found them at .*\{w\}' and '.*leave the others out"):
        make_plan(reader, "orbax", part, into="flax")
    few = {name: array for name, array in ema.items() if "self_attn" in name}
    for other in (few, {name: ema[name] for name in list(ema)[:1]}):
        reader = MemoryReader("dcp", state | other)
        part = with_stored_sizes(table, reader).part()
        with pytest.raises(MappingError, match=rf"ema_model.*{next(iter(other)).split('.', 1)[1]}"):
            make_plan(reader, "orbax", part, into="flax")
