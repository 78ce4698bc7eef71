"""Rules of parts of a model, second names, and models without their heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable, Plan, make_plan, parse_mapping
from tests.support.bridge.bits import same_bits
from tests.support.bridge.memory_reader import MemoryReader

PARTS = """
[[rule]]
hf = "embed.weight : v m"
flax = "embed/embedding : v m"
[[rule]]
hf = "encoder.embed.weight : v m"
tied_to = "embed.weight"
[[rule]]
hf = "decoder.embed.weight : v m"
optional = "decoder"
tied_to = "embed.weight"
[[rule]]
hf = "decoder.{i}.a"
flax = "decoder/{i}/a"
optional = "decoder"
[[rule]]
hf = "decoder.{i}.b"
flax = "decoder/{i}/b"
optional = "decoder"
[[rule]]
hf = "decoder.norm"
flax = "decoder/norm"
optional = "decoder"
[[rule]]
hf = "layers.{i}.up : f m"
flax = "layers/{i}/up : m f"
optional = "dense MLP of layer {i}"
[[rule]]
hf = "layers.{i}.experts.{e}.up : f m"
flax = "layers/{i}/experts/up : {e} m f"
optional = "experts of layer {i}"
[[rule]]
hf = "layers.{i}.experts.{e}.down : m f"
flax = "layers/{i}/experts/down : {e} f m"
optional = "experts of layer {i}"
[[rule]]
hf = "layers.{i}.router"
flax = "layers/{i}/router"
optional = "experts of layer {i}"
[convention.hf]
[convention.flax]
"""
SHAPES: dict[str, tuple[int, ...]] = {"embed.weight": (5, 4), "layers.0.up": (3, 4)}
SHAPES |= {f"layers.{i}.experts.{e}.up": (3, 4) for i in (1, 2) for e in range(2)}
SHAPES |= {f"layers.{i}.experts.{e}.down": (4, 3) for i in (1, 2) for e in range(2)}
SHAPES |= {f"layers.{i}.router": (4,) for i in (1, 2)}
DECODER: dict[str, tuple[int, ...]] = {f"decoder.{i}.{n}": (2,) for i in range(3) for n in "ab"}
DECODER |= {"decoder.norm": (2,)}


def arrays(*names: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape) for name, shape in (SHAPES | DECODER).items()}
    return {f"model.{name}": array for name, array in tensors.items() if not names or name in names}


def table(text: str = PARTS) -> MappingTable:
    return parse_mapping(text, "parts")


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def there(weights: dict[str, np.ndarray], mapping: MappingTable | None = None) -> dict[str, np.ndarray]:
    reader = MemoryReader("dcp", weights)
    return contents(make_plan(reader, "orbax", mapping or table()), reader)


def back(tree: dict[str, np.ndarray], to: str = "dcp", mapping: MappingTable | None = None) -> dict:
    reader = MemoryReader("orbax", tree)
    return contents(make_plan(reader, to, mapping or table()), reader)


@pytest.mark.parametrize("decoder", [True, False])
def test_a_part_is_there_or_not_with_its_second_name(decoder: bool) -> None:
    weights = arrays() if decoder else arrays(*SHAPES)
    tree = there(weights)
    returned = back(tree)
    second = ["encoder.embed.weight", "decoder.embed.weight"][: 1 + decoder]
    expected = weights | {f"model.{name}": weights["model.embed.weight"] for name in second}
    assert returned.keys() == expected.keys()
    assert all(same_bits(returned[name], array) for name, array in expected.items())
    # The tree has nothing of it, however often it goes there and back.
    assert there(returned).keys() == tree.keys()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("decoder.norm", r"1 of \d+ rules found no tensor: decoder\.norm"),
        # The last layer's: no number is missing for the rule itself.
        ("decoder.2.b", r"rule decoder\.\{i\}\.b .*found none for 2"),
        (
            "layers.2.router",
            r"rule layers\.\{i\}\.router .*of the same part match one, found none for experts of layer 2",
        ),
        ("layers.1.router", r"found none for experts of layer 1"),
        # The last expert's of one layer: a stack of one would be made, beside one of two.
        ("layers.2.experts.1.down", r"down .*for each layers\.2\.experts\.\{e\} .*found none for 1"),
    ],
)
def test_a_tensor_that_a_part_lacks_is_named(lost: str, message: str) -> None:
    weights = arrays()
    del weights[f"model.{lost}"]
    with pytest.raises(MappingError, match=message):
        there(weights)


def test_a_part_of_a_layer_whose_stack_lacks_all_is_named() -> None:
    weights = {
        name: array for name, array in arrays().items() if not name.startswith("model.layers.2.experts")
    }
    with pytest.raises(MappingError, match=r"experts\.\{e\}\.up .*found none for experts of layer 2"):
        there(weights)


def test_second_names_are_compared_and_written_where_a_state_dict_has_them() -> None:
    weights = arrays()
    embedding = weights["model.embed.weight"]
    same = weights | {"model.encoder.embed.weight": embedding.copy()}
    reader = MemoryReader("dcp", same)
    plan = make_plan(reader, "orbax", table())
    assert plan.dropped == ("model.encoder.embed.weight",)
    other = embedding.copy()
    other.view(np.uint64)[0, 0] ^= 1
    with pytest.raises(MappingError, match=r"encoder\.embed\.weight of memory differs from .*\(--drop\)"):
        there(weights | {"model.encoder.embed.weight": other})
    state = {f"optimizer.state.encoder.embed.weight.{s}": embedding for s in ("exp_avg", "exp_avg_sq")}
    state["optimizer.state.encoder.embed.weight.step"] = np.array(1, np.float32)
    with pytest.raises(MappingError, match=r"exp_avg is optimizer state of a tied weight"):
        there(same | state)
    tree = there(weights)
    assert {name for name in back(tree) if "embed" in name} == {
        *("model.embed.weight", "model.encoder.embed.weight", "model.decoder.embed.weight")
    }
    assert {name for name in back(tree, "safetensors") if "embed" in name} == {"embed.weight"}
    assert {name for name in back(tree, mapping=table().with_tied("once")) if "embed" in name} == {
        "model.embed.weight"
    }
    both = back(tree, "safetensors", table().with_tied("both"))
    assert same_bits(both["encoder.embed.weight"], embedding)


def test_a_tensor_under_its_second_name_alone_gets_the_first_and_so_do_its_moments() -> None:
    weights = arrays()
    embedding = weights.pop("model.embed.weight")
    weights["model.encoder.embed.weight"] = embedding
    state = {f"optimizer.state.encoder.embed.weight.{s}": embedding + 1 for s in ("exp_avg", "exp_avg_sq")}
    state["optimizer.state.encoder.embed.weight.step"] = np.array(1, np.float32)
    tree = there(weights | state)
    assert same_bits(tree["params/embed/embedding"], embedding)
    moments = [name for name in tree if "/mu/" in name]
    assert [name.rpartition("mu/")[2] for name in moments] == ["embed/embedding"]
    assert same_bits(tree[moments[0]], embedding + 1)


def test_between_two_conventions_second_names_and_parts_stay() -> None:
    text = PARTS + '[convention.third]\nlike = "flax"\nformat = ""\n'
    two = table(text).between("hf", "flax")
    assert two.rules == table().rules
    assert not any(rule.is_second_name for rule in table(text).between("flax", "third").rules)
    assert {rule.part for rule in table().part().rules} == {""}


HEAD = """
[[rule]]
hf = "embed.weight : v m"
flax = "embed/embedding : v m"
[[rule]]
hf = "head.weight : v m"
flax = "head/kernel : m v"
optional = "head"
tied_to = "embed.weight"
[[rule]]
hf = "head.norm"
flax = "head/norm"
optional = "head"
[convention.hf]
[convention.flax]
"""


def test_a_model_without_its_head_needs_no_weight_of_the_head() -> None:
    apart = replace(table(HEAD), ties=False)
    embedding = {"model.embed.weight": np.zeros((5, 4))}
    assert there(embedding, apart).keys() == {"params/embed/embedding"}
    with pytest.raises(MappingError, match=r"says that tie_word_embeddings is false: expected head\.weight"):
        there(embedding | {"model.head.norm": np.zeros(4)}, apart)


HEADS = """
[convention.hf]
[convention.hf_base]
like = "hf"
without = "bert."
[convention.flax]
[convention.flax_base]
like = "flax"
without = "bert/"
[[rule]]
hf = "bert.embed.weight : v m"
flax = "bert/embed/embedding : v m"
[[rule]]
hf = "bert.layer.{i}.weight : f m"
flax = "bert/layer/{i}/kernel : m f"
[[rule]]
hf = "head.weight : n m"
flax = "head/kernel : m n"
optional = true
"""


@pytest.mark.parametrize("root", ["bert.", ""])
def test_a_model_without_its_heads_becomes_one_without(root: str) -> None:
    random = np.random.default_rng(0)
    weights = {"embed.weight": (5, 4), "layer.0.weight": (3, 4), "layer.1.weight": (3, 4)}
    tensors = {f"model.{root}{n}": random.standard_normal(shape) for n, shape in weights.items()}
    tensors |= {"model.head.weight": random.standard_normal((2, 4))} if root else {}
    tree = there(tensors, table(HEADS))
    at = "params/" + root.replace(".", "/")
    heads = {"params/head/kernel"} if root else set()
    assert tree.keys() == {f"{at}embed/embedding", f"{at}layer/0/kernel", f"{at}layer/1/kernel"} | heads
    returned = back(tree, mapping=table(HEADS))
    assert returned.keys() == tensors.keys()
    assert all(same_bits(returned[name], array) for name, array in tensors.items())
    # To names of the same kind it is to be said which.
    with pytest.raises(MappingError, match=r"is not clear; choose one \(--into\)"):
        make_plan(MemoryReader("dcp", tensors), "dcp", table(HEADS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rule]]\nhf="a"\nflax="b"\noptional=""\n', "true or false for optional, or the name of a part"),
        ('[[rule]]\nhf="a"\nflax="b"\noptional="layer {i}"\n', "expected the index of part 'layer {i}'"),
        ('[[rule]]\nhf="a"\ntied_to="b"\n', "expected the path of a rule of mapping .* for tied_to, got 'b'"),
        ('[[rule]]\nhf="a"\n', "expected entries of two conventions"),
        ('[convention.x]\nwithout="y."\n[[rule]]\nhf="a"\nflax="b"\n', "that convention x .* is like"),
    ],
)
def test_a_malformed_part_is_named(text: str, message: str) -> None:
    conventions = "[convention.hf]\n[convention.flax]\n[convention.third]\n"
    with pytest.raises(MappingError, match=message):
        table(conventions + text)
