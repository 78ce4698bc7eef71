"""Several naming conventions in one mapping: found by their names, wherever these stand, and translated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from hypothesis import given

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box, TensorInfo, TreePath
from bridge.core.mapping import MappingError, Plan, load_mapping, make_plan, parse_mapping
from bridge.core.mapping.states.source_tree import find
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.memory_reader import MemoryReader
from tests.support.bridge.orbax_helpers import random_box
from tests.support.examples import examples

F32 = np.dtype(np.float32)
M, HEADS, KV, D, F, V, LAYERS = 6, 4, 2, 8, 7, 11, 3


def hf_weights() -> dict[str, np.ndarray]:
    """A Llama in Hugging Face's names; no two axes are equal, every tensor is different."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, M)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (M,),
            layer + "self_attn.q_proj.weight": (HEADS * D, M),
            layer + "self_attn.k_proj.weight": (KV * D, M),
            layer + "self_attn.v_proj.weight": (KV * D, M),
            layer + "self_attn.o_proj.weight": (M, HEADS * D),
            layer + "post_attention_layernorm.weight": (M,),
            layer + "mlp.gate_proj.weight": (F, M),
            layer + "mlp.up_proj.weight": (F, M),
            layer + "mlp.down_proj.weight": (M, F),
        }
    shapes |= {"model.norm.weight": (M,), "lm_head.weight": (V, M)}
    return {name: random_bits(shape, F32, seed) for seed, (name, shape) in enumerate(shapes.items())}


def hf_checkpoint(*, moments: bool = True, root: str = "") -> dict[str, np.ndarray]:
    weights = hf_weights()
    arrays = {root + name: array for name, array in weights.items()}
    for number, (name, array) in enumerate(weights.items()) if moments else ():
        state = f"optimizer.state.{name}."
        arrays[state + "exp_avg"] = random_bits(array.shape, F32, 1000 + number)
        arrays[state + "exp_avg_sq"] = random_bits(array.shape, F32, 2000 + number)
        arrays[state + "step"] = np.asarray(12, np.float32)
    return arrays


def reader(format: str, arrays: dict[str, np.ndarray]) -> MemoryReader:
    return MemoryReader(format, arrays)


def contents(plan: Plan, source: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(source, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def translated(source: MemoryReader, to: str, into: str) -> MemoryReader:
    # Random bits have no scale that is exact: denormals and NaNs are among them.
    plan = make_plan(source, to, load_mapping("llama").with_axes(AXES), into=into)
    notes = dict(plan.notes.values())
    return MemoryReader(to, contents(plan, source), notes)


AXES = {"d": D, "r": HEADS // KV, "query_scale": 1, "llama3_rope": 1}
TITANS = ("torchtitan", "torchtitan_unfused", "torchtitan_fused", "torchtitan_0_2")
FORMATS = {"hf": "dcp", **dict.fromkeys(TITANS, "dcp"), "flax": "orbax", "maxtext": "orbax"}
FORMATS["maxtext_unscanned"] = "orbax"
SAME_WEIGHTS = {"torchtitan", "torchtitan_unfused"}
PAIRS = [
    (*pair, moments)
    for pair in itertools.permutations(FORMATS, 2)
    for moments in (True, False)
    if {"hf", "flax", "torchtitan"} & {*pair} and (moments or {*pair} != SAME_WEIGHTS)
]


def meta_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as Meta orders them, by Hugging Face's own conversion formula run backwards."""
    halves = torch.from_numpy(weight.copy()).view(heads, 2, D // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape).numpy()


def with_positions(reader: MemoryReader) -> MemoryReader:
    """Numbers in an optimizer's paths as positions in a list, as readers of files give them."""

    def path_of(info: TensorInfo) -> TreePath:
        number = info.path[0] == "opt_state" and str(info.path[1]).isdecimal()
        return (info.path[0], int(info.path[1]), *info.path[2:]) if number else info.path

    reader.tensors = {name: replace(info, path=path_of(info)) for name, info in reader.tensors.items()}
    return reader


def test_what_maxtext_keeps_beside_weights_goes_along_and_comes_back() -> None:
    tree = translated(reader("dcp", hf_checkpoint()), "orbax", "maxtext")
    extra = {
        "opt_state/2/count": np.asarray(12, np.int32),
        "nnx_aux/model/decoder/layers/self_attention/rngs/dropout/key": np.arange(8, dtype=np.uint32),
        "step": np.asarray(12, np.int32),
    }
    source = with_positions(MemoryReader("orbax", tree.arrays | extra))
    there = with_positions(translated(source, "dcp", "hf"))
    table = load_mapping("llama").with_axes(AXES)
    plan = make_plan(there, "orbax", table, into="maxtext")
    converted = contents(plan, there)
    assert converted.keys() == source.arrays.keys()
    assert [name for name in converted if not same_bits(converted[name], source.arrays[name])] == []
    # Part 2 of the chain has the count of a schedule, so that part 1 alone is empty.
    paths = [path for path, _ in (*plan.objects.values(), *plan.notes.values())]
    assert [path for path in paths if path[0] == "opt_state"] == [("opt_state", 1)]
    # The rest there is of the model, such as the biases of routers.
    of_the_model = source.arrays | {"nnx_aux/model/decoder/gate/bias": np.ones(3, np.float32)}
    with pytest.raises(
        MappingError, match=r"1 of \d+ tensors match no rule: nnx_aux/model/decoder/gate/bias"
    ):
        make_plan(MemoryReader("orbax", of_the_model), "dcp", table, into="hf")


def test_llama_becomes_what_each_convention_has_by_hand() -> None:
    source = reader("dcp", hf_checkpoint())
    w = source.arrays
    titan = translated(source, "dcp", "torchtitan").arrays
    attention = "layers.1.attention.qkv_linear."
    q = attention + "wq.weight"
    assert same_bits(titan[q], meta_rows(w["model.layers.1.self_attn.q_proj.weight"], HEADS))
    assert same_bits(titan[attention + "wv.weight"], w["model.layers.1.self_attn.v_proj.weight"])
    assert same_bits(titan["layers.2.feed_forward.w3.weight"], w["model.layers.2.mlp.up_proj.weight"])
    moment = w["optimizer.state.model.layers.1.self_attn.k_proj.weight.exp_avg_sq"]
    fused = titan[f"optimizer.state.{attention}wqkv.weight.exp_avg_sq"].reshape(KV, -1, D, M)
    assert same_bits(np.ascontiguousarray(fused[:, -2]).reshape(-1, M), meta_rows(moment, KV))

    flax = translated(source, "orbax", "flax").arrays
    query = w["model.layers.1.self_attn.q_proj.weight"].T.reshape(M, HEADS, D)
    assert same_bits(flax["params/layers/1/attention/query/kernel"], np.ascontiguousarray(query))
    assert flax["opt_state/0/count"].tolist() == 12

    maxtext = translated(source, "orbax", "maxtext").arrays
    stacked = [
        meta_rows(w[f"model.layers.{i}.self_attn.q_proj.weight"], HEADS).T.reshape(M, HEADS, D)
        for i in range(LAYERS)
    ]
    name = "decoder/layers/self_attention/query/kernel"
    assert same_bits(maxtext[f"params/params/{name}"], np.stack(stacked, axis=1))
    assert f"opt_state/0/nu/params/{name}" in maxtext


@pytest.mark.each_value
@pytest.mark.parametrize(("first", "second", "moments"), PAIRS)
def test_every_pair_of_conventions_goes_there_and_back(first: str, second: str, moments: bool) -> None:
    original = reader("dcp", hf_checkpoint(moments=moments))
    a = original if first == "hf" else translated(original, FORMATS[first], first)
    b = translated(a, FORMATS[second], second)
    assert a.arrays.keys() != b.arrays.keys()
    back = translated(b, FORMATS[first], first)
    assert back.arrays.keys() == a.arrays.keys()
    assert [name for name, array in a.arrays.items() if not same_bits(back.arrays[name], array)] == []


@pytest.mark.parametrize("convention", FORMATS)
@pytest.mark.parametrize("moments", [True, False])
def test_a_convention_is_known_by_its_names(convention: str, moments: bool) -> None:
    original = reader("dcp", hf_checkpoint(moments=moments))
    format = FORMATS[convention]
    source = original if convention == "hf" else translated(original, format, convention)
    convention_name = find(source.tensors.values(), load_mapping("llama"), None, "here").convention.name
    # The weights of these are the same, so it does not matter which it is.
    assert convention_name == (
        "torchtitan" if convention == "torchtitan_unfused" and not moments else convention
    )


@examples(40)
@given(st.data())
def test_any_region_of_an_interleaved_stack_is_read_alone(data: st.DataObject) -> None:
    source = reader("dcp", hf_checkpoint(moments=False))
    plan = make_plan(
        source, "orbax", load_mapping("llama").with_axes({"d": D, "llama3_rope": 1}), into="maxtext"
    )
    tensor = plan.tensors["params/params/decoder/layers/self_attention/query/kernel"]
    whole = tensor.read(source, Box.whole(tensor.shape))
    box = random_box(np.random.default_rng(data.draw(st.integers(0, 10**6))), tensor.shape)
    assert same_bits(tensor.read(source, box), np.ascontiguousarray(whole[box.slices()]))


def test_weights_are_found_below_any_root_and_go_back_there() -> None:
    for root in ("model.", "state.module.", ""):
        source = reader("dcp", hf_checkpoint(root=root))
        flax = translated(source, "orbax", "flax")
        assert "params/norm/scale" in flax.arrays
        back = translated(flax, "dcp", "hf")
        assert back.arrays.keys() == source.arrays.keys()
    text = "weights of one model .* found them at 'a.{w}' and 'b.{w}'"
    both = hf_checkpoint(root="a.", moments=False) | hf_checkpoint(root="b.", moments=False)
    with pytest.raises(MappingError, match=text.replace("{", r"\{").replace("}", r"\}")):
        translated(reader("dcp", both), "orbax", "flax")


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    ),
    "masked": lambda: optax.masked(optax.adamw(1e-3), {"w": True, "b": False}),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "bare": lambda: optax.scale_by_adam(),
}
PAIR = '[[rule]]\ntorch = "w.weight : a b"\njax = "w : b a"\n[[rule]]\ntorch = "b.bias"\njax = "b"\n'


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_optax_states_become_adams_and_come_back_bit_for_bit(tmp_path: Path, optimizer_name: str) -> None:
    """Saved by stock Orbax after real updates, translated to PyTorch's names and back, restored by stock Orbax."""
    params = {"w": np.float32(random_values((3, 5), 1)), "b": np.float32(random_values((4,), 2))}
    optimizer = OPTIMIZERS[optimizer_name]()
    state = optimizer.init(params)
    for seed in range(3):
        grads = {"w": random_values((3, 5), 10 + seed), "b": random_values((4,), 20 + seed)}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"params": params, "opt_state": state})
    mapping = parse_mapping(PAIR, "pair")
    convert(tmp_path / "orbax", tmp_path / "dcp", mapping=mapping)
    with open_checkpoint(tmp_path / "dcp") as dcp:
        assert dcp.read("optimizer.state.w.weight.exp_avg").shape == (5, 3)
        assert float(dcp.read("optimizer.state.w.weight.step")) == 3
        assert ("optimizer.state.b.bias.exp_avg" in dcp.tensors) == (optimizer_name != "masked")
    convert(tmp_path / "dcp", tmp_path / "back", mapping=mapping)
    assert diff(tmp_path / "orbax", tmp_path / "back").max_ulp == 0
    with open_checkpoint(tmp_path / "orbax") as a, open_checkpoint(tmp_path / "back") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name in a.tensors:
            assert same_bits(a.read(name), b.read(name))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "back")
    flat = [leaf for leaf in jax_leaves(restored["opt_state"]) if np.shape(leaf) == (3, 5)]
    assert len(flat) == 2


def random_values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def jax_leaves(tree: object) -> list[np.ndarray]:
    import jax

    return jax.tree.leaves(tree)


def test_safetensors_with_a_mapping(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(hf_weights(), tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "flax", mapping="llama", into="flax", axes={"d": D})
    convert(
        tmp_path / "flax",
        tmp_path / "back.safetensors",
        to="safetensors",
        mapping="llama",
        axes={"d": D},
        into="hf",
    )
    with open_checkpoint(tmp_path / "back.safetensors") as back:
        assert {n: back.read(n).tobytes() for n in back.tensors} == {
            n: a.tobytes() for n, a in hf_weights().items()
        }
    report = diff(tmp_path / "model.safetensors", tmp_path / "flax", mapping="llama", axes={"d": D})
    assert report.within
    assert len(report.tensors) == len(hf_weights())


def test_all_that_does_not_fit_is_said_at_once() -> None:
    arrays = hf_checkpoint()
    arrays["model.rotary.inv_freq"] = np.ones(3, np.float32)
    arrays["strange"] = np.ones(2)
    del arrays["model.layers.1.mlp.down_proj.weight"]
    del arrays["optimizer.state.model.norm.weight.exp_avg"]
    arrays["model.layers.0.self_attn.o_proj.weight"] = np.zeros((M, 3, 2), np.float32)
    arrays["optimizer.state.lm_head.weight.step"] = np.asarray(11, np.float32)
    mapping = load_mapping("llama").with_axes({"d": D})
    with pytest.raises(MappingError) as caught:
        make_plan(reader("dcp", arrays), "orbax", mapping, into="maxtext")
    message = str(caught.value)
    for part in (
        "2 of 120 tensors match no rule: model.rotary.inv_freq, strange.",
        "found no tensor model.layers.1.mlp.down_proj.weight",
        "optimizer.state.model.norm.weight.exp_avg is missing",
        "o_proj.weight and (6, 32)",
        "expected the same step for every parameter, since opt_state/0/count is one number, got 12 in",
    ):
        assert part in message, message
    assert len(message.splitlines()) >= 5


@pytest.mark.parametrize(
    ("into", "from_", "to", "message"),
    [
        (
            "hf",
            None,
            "dcp",
            "expected a convention of mapping llama other than hf, .*: torchtitan, .*, flax, maxtext, .*; got",
        ),
        ("megatron", None, "dcp", "got 'megatron'"),
        ("flax", "meta", "dcp", "expected a convention of mapping llama .*, got 'meta'"),
        ("hf", "flax", "dcp", "12 of 12 rules found no tensor|does not fit"),
    ],
)
def test_which_conventions_are_meant_must_be_clear(
    into: str | None, from_: str | None, to: str, message: str
) -> None:
    with pytest.raises(MappingError, match=message):
        make_plan(
            reader("dcp", hf_checkpoint()),
            to,
            load_mapping("llama").with_axes({"d": D}),
            into=into,
            from_=from_,
        )


def test_an_odd_or_unknown_rotary_axis_is_refused() -> None:
    source = reader("dcp", hf_checkpoint())
    with pytest.raises(
        MappingError, match=r"expected an even size for the rotary axis d of mapping llama, got 7"
    ):
        make_plan(source, "orbax", load_mapping("llama").with_axes({"d": 7}), into="flax")
    with pytest.raises(MappingError, match=r"the size of axis d.* does not follow .* --axis d=SIZE"):
        make_plan(source, "orbax", load_mapping("llama"), into="flax")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[convention.a]\nweight = "{w}"\n[convention.b]\n',
            "expected places of weights, .* a, got weight",
        ),
        ('[convention.a]\nweights = "x"\n[convention.b]\n', r"expected \{w\} once in the place of weights"),
        ("[convention.a]\nweights = 3\n[convention.b]\n", r"expected tables \[convention\.NAME\] of texts"),
        ("[convention.a]\n", "expected only a, optional, tied_to in rule 1 .*, got b"),
        (
            '[convention.a]\n[convention.b]\nlike = "c"\n',
            r"expected another convention of mapping test \(a\) that convention b is like, got 'c'",
        ),
        (
            '[convention.a]\n[convention.b]\nlike = "a"\n[convention.c]\nlike = "b"\n',
            r"expected another convention .* \(a\) that convention c is like, got 'b'",
        ),
    ],
)
def test_malformed_conventions_are_refused(text: str, message: str) -> None:
    with pytest.raises(MappingError, match=message):
        parse_mapping(text + '[[rule]]\na = "x.y"\nb = "x/y"\n', "test")


def test_a_tensor_that_the_target_lacks_must_be_dropped() -> None:
    text = (
        "[convention.a]\n[convention.b]\n[convention.c]\n"
        '[[rule]]\na = "w.x"\nb = "v.x"\nc = "w/x"\n[[rule]]\na = "buffer.x"\nb = "buffer.y"\n'
    )
    source = reader("dcp", {"model.w.x": np.ones(2), "model.buffer.x": np.ones(1)})
    mapping = parse_mapping(text, "test")
    assert set(make_plan(source, "dcp", mapping, into="b").tensors) == {"model.v.x", "model.buffer.y"}
    with pytest.raises(MappingError, match=r"model\.buffer\.x has no counterpart in convention c: drop it"):
        make_plan(source, "orbax", mapping, into="c")
