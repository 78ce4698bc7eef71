"""The closed pickle interpreter: genuine pickles in, hostile ones refused quickly, nothing executed."""

from __future__ import annotations

import os
import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats.dcp.pickle import read_pickle
from bridge.core.formats.dcp.pickle_records import (
    PLAIN_VALUES,
    Call,
    Instance,
    Name,
    Persistent,
    Vocabulary,
)
from bridge.core.formats.dcp.pickle_writer import HOLE, Filled, Pattern, Repeated, write_pickle
from bridge.core.formats.dcp.plain_values import plain_from_pickle
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.plain import plain_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**59), 2**59), inner)
    ),
    max_leaves=30,
)


def typed(value: object) -> object:
    """Tells 1 from True and 1.0, also inside containers."""
    if isinstance(value, dict):
        return "dict", [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(v) for v in value]
    return type(value), value


@given(values)
def test_plain_values_pickled_by_python_are_read_back(value: object) -> None:
    data = pickle.dumps(value, protocol=2)
    assert typed(plain_from_pickle(read_pickle(data, PLAIN_VALUES, "v"), "v")) == typed(value)


@given(values, st.sampled_from([2, 4]))
def test_plain_values_written_here_are_read_by_python_and_here(value: object, protocol: int) -> None:
    data = write_pickle(value, protocol)
    assert typed(pickle.loads(data)) == typed(value)
    assert typed(read_pickle(data, PLAIN_VALUES, "v")) == typed(value)


def test_many_names_and_texts_are_shared_and_read_back() -> None:
    value = [{f"key {i % 700}": [Name("torch.float32"), f"text {i % 300}"]} for i in range(2000)]
    words = Vocabulary(max_bytes=1 << 20, constants=re.compile(r"torch\.float32"))
    for protocol in (2, 4):
        assert read_pickle(write_pickle(value, protocol), words, "v") == value


def test_descriptions_survive_writing_and_reading() -> None:
    words = Vocabulary(
        4096, frozenset({"m.f"}), frozenset({"m.C"}), re.compile(r"torch\.\w+"), persistent=True
    )
    value = (Call("m.f", (1, Name("torch.int8"))), Instance("m.C", {"x": Persistent(("storage", "0"))}))
    for protocol in (2, 4):
        call, instance = read_pickle(write_pickle(value, protocol), words, "v")
        assert isinstance(call, Call)
        assert (call.name, call.args) == ("m.f", (1, Name("torch.int8")))
        assert isinstance(instance, Instance)
        assert instance.state["x"].id == ("storage", "0")


def test_an_ordered_dict_of_plain_values_is_read_as_a_dict() -> None:
    data = pickle.dumps(OrderedDict(a=1, b=2), protocol=2)
    assert read_pickle(data, PLAIN_VALUES, "v") == {"a": 1, "b": 2}


def test_members_of_known_enumerations_are_read_as_python_before_3_11_4_writes_them() -> None:
    known = Vocabulary(1 << 10, calls=frozenset({"torch.Kind"}), enumerations=frozenset({"torch.Kind"}))
    by_name = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x05torch\x8c\x04Kind\x93\x8c\x03ONE\x86R."
    member = read_pickle(by_name, known, "v")
    assert isinstance(member, Call)
    assert (member.name, member.args) == ("torch.Kind", ("ONE",))
    with pytest.raises(CheckpointError, match=r"it names 'builtins\.getattr'"):
        read_pickle(by_name, Vocabulary(1 << 10, calls=frozenset({"torch.Kind"})), "v")


@pytest.mark.parametrize("of", [b"\x8c\x05torch\x8c\x04Size\x93", b"\x8c\x05torch", b"N", b"]"])
def test_getattr_of_anything_else_is_refused(of: bytes) -> None:
    known = Vocabulary(
        1 << 10, calls=frozenset({"torch.Kind", "torch.Size"}), enumerations=frozenset({"torch.Kind"})
    )
    data = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93" + of + b"\x8c\x03ONE\x86R."
    with pytest.raises(CheckpointError, match="not a member of a known enumeration"):
        read_pickle(data, known, "v")


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_runs_code_is_refused_without_running_it(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "executed"
    data = pickle.dumps({"lr": Evil(marker)}, protocol=protocol)
    with pytest.raises(CheckpointError, match=r"it names 'posix\.mkdir'"):
        read_pickle(data, PLAIN_VALUES, "object 'lr'")
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "the file above was meant to be dangerous"


def nest(leaf: bytes, join: bytes, depth: int) -> bytes:
    """join(x, x) of join(x, x) of ...: each level is remembered once and used twice."""
    body = leaf + b"q\x00"
    for level in range(depth):
        body += b"h" + bytes([level]) + join + b"q" + bytes([level + 1])
    return body


PAIR = b"\x86"  # TUPLE2; the left element is still on the stack


@pytest.mark.timeout(60)
def test_a_tuple_that_would_take_forever_to_hash_is_refused_as_a_key() -> None:
    bomb = b"\x80\x02}" + nest(b")", PAIR, 60) + b"K\x01s."
    assert len(bomb) < 400
    with pytest.raises(CheckpointError, match="a dict key that is not"):
        read_pickle(bomb, PLAIN_VALUES, "v")


@pytest.mark.fast_cases("31", "60")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("depth", [25, 31, 60])
def test_a_tuple_that_would_take_forever_to_copy_or_print_is_refused(depth: int) -> None:
    bomb = b"\x80\x02" + nest(b")", PAIR, depth) + b"."
    with pytest.raises(CheckpointError, match="expected at most") as caught:
        plain_from_pickle(read_pickle(bomb, PLAIN_VALUES, "v"), "v")
    assert len(str(caught.value)) < 300


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="expected at most"):
        plain_from_pickle(read_pickle(pickle.dumps(loop, protocol=2), PLAIN_VALUES, "v"), "v")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "protocol 2, 4 or 5"),
        (b"\x80\x02", "malformed or truncated"),
        (b"\x80\x00N.", "protocol 2, 4 or 5"),
        (b"\x80\x02NN.", "one value"),
        (b"\x80\x02N.N.", "one value"),
        (b"\x80\x02(N.", "one value"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "truncated"),
        (b"\x80\x02h\x05.", "malformed"),
        (b"\x80\x02N\x86.", "empty stack"),
        (b"\x80\x02t.", "malformed"),
        (b"\x80\x02NNe.", "malformed"),
        (b"\x80\x02N(Ne.", "not a list"),
        (b"\x80\x02N(NNu.", "not a dict"),
        (b"\x80\x02}(K\x01K\x02K\x01K\x03u.", "given twice"),
        (b"\x80\x02}(K\x01u.", "malformed"),
        (b"\x80\x02}G\x00\x00\x00\x00\x00\x00\x00\x00Ns.", "a dict key that is not"),
        (b"\x80\x02}\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00Ns.", "a dict key that is not"),
        (b"\x80\x02NN\x93.", "not text"),
        (b"\x80\x02cos\nsystem\n.", "it names 'os.system'"),
        (b"\x80\x02c" + b"a" * 1000 + b"\nb\n.", "too long"),
        (b"\x80\x02NQ.", "stored tensor"),
        (b"\x80\x02N)R.", "not a known function"),
        (b"\x80\x02N)\x81.", "not a known class"),
        (b"\x80\x02NNb.", "a state"),
        (b"\x80\x04\x8c\x01\xff.", "malformed"),
        (b"\x80\x02]2.", "opcode 0x32"),
        (b"\x80\x02I1\n.", "opcode 0x49"),
        (b"\x80\x02" + b"i" + b"os\nsystem\n.", "opcode 0x69"),
    ],
)
def test_malformed_pickles_are_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        read_pickle(data, PLAIN_VALUES, "object 'x'")


@pytest.mark.timeout(60)
def test_long_texts_cannot_be_joined_into_names_again_and_again() -> None:
    text = b"X" + (8 << 20).to_bytes(4, "little") + b"a" * (8 << 20) + b"\x94"
    with pytest.raises(CheckpointError, match="too long to be one"):
        read_pickle(b"\x80\x04" + text + b"h\x00h\x00\x93" * 100_000 + b".", PLAIN_VALUES, "v")


def test_a_pickle_above_its_limit_is_refused_unread() -> None:
    with pytest.raises(CheckpointError, match="at most 10 bytes, got 11"):
        read_pickle(b"\x80\x02" + b"N" * 9, Vocabulary(10), "v")


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", 1j, object(), {(1,): 2}, {1.5: 2}, "\ud800", 1 << 2040])
def test_values_that_are_not_plain_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        plain_value([value], "object 'x'")


@pytest.mark.timeout(120)
def test_20000_mutants_of_a_value_raise_nothing_but_checkpoint_errors() -> None:
    rng = random.Random(1)
    genuine = pickle.dumps(
        {"betas": (0.9, 0.999), "n": [1, -5, 2**70, None, True], "s": "text", "d": {}}, protocol=2
    )
    accepted = 0
    for _ in range(20_000):
        mutant = bytearray(genuine)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(2, len(mutant))] = rng.randrange(256)
        try:
            plain_from_pickle(read_pickle(bytes(mutant), PLAIN_VALUES, "v"), "v")
            accepted += 1
        except CheckpointError:
            pass
    assert 0 < accepted < 20_000


@pytest.mark.fast_cases("lists")
@pytest.mark.parametrize(
    "unit",
    [
        b"]",
        b"}",
        b"N\x85",
        b"]\x94",
        pytest.param(b"Nq\0", marks=pytest.mark.slow),
        pytest.param(b"]\x85\x85\x85", marks=pytest.mark.slow),
    ],
    ids=["lists", "dicts", "tuples", "memo", "puts", "nested"],
)
def test_a_pickle_cannot_make_more_containers_than_its_length_allows(unit: bytes) -> None:
    """Each takes a hundred bytes of memory for one or two of the file."""
    data = b"\x80\x04(" + unit * (6 << 20) + b"t."
    with pytest.raises(CheckpointError, match=r"v: refused: more than \d+ containers and memo entries"):
        read_pickle(data, Vocabulary(max_bytes=64 << 20), "v")


def test_a_pickle_may_be_full_of_small_containers() -> None:
    value = [[k, [], ()] for k in range(200_000)]
    assert read_pickle(pickle.dumps(value, 4), PLAIN_VALUES, "v") == value


def test_repeated_descriptions_are_written_as_if_each_were_its_own() -> None:
    def entries(wrap: Callable[[object], object]) -> object:
        size = wrap(Call("torch.Size", ((3, 300),)))
        tensor = wrap(Instance("a.Tensor", {"size": size, "name": "w", "where": [size, size]}))
        return {f"layers.{k}": (tensor, size, k) for k in range(300)}

    for protocol in (2, 4):
        assert write_pickle(entries(Repeated), protocol) == write_pickle(
            entries(lambda value: value), protocol
        )


def test_patterns_are_written_as_if_each_description_were_its_own() -> None:
    pattern = Pattern(
        Instance("a.Place", {"file": HOLE, "name": HOLE, "kind": "file", "at": (HOLE, 7), "of": HOLE})
    )

    def descriptions(make: Callable[..., object]) -> object:
        size = Repeated(Call("torch.Size", ((3, 300),)))
        texts = {f"layers.{k}": k for k in range(300)}
        further = [
            "new",
            "file",
            3.5,
            None,
            True,
            [size],
            (1, -5),
            b"x",
            Name("torch.int8"),
            1 << 40,
            -1,
            1 << 70,
        ]
        return texts, {
            make("data", f"layers.{k}", further[k % 12], size if k % 3 else k * 1000): make(
                "file", k, k - 9, "data"
            )
            for k in range(300)
        }

    def plain(file: object, name: object, at: object, of: object) -> object:
        return Instance("a.Place", {"file": file, "name": name, "kind": "file", "at": (at, 7), "of": of})

    for protocol in (2, 4):
        pattern.times, pattern.written = 0, ()
        filled = write_pickle(descriptions(lambda *values: Filled(pattern, values)), protocol)
        assert pattern.written, "it was written from its parts"
        assert filled == write_pickle(descriptions(plain), protocol)
