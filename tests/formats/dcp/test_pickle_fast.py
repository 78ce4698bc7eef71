"""Opening many tensors quickly gives what the general way gives: good `.metadata` files, bad ones and hostile ones."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorProperties

from bridge.core.formats.dcp import metadata as module
from bridge.core.formats.dcp import pickle as interpreter
from bridge.core.formats.dcp.metadata import DcpMetadata, Extent, parse_metadata
from bridge.core.formats.dcp.pickle import RepeatedEntries, read_pickle
from bridge.core.formats.dcp.pickle_machine import Machine
from bridge.core.formats.dcp.pickle_records import Call, Instance, Name, Vocabulary
from bridge.core.formats.dcp.pickle_writer import write_pickle
from bridge.core.formats.dcp.writer import format_metadata
from bridge.core.formats.tensors.base import CheckpointError, TensorInfo
from bridge.core.formats.tensors.boxes import grid_of_chunks
from tests.support.bridge.dcp_files import stock_save
from tests.support.examples import examples

WORDS = module._VOCABULARY
FOREIGN = Vocabulary(max_bytes=64 << 20, foreign=True, persistent=True)
MOST = 3000


def picture(value: object) -> list[str]:
    """The first nodes of a value with their types, breadth first."""
    lines: list[str] = []
    queue = [value]
    for node in queue:
        if len(lines) > MOST:
            break
        match node:
            case Instance(name=name, state=state):
                lines.append(f"instance {name}")
                queue.append(state)
            case Call(name=name, args=args, state=state):
                lines.append(f"call {name}")
                queue += [args, state]
            case Name(dotted=dotted):
                lines.append(f"name {dotted}")
            case dict():
                lines.append(f"dict {len(node)}")
                queue += [part for item in node.items() for part in item]
            case list() | tuple():
                lines.append(f"{type(node).__name__} {len(node)}")
                queue += node
            case _:
                lines.append(f"{type(node).__name__} {node!r}")
    return lines


def outcome(data: bytes, words: Vocabulary) -> list[str] | str:
    try:
        return picture(read_pickle(data, words, "w"))
    except CheckpointError as error:
        # Only the general way calls a number at the very end truncated.
        return str(error).replace("refused: truncated", f"malformed or truncated pickle of {len(data)} bytes")


def metadata_of(data: bytes) -> DcpMetadata | str:
    try:
        return parse_metadata(data, "w")
    except CheckpointError as error:
        return str(error).replace("refused: truncated", f"malformed or truncated pickle of {len(data)} bytes")


@pytest.fixture
def generally(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Calls a function while pickles are followed opcode by opcode from the table, and nothing is taken for alike."""

    def run(machine: Machine, position: int, end: int, repeated: object) -> int:
        interpreter._run_counted(machine, 1 << 60)
        return machine.position

    def call(work: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "_run", run)
            patch.setattr(module, "_alone", lambda part: module._join([part], part.what))
            return work()

    return call


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of entries that were made from the result of another."""
    positions: list[int] = []
    find, first = RepeatedEntries.find, RepeatedEntries._first
    followed: list[int] = []

    def counted_first(self: RepeatedEntries, position: int, stop: int) -> tuple[object, int] | None:
        followed.append(position)
        return first(self, position, stop)

    def counted(self: RepeatedEntries, position: int) -> tuple[object, int] | None:
        result = find(self, position)
        if result is not None and position not in followed:
            positions.append(position)
        return result

    monkeypatch.setattr(RepeatedEntries, "_first", counted_first)
    monkeypatch.setattr(RepeatedEntries, "find", counted)
    return positions


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """PyTorch's own `.metadata` of 40 tensors of two shapes, one without elements, and of two values."""
    folder = tmp_path_factory.mktemp("stock") / "c"
    state = {f"w{k}": torch.zeros((4, 3) if k % 2 else (5,)) for k in range(40)}
    stock_save({"m": state, "none": torch.zeros((0, 2)), "lr": 0.1, "names": ["a"]}, folder)
    return (folder / ".metadata").read_bytes()


FLOAT, HALF = np.dtype("float32"), np.dtype("float16")


def ours(tensors: list[tuple[tuple[int, ...], tuple[int, ...], np.dtype]]) -> bytes:
    """Our `.metadata` of tensors by shape, chunk and dtype, and of an object."""
    infos, extents = {}, {}
    for k, (shape, block, dtype) in enumerate(tensors):
        name = f"layers.{k}.w"
        infos[name] = TensorInfo(name, ("layers", k, "w"), shape, dtype, grid_of_chunks(shape, block))
        extents[name] = tuple(
            Extent(f"__{n}_0.distcp", 7000 * k, 5000) for n, _ in enumerate(infos[name].chunks)
        )
    return format_metadata(DcpMetadata(infos, extents, {"o": Extent("f", 0, 9)}, {"o": ("o",)}))


OURS = ours([((140, 3), (100, 3), FLOAT) if k % 2 else ((7,), (7,), HALF) for k in range(12)])


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_metadata_of_pytorch_is_read_as_opcode_by_opcode(
    protocol: int, stock: bytes, generally: Callable[..., object], repeats: list[int]
) -> None:
    """0: as PyTorch wrote it."""
    data = pickle.dumps(pickle.loads(stock), protocol=protocol) if protocol else stock
    quick, whole = outcome(data, WORDS), metadata_of(data)
    # Read twice. Some look as if parts of them were asked for; protocol 2 replaces memo entries, for all one knows.
    assert len(repeats) > 2 * 25 if protocol != 2 else len(repeats) == 0
    assert quick == generally(lambda: outcome(data, WORDS))
    assert whole == generally(lambda: metadata_of(data))
    assert isinstance(whole, DcpMetadata)
    assert len(whole.tensors) == 41
    assert outcome(data, FOREIGN) == generally(lambda: outcome(data, FOREIGN))


def test_strides_among_the_properties_as_torch_2_15_has_them_keep_no_entry_from_being_alike(
    stock: bytes, monkeypatch: pytest.MonkeyPatch, repeats: list[int]
) -> None:
    getstate, strides = TensorProperties.__getstate__, [3, 1]
    # A tuple of its own for each tensor: pickle writes an object once.
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*getstate(self)[:5], tuple(strides)))
    whole = metadata_of(pickle.dumps(pickle.loads(stock), protocol=4))
    assert len(repeats) > 25
    assert isinstance(whole, DcpMetadata)
    assert whole == metadata_of(stock)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 104, 106, 140, 300, 70_000]), max_size=3).map(tuple)


@examples(60)
@given(
    st.lists(
        st.tuples(shapes, st.integers(0, 3), st.sampled_from([FLOAT, HALF])), min_size=1, max_size=4
    ).flatmap(lambda specs: st.lists(st.sampled_from(specs), max_size=12))
)
def test_our_metadata_of_any_shapes_is_read_as_opcode_by_opcode(
    specs: list[tuple[tuple[int, ...], int, np.dtype]],
) -> None:
    tensors = []
    for shape, cut, dtype in specs:
        block = tuple(max(1, n // 2 if axis == cut else n) for axis, n in enumerate(shape))
        tensors.append((shape, block, dtype))
    data = ours(tensors)
    whole = parse_metadata(data, "w")
    # Without `generally`, a fixture of one test for all examples.
    machine = Machine(data, WORDS, {})
    interpreter._run_counted(machine, 1 << 60)
    assert picture(read_pickle(data, WORDS, "w")) == picture(machine.stack[0])
    assert whole == module._join([module._part(data, "w")], "w")
    for (name, info), (shape, block, dtype) in zip(whole.tensors.items(), tensors, strict=True):
        assert info == TensorInfo(name, info.path, shape, dtype, grid_of_chunks(shape, block))


OPCODES = b"\x8c\x58hjKMJ()t\x85\x86\x87R\x81bused]}a\x94qr.NN\x88\x89\x8aQ\x93c\x95"


def mutant(data: bytes, rng: random.Random) -> bytes:
    bad = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        position, other = rng.randrange(2, len(bad)), rng.randrange(2, len(bad))
        match rng.randrange(6):
            case 0:
                bad[position] = rng.randrange(256)
            case 1:
                bad[position] = rng.choice(OPCODES)
            case 2:
                bad[position] ^= 1 << rng.randrange(8)
            case 3:
                del bad[position : position + rng.randrange(1, 40)]
                bad += bytes(max(0, 9 - len(bad)))
            case 4:
                bad[position:position] = bad[other : other + rng.randrange(1, 200)]
            case _:
                bad.insert(position, rng.choice(OPCODES))
    return bytes(bad)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_mutants_are_read_or_refused_as_opcode_by_opcode(
    writer: str, count: int, stock: bytes, generally: Callable[..., object]
) -> None:
    data = stock if writer == "stock" else OURS
    rng = random.Random(count)
    mutants = [mutant(data, rng) for _ in range(count)]

    def outcomes() -> list[tuple[object, object, object]]:
        return [(outcome(bad, WORDS), outcome(bad, FOREIGN), metadata_of(bad)) for bad in mutants]

    quick, general = outcomes(), generally(outcomes)
    assert isinstance(general, list)
    for bad, fast, expected in zip(mutants, quick, general, strict=True):
        assert fast == expected, bad
    assert 0 < sum(isinstance(whole, DcpMetadata) for _, _, whole in quick) < count


CLASS = Vocabulary(1 << 20, instances=frozenset({"m.C"}), calls=frozenset({"torch.Size"}))
START = (
    b"\x80\x04(\x8c\x01m\x94\x8c\x01C\x94\x93\x94\x8c\x01x\x94]\x94}("  # memo 2: the class, 3: "x", 4: a list
)
MEMO = 5
INSTANCE = b"h\x02)\x81}(h\x03K\x07ub"
CHANGE = b"\x8c\x01y\x94K\x01s"
REMEMBERED = b"h\x02)\x81\x94}\x94(h\x03K\x07ub"


def named(number: int) -> bytes:
    return b"\x8c\x04%04d\x94" % number


def by_table(data: bytes, words: Vocabulary) -> object:
    machine = Machine(data, words, {})
    interpreter._run_counted(machine, 1 << 60)
    return machine.stack[0]


def states(value: object) -> list[object]:
    """The states of the instances in the dict that `START` begins."""
    assert isinstance(value, tuple)
    (entries,) = (part for part in value if isinstance(part, dict))
    return [made.state for made in entries.values() if isinstance(made, Instance)]


@pytest.mark.parametrize("entry", [INSTANCE, REMEMBERED], ids=["plain", "remembered"])
def test_an_entry_again_is_not_followed_again(entry: bytes, repeats: list[int]) -> None:
    data = START + b"".join(named(k) + entry for k in range(9)) + b"ut."
    assert states(read_pickle(data, CLASS, "w")) == states(by_table(data, CLASS)) == [{"x": 7}] * 9
    # The last one ends before the end of the dict, not before a text.
    assert len(repeats) == 7


@pytest.mark.parametrize(
    ("change", "reads"),
    [
        # The memo entry of an instance's state; then "y" -> 1 in it, of which no other state may know.
        (b"h" + bytes([MEMO + 2]) + CHANGE, [{"x": 7, "y": 1}, {"x": 7}, {"x": 7}, {"x": 7}]),
        (b"h" + bytes([MEMO + 5]) + CHANGE, [{"x": 7}, {"x": 7, "y": 1}, {"x": 7}, {"x": 7}]),
        (b"j" + bytes([MEMO + 5, 0, 0, 0]) + CHANGE, [{"x": 7}, {"x": 7, "y": 1}, {"x": 7}, {"x": 7}]),
    ],
)
def test_states_that_can_still_be_reached_are_not_shared(change: bytes, reads: list[object]) -> None:
    data = START + b"".join(named(k) + REMEMBERED for k in range(3))
    data += b"u" + change + b"}(" + named(3) + REMEMBERED + b"ut."
    value = read_pickle(data, CLASS, "w")
    assert picture(value) == picture(by_table(data, CLASS))
    assert isinstance(value, tuple)
    assert [
        made.state for part in value if type(part) is dict for made in part.values() if type(made) is Instance
    ] == reads


def test_a_memo_entry_that_is_replaced_counts_from_then_on() -> None:
    """PUT makes 3, the key of the states, another text, for entries of the same bytes."""
    for put in (b"q\x03", b"r\x03\0\0\0"):
        other = b"\x8c\x05other" + put
        entries = [named(k) + INSTANCE for k in range(5)]
        data = START + entries[0] + entries[1] + other + b"N" + b"".join(entries[2:]) + b"ut."
        value = read_pickle(data, CLASS, "w")
        assert picture(value) == picture(by_table(data, CLASS))
        assert states(value) == [{"x": 7}] * 2 + [{"other": 7}] * 3


def test_entries_that_are_alike_up_to_a_byte_like_the_start_of_a_text_are_told_apart() -> None:
    short, long = b"h\x02)\x81}(h\x03K\x8cub", b"h\x02)\x81}(h\x03K\x8cNK\x01ub"
    data = START + b"".join(named(k) + (long if k % 2 else short) for k in range(6)) + b"ut."
    assert states(read_pickle(data, CLASS, "w")) == [{"x": 140}, {"x": 140, None: 1}] * 3


def test_instances_of_the_same_bytes_are_different_keys() -> None:
    data = START + b"N" + b"".join(named(k) + INSTANCE for k in range(4)) + b"N" + b"ut."
    assert picture(read_pickle(data, CLASS, "w")) == picture(by_table(data, CLASS))


def test_what_lies_below_an_entry_is_not_taken_for_a_part_of_it() -> None:
    """Bytes that would use up the entry's name, or leave more than one value, are followed each time."""
    for entry in (
        b"h\x02)\x81}(h\x03K\x07ub\x85",
        b"\x85h\x03",
        b"h\x02)\x81}(h\x03h\x04ub" + b"h\x04K\x01a",
    ):
        data = START + b"".join(named(k) + entry for k in range(6)) + b"ut."
        assert outcome(data, CLASS) == _outcome_by_table(data, CLASS)


def _outcome_by_table(data: bytes, words: Vocabulary) -> list[str] | str:
    try:
        return picture(by_table(data, words))
    except interpreter.Refused as error:
        return f"w: refused: {error}"
    except (IndexError, KeyError, ValueError):
        return f"w: malformed or truncated pickle of {len(data)} bytes"


def test_entries_that_differ_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    first = RepeatedEntries._first

    def counted(self: RepeatedEntries, position: int, stop: int) -> tuple[object, int] | None:
        result = first(self, position, stop)
        kept.append(len(self._known))
        return result

    monkeypatch.setattr(RepeatedEntries, "_first", counted)
    data = START + b"".join(
        named(k) + b"h\x02)\x81}(h\x03J" + k.to_bytes(4, "little") + b"ub" for k in range(9000)
    )
    assert (
        len(states(read_pickle(data + b"ut.", Vocabulary(1 << 20, instances=CLASS.instances), "w"))) == 9000
    )
    assert max(kept) == 4096


def edited(tensors: int, change: Callable[[dict[object, object], list[object]], None]) -> bytes:
    """Our metadata of tensors alike; `change` gets state_dict_metadata and the items of storage_data."""
    root = read_pickle(ours([((4, 6), (4, 6), FLOAT)] * tensors), WORDS, "w")
    assert isinstance(root, Instance)
    assert isinstance(root.state, dict)
    items = list(root.state["storage_data"].items())
    change(root.state["state_dict_metadata"], items)
    root.state["storage_data"] = dict(items)
    return write_pickle(root, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda entries, items: items.pop(3),
            r"tensor 'layers\.3\.w': nothing stored for the chunk at \(0, 0\)",
        ),
        (
            lambda entries, items: entries.pop("layers.2.w"),
            r"storage_data has an entry for unknown 'layers\.2\.w'",
        ),
        (
            lambda entries, items: items[4][1].state.update(relative_path="../f"),
            r"'layers\.4\.w': expected the name of a file in the checkpoint's directory",
        ),
        (
            lambda entries, items: items[4][1].state.update(offset=True),
            r"'layers\.4\.w': expected offset and length in __0_0.distcp to be ints of at least 0",
        ),
        (
            lambda entries, items: items[4][1].state.update(length=-1),
            r"'layers\.4\.w': expected offset and length in __0_0.distcp to be ints of at least 0",
        ),
        (
            lambda entries, items: items[4][1].state.update(transform_descriptors=["x"]),
            r"'layers\.4\.w': is stored compressed or encrypted",
        ),
        (
            lambda entries, items: items[4][0].state.update(offset=Call("torch.Size", ((0, -1),))),
            r"'layers\.4\.w': expected a torch\.Size of up to 64 ints",
        ),
        (
            lambda entries, items: items[4][0].state.update(offset=Call("torch.Size", ((0, 1),))),
            r"tensor 'layers\.4\.w': nothing stored for the chunk at \(0, 0\)",
        ),
        (
            lambda entries, items: items[4][0].state.update(fqn="layers.3.w"),
            r"'layers\.3\.w': has two storage entries for the chunk at \(0, 0\)",
        ),
    ],
)
def test_one_bad_tensor_among_alike_ones_is_named(
    change: Callable[[dict[object, object], list[object]], None], why: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^w: {why}"):
        parse_metadata(edited(8, change), "w")
