"""`twinshard inspect --layout`: drawings of layout files and of stored chunks, and one message for bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from bridge.checkpoints.inspect.chart import chunks_figure, layout_figure, save_picture
from bridge.checkpoints.inspect.summary import chunk_lines
from bridge.core.formats import create_checkpoint
from bridge.core.formats.tensors.base import Box, TensorInfo
from bridge.core.sharding import Layout, plan_layout
from bridge.core.sharding.layout.drawing import row_bars
from tests.checkpoints.test_convert import write
from tests.commands.test_main import call, command

# Two buffers of 4 x 27 and 4 x 24 elements; the last six elements of the first are padding.
SLOTS = [
    {"block": 1, "buffer": 1, "name": "wq", "offset": 54, "shape": [7, 6]},
    {"block": 1, "buffer": 0, "name": "wo", "offset": 60, "shape": [6, 7]},
    {"block": 1, "buffer": 1, "name": "up", "offset": 0, "shape": [9, 6]},
    {"block": 1, "buffer": 0, "name": "down", "offset": 0, "shape": [6, 9]},
    {"block": 1, "buffer": 0, "name": "norm", "offset": 54, "shape": [6]},
]
LAYOUT = {"num_shards": 4, "shard_sizes": [27, 24], "slots": SLOTS}
DRAWING = """\
4 shards x 27 + 24 elements, 198 real, 3.03 % padding
rank 0 |ddddddddddddddddddddddddddd|cccccccccccccccccccccccc|
rank 1 |ddddddddddddddddddddddddddd|cccccccccccccccccccccccc|
rank 2 |eeeeeebbbbbbbbbbbbbbbbbbbbb|ccccccaaaaaaaaaaaaaaaaaa|
rank 3 |bbbbbbbbbbbbbbbbbbbbb......|aaaaaaaaaaaaaaaaaaaaaaaa|
a  wq (7, 6): rows 0:0 0:0 0:3 3:7
b  wo (6, 7): rows 0:0 0:0 0:3 3:6
c  up (9, 6): rows 0:4 4:8 8:9 9:9
d  down (6, 9): rows 0:3 3:6 6:6 6:6
e  norm (6,): rows 0:0 0:0 0:6 6:6
fingerprint 0a49a03370d4d8aa7cfa52cc7e7aabf598be073874ba709f4b0d981f118eb8ed
"""


@pytest.fixture
def layout_file(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT))
    return path


def changed(slot: int | None = None, **fields: object) -> str:
    """The layout with fields of its own, or of one slot, replaced."""
    if slot is None:
        return json.dumps({**LAYOUT, **fields})
    slots = [{**original, **fields} if k == slot else original for k, original in enumerate(SLOTS)]
    return json.dumps({**LAYOUT, "slots": slots})


def one_tensor(rows: int, columns: int, num_shards: int, size: int, offset: int = 0) -> Layout:
    slot = {"block": 1, "buffer": 0, "name": "w", "offset": offset, "shape": [rows, columns]}
    return Layout.from_json(json.dumps({"num_shards": num_shards, "shard_sizes": [size], "slots": [slot]}))


def drawn_elements(layout: Layout, width: int) -> list[tuple[int, int, int, str]]:
    """``(rank, buffer, column, letter)`` of a text picture."""
    elements = []
    for line in layout.render(width).splitlines():
        match = re.match(r"rank (\d+) +\|(.*)\|$", line)
        if match:
            for buffer, columns in enumerate(match[2].split("|")):
                elements += [(int(match[1]), buffer, k, letter) for k, letter in enumerate(columns)]
    return elements


def test_a_layout_file_is_drawn_to_scale(layout_file: Path) -> None:
    done = command("inspect", layout_file, "--layout")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", DRAWING)


def test_the_drawing_of_a_planned_layout_says_what_the_planner_says(tmp_path: Path) -> None:
    shapes = {"stack": (3, 5, 4), "w": (13, 7), "b": (11,), "none": (0, 4), "s": (), "v": (6, 10)}
    for granularity in ("row", "block(2)", "tensor"):
        planned = plan_layout(shapes, 5, granularity=granularity, align=1)
        (tmp_path / "layout.json").write_text(planned.to_json())
        drawn = call("inspect", tmp_path / "layout.json", "--layout").stdout
        assert drawn == f"{planned}\nfingerprint {planned.fingerprint}\n"
        report = json.loads(call("inspect", tmp_path / "layout.json", "--layout", "--json").stdout)
        assert report["fingerprint"] == planned.fingerprint
        assert report["overhead"] == pytest.approx(planned.overhead(), abs=1e-12)
        assert report["padded"] == planned.padded_size
        for rank in range(5):
            rows = {tensor["name"]: tuple(tensor["rows"][rank]) for tensor in report["tensors"]}
            assert rows == planned.row_ranges(rank)


def test_every_column_shows_what_the_elements_below_it_are() -> None:
    layout = Layout.from_json(json.dumps(LAYOUT))
    owner = {}
    for letter, slot in zip("abcde", SLOTS, strict=True):
        for k in range(int(np.prod(slot["shape"]))):
            owner[slot["buffer"], slot["offset"] + k] = letter
    for rank in range(4):
        assert all(part.start < part.stop for buffer in (0, 1) for part in layout.parts(rank, buffer))
    for width in (80, 51, 30, 13):
        cells = drawn_elements(layout, width)
        columns = {buffer: max(c for _, b, c, _ in cells if b == buffer) + 1 for buffer in (0, 1)}
        assert sum(columns.values()) <= width
        assert abs(columns[0] / columns[1] - 27 / 24) < 2.5 / columns[1]
        for rank, buffer, column, letter in cells:
            size = layout.shard_sizes[buffer]
            # The last element that begins in this column decides, padding only where all of it is.
            below = [e for e in range(size) if e * columns[buffer] // size == column]
            held = [owner.get((buffer, rank * size + e)) for e in below]
            assert letter == ([mark for mark in held if mark] or ["."])[-1]


def test_many_ranks_and_tensors_are_elided() -> None:
    lines = str(one_tensor(17, 3, 17, 3)).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rank")] == [
        str(rank) for rank in (*range(8), *range(9, 17))
    ]
    assert lines[9] == "  ..."
    assert lines[-1] == "a  w (17, 3): rows " + " ".join(
        "..." if rank == 8 else f"{rank}:{rank + 1}" for rank in range(17)
    )
    assert sum(line.startswith("rank") for line in str(one_tensor(16, 3, 16, 3)).splitlines()) == 16
    slots = [{"block": 1, "buffer": 0, "name": f"t{i}", "offset": i, "shape": [1]} for i in range(60)]
    layout = Layout.from_json(json.dumps({"num_shards": 1, "shard_sizes": [60], "slots": slots}))
    lines = str(layout).splitlines()
    assert lines[1] == f"rank 0 |{'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh'}|"
    assert lines[-1] == "... and 20 more tensors"
    assert sum(": rows" in line for line in lines) == 40


def test_empty_tensors_and_empty_layouts_are_drawn(tmp_path: Path) -> None:
    slots = [{"block": 1, "buffer": 0, "name": "none", "offset": 0, "shape": [0, 3]}]
    layout = Layout.from_json(json.dumps({"num_shards": 2, "shard_sizes": [], "slots": slots}))
    assert str(layout).splitlines() == [
        "2 shards x 0 elements, 0 real, 0.00 % padding",
        "rank 0 ||",
        "rank 1 ||",
        "-  none (0, 3): no elements",
    ]
    save_picture(layout_figure(layout), tmp_path / "empty.png")
    save_picture(chunks_figure([]), tmp_path / "nothing.png")


def test_the_numbers_of_a_layout_as_json(layout_file: Path) -> None:
    report = json.loads(call("inspect", layout_file, "--layout", "--json").stdout)
    assert report["buffers"] == [
        {"shard_size": 27, "elements": 102, "padding": 6},
        {"shard_size": 24, "elements": 96, "padding": 0},
    ]
    assert (report["num_shards"], report["elements"], report["padded"]) == (4, 198, 204)
    assert report["overhead"] == pytest.approx(6 / 198)
    assert report["fingerprint"] == DRAWING.split()[-1]
    assert report["tensors"][0] == {**SLOTS[0], "rows": [[0, 0], [0, 0], [0, 3], [3, 7]]}
    layout_file.write_text(
        json.dumps(
            {
                "num_shards": 17,
                "shard_sizes": [3],
                "slots": [{**SLOTS[0], "buffer": 0, "offset": 0, "shape": [3]}],
            }
        )
    )
    report = json.loads(call("inspect", layout_file, "--layout", "--json").stdout)
    assert report["tensors"][0]["rows"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON, got a text that does not parse"),
        (json.dumps(LAYOUT)[:-20], "expected JSON, got a text that does not parse"),
        ("[" * 100_000, "expected JSON, got a text that does not parse"),
        ("\udcff", "line 1: expected JSON in UTF-8, got byte 0xff"),
        ("9" * 5000, "expected JSON, got a text that does not parse"),
        (
            json.dumps({**LAYOUT, "slots": [{**SLOTS[0], "shape": [2**62] * 300}]}),
            "'wq': expected at most 2**63 - 1 elements",
        ),
        ("[1]", "expected an object with num_shards, shard_sizes, slots, got [1]"),
        ("{}", "got one with none"),
        (json.dumps({**LAYOUT, "granularity": "row"}), "got one with 'granularity', 'num_shards'"),
        (changed(num_shards=0), "num_shards: expected a whole number from 1 to 2**63 - 1, got 0"),
        (changed(num_shards=True), "num_shards: expected a whole number from 1 to 2**63 - 1, got True"),
        (
            changed(num_shards=2**63),
            "num_shards: expected a whole number from 1 to 2**63 - 1, got 92233720368",
        ),
        (changed(shard_sizes=27), "shard_sizes: expected a list, got 27"),
        (changed(shard_sizes=[27, 0]), "shard_sizes: expected a whole number from 1"),
        (changed(shard_sizes=[27, 24.0]), "shard_sizes: expected a whole number from 1"),
        (changed(shard_sizes=[27, 24, 3]), "buffer 2: expected parameters in it, got none"),
        (changed(slots={}), "slots: expected a list, got {}"),
        (changed(slots=[3]), "slot 0: expected an object with block, buffer, name, offset, shape, got 3"),
        (changed(1, name=3), "slot 1: expected a name in quotes, got 3"),
        (changed(1, name="wq"), "tensor names: expected each once, got 'wq' more than once"),
        (changed(1, shape=[6, -7]), "shape of 'wo': expected a whole number from 0 to 2**63 - 1, got -7"),
        (changed(1, shape="67"), "shape of 'wo': expected a list, got '67'"),
        (
            changed(1, shape=[0, 7]),
            "place of 'wo', which has no elements: expected buffer 0, offset 0, got buffer 0, offset 60",
        ),
        (changed(1, block=0), "block of 'wo': expected 1 to 6 rows, got 0"),
        (changed(1, block=7), "block of 'wo': expected 1 to 6 rows, got 7"),
        (
            changed(1, block=2),
            "expected shard boundaries at multiples of 14 elements from its start (blocks of 2 rows), got one at 21",
        ),
        (changed(1, buffer=2), "buffer of 'wo': expected one of 2, got 2"),
        (changed(1, offset=59), "offset of 'wo': expected at least 60, the end of 'norm', got 59"),
        (
            changed(1, offset=61),
            "expected shard boundaries at multiples of 7 elements from its start (blocks of 1 rows), got one at 20",
        ),
        (
            changed(1, offset=67),
            "'wo': expected to end within the 108 elements of buffer 0 (4 shards of 27), got end 109",
        ),
        (changed(1, offset=-1), "offset of 'wo': expected a whole number from 0"),
    ],
)
def test_a_file_that_is_no_layout_is_named_with_what_was_expected(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "bad.json").write_text(text, errors="surrogateescape")
    result = call("inspect", tmp_path / "bad.json", "--layout", "--picture", tmp_path / "new.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: layout file {tmp_path / 'bad.json'}")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_a_boundary_far_into_a_tensor_is_checked() -> None:
    with pytest.raises(ValueError, match=r"multiples of 4 elements from its start .*, got one at 10"):
        one_tensor(5, 4, 4, 6, offset=2)
    assert one_tensor(6, 3, 4, 6).row_range("w", 2) == (4, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("none", "--layout"),
            "error: none does not exist: expected a layout file or a checkpoint directory there",
        ),
        (("empty", "--layout"), "found an empty directory"),
        (("folder", "--layout"), "error: "),
        (("layout.json",), "error: layout.json is a file of another kind"),
        (
            ("layout.json", "--layout", "--picture", "a.jpg"),
            "picture a.jpg: expected a name ending in .png, .svg, .pdf",
        ),
        (("layout.json", "--layout", "--picture", "a"), "picture a: expected a name ending in"),
        (
            ("layout.json", "--layout", "--picture", "none/a.png"),
            "expected an existing directory none, found none",
        ),
        (
            ("layout.json", "--layout", "--picture", "dir.png"),
            "expected a file or nothing there, found a directory",
        ),
        (("dcp", "--layout", "--picture", "none/a.png"), "expected an existing directory none, found none"),
    ],
)
def test_an_error_is_one_message_with_status_2_and_writes_nothing(
    tmp_path: Path,
    layout_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    write(tmp_path / "dcp", "dcp", {"w": np.ones(3)}, {})
    for name in ("empty", "folder", "dir.png"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = call("inspect", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_picture_needs_layout_beside_it(layout_file: Path) -> None:
    result = call("inspect", layout_file, "--picture", "a.png")
    assert result.exit_code == 2
    assert "--picture needs --layout" in " ".join(result.stderr.split())


def test_missing_matplotlib_is_said(layout_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call("inspect", layout_file, "--layout").exit_code == 0
    result = call("inspect", layout_file, "--layout", "--picture", layout_file.with_suffix(".png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: pictures need matplotlib")


def test_drawing_needs_neither_matplotlib_nor_a_runtime(layout_file: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['matplotlib', 'torch', 'jax', 'torch_impl', 'jax_impl']))\n"
        "from bridge.commands.main import app\n"
        "app(['inspect', sys.argv[1], '--layout'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, layout_file], capture_output=True, text=True)
    assert done.stdout == DRAWING


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_picture_is_written_in_the_format_of_its_name(
    tmp_path: Path, layout_file: Path, suffix: str
) -> None:
    target = tmp_path / f"a.{suffix}"
    target.write_text("old")
    result = call("inspect", layout_file, "--layout", "--picture", target)
    assert (result.exit_code, result.stdout) == (0, DRAWING)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert target.read_bytes().startswith(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([target.name, "layout.json"])


def test_a_picture_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fail(self: Figure, path: Path, **options: object) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    (tmp_path / "a.png").write_text("old")
    figure = layout_figure(Layout.from_json(json.dumps(LAYOUT)))
    with pytest.raises(OSError, match="disk full"):
        save_picture(figure, tmp_path / "a.png")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "old")]


def bars_of(figure: Any) -> dict[int, list[tuple[float, float, str]]]:
    """``{row: [(left, right, colour or hatch)]}`` of the rectangles in a figure, in whole-width units."""
    rows: dict[int, list[tuple[float, float, str]]] = {}
    for collection in figure.axes[0].collections:
        colours = collection.get_facecolor()
        for path, k in zip(collection.get_paths(), range(len(collection.get_paths())), strict=True):
            xs, ys = path.vertices[:, 0], path.vertices[:, 1]
            colour = collection.get_hatch() or str(np.round(colours[min(k, len(colours) - 1)], 3).tolist())
            rows.setdefault(round((ys.min() + ys.max()) / 2), []).append((xs.min(), xs.max(), colour))
    return rows


def test_the_picture_shows_the_parts_of_every_rank_to_scale() -> None:
    layout = Layout.from_json(json.dumps(LAYOUT))
    rows = bars_of(layout_figure(layout))
    colours: dict[int, set[str]] = {}
    for rank in range(4):
        bars = sorted(bar for bar in rows[rank] if not bar[2].startswith("/"))
        shards = sorted(bar for bar in rows[rank] if bar[2].startswith("/"))
        assert [round(51 * (b - a), 6) for a, b, _ in shards] == [27, 24]
        assert shards[0][1] < shards[1][0]
        expected = [
            (shards[b][0] + part.start / 51, shards[b][0] + part.stop / 51, part.number)
            for b in (0, 1)
            for part in layout.parts(rank, b)
        ]
        assert len(bars) == len(expected)
        for (left, right, colour), (start, stop, tensor) in zip(bars, expected, strict=True):
            assert (left, right) == (pytest.approx(start), pytest.approx(stop))
            colours.setdefault(tensor, set()).add(colour)
    assert sorted(colours) == [0, 1, 2, 3, 4]
    assert all(len(shades) == 1 for shades in colours.values())
    assert len(set.union(*colours.values())) == 5


def test_the_png_has_colours_and_names(tmp_path: Path) -> None:
    figure = layout_figure(Layout.from_json(json.dumps(LAYOUT)))
    names = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(names) == sorted(["down", "down", "norm", "wo", "wo", "up", "up", "up", "wq", "wq"])
    save_picture(figure, tmp_path / "a.png")
    pixels = imread(tmp_path / "a.png")
    assert pixels.shape[1] > 800
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def test_pictures_elide_ranks_and_take_any_name(tmp_path: Path) -> None:
    figure = layout_figure(one_tensor(33, 3, 33, 3))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 33
    assert (labels[15], labels[16], labels[17]) == ("rank 15", "...", "rank 17")
    assert len(layout_figure(one_tensor(32, 3, 32, 3)).axes[0].get_yticklabels()) == 32
    text = changed(0, name="$x^{_").replace('"down"', '"d\\u001b[2J"')
    save_picture(layout_figure(Layout.from_json(text)), tmp_path / "odd.png")
    info = TensorInfo("$_{" * 50, ("w",), (4,), np.dtype(np.float32), (Box((0,), (4,)),))
    save_picture(chunks_figure([info]), tmp_path / "odd.svg")


def tensor(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorInfo:
    return TensorInfo("w", ("w",), shape, np.dtype(np.float32), tuple(Box(*chunk) for chunk in chunks))


def test_the_chunks_of_a_checkpoint_are_drawn_by_rows(tmp_path: Path) -> None:
    with create_checkpoint(tmp_path / "a", "orbax") as writer:
        for name, shape, chunk in (
            ("grid", (10, 8), (4, 4)),
            ("stack", (4, 6, 5), (1, 4, 5)),
            ("v", (7,), (3,)),
        ):
            info = writer.add_tensor((name,), shape, np.dtype(np.float32), chunk_shape=chunk)
            for box in writer.chunks(info.name):
                writer.write(info.name, box, np.zeros(box.sizes, np.float32))
    done = command("inspect", tmp_path / "a", "--layout", "--picture", tmp_path / "a.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "grid [10, 8]: rows 0:10",
        "  |aaaaccccee| columns 0:4",
        "  |bbbbddddff| columns 4:8",
        "  a[0:4, 0:4] b[0:4, 4:8] c[4:8, 0:4] d[4:8, 4:8] e[8:10, 0:4] f[8:10, 4:8]",
        "stack [4, 6, 5]: rows 0:24",
        "  |aaaabbccccddeeeeffgggghh|",
        "  a[0:1, 0:4, 0:5] b[0:1, 4:6, 0:5] c[1:2, 0:4, 0:5] d[1:2, 4:6, 0:5] e[2:3, 0:4, 0:5] "
        "f[2:3, 4:6, 0:5] g[3:4, 0:4, 0:5] h[3:4, 4:6, 0:5]",
        "v [7]: rows 0:7",
        "  |aaabbbc|",
        "  a[0:3] b[3:6] c[6:7]",
    ]
    assert imread(tmp_path / "a.png").shape[1] > 800
    plain = json.loads(call("inspect", tmp_path / "a", "--json").stdout)
    assert json.loads(call("inspect", tmp_path / "a", "--layout", "--json").stdout) == plain


def test_bars_are_exact_where_there_is_room_and_to_scale_where_not() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        shape = tuple(int(n) for n in generator.integers(1, 7, size=int(generator.integers(0, 4))))
        cuts = [sorted({0, n, *generator.integers(0, n, size=2).tolist()}) for n in shape]
        grids = [list(itertools.pairwise(cut)) for cut in cuts]
        boxes = [()]
        for grid in grids:
            boxes = [(*box, span) for box in boxes for span in grid]
        chunks = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]
        chunks = [chunks[k] for k in generator.permutation(len(chunks))]
        owner = np.full(shape, -1)
        for number, (offsets, sizes) in enumerate(chunks):
            owner[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = number
        rows = owner.reshape(-1, shape[-1] if len(shape) > 1 else 1)
        for width in (1000, 4):
            bars = row_bars(shape, tensor(shape, *chunks).chunks, width)
            columns = min(width, len(rows))
            middle = [(2 * k + 1) * len(rows) // (2 * columns) for k in range(columns)]
            assert len(bars) == (len(grids[-1]) if len(shape) > 1 else 1)
            for bar in bars:
                first = bar.columns[0] if bar.columns else 0
                assert list(bar.cells) == rows[middle, first].tolist()


def test_chunks_that_differ_in_columns_leave_each_other_room() -> None:
    info = tensor((4, 6), ((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 6)), ((4, 0), (0, 2)))
    assert chunk_lines([info]) == [
        "w [4, 6]: rows 0:4",
        "  |aa..| columns 0:3",
        "  |..cc| columns 0:6",
        "  |bb..| columns 3:6",
        "  a[0:2, 0:3] b[0:2, 3:6] c[2:4, 0:6]",
    ]
    rows = bars_of(chunks_figure([info]))
    drawn = [[(a, b) for a, b, colour in rows[y] if not colour.startswith("/")] for y in range(3)]
    assert drawn == [[(0.0, 0.5)], [(0.5, 1.0)], [(0.0, 0.5)]]


def test_many_chunks_and_tensors_are_elided() -> None:
    info = tensor((2, 40), *(((0, k), (2, 1)) for k in range(40)))
    lines = chunk_lines([info])
    assert lines[17] == "  ... and 24 more ranges of columns"
    assert lines[18].endswith("p[0:2, 15:16] and 24 more")
    assert chunk_lines([info] * 41)[-1] == "... and 1 more tensors"
    assert chunk_lines([tensor((0, 3)), tensor((), ((), ()))]) == [
        "w [0, 3]: no elements",
        "w []: rows 0:1",
        "  |a|",
        "  a[]",
    ]


def test_the_rows_of_a_chunk_picture_are_named() -> None:
    named = [dataclasses.replace(tensor((2, 1), ((0, 0), (2, 1))), name="n" * length) for length in (60, 61)]
    wide = tensor((2, 18), *(((0, k), (2, 1)) for k in range(18)))
    axis = chunks_figure([*named, wide]).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        *("n" * 60, "..." + "n" * 60),
        *(f"w [..., {k}:{k + 1}]" for k in range(16)),
        "and 2 more",
    ]
    assert axis.get_title() == "rows of each tensor by the number of the chunk that stores them"
    assert chunks_figure([tensor((0, 3))] * 41).axes[0].get_title().endswith("them; 1 more tensors")


def test_the_axis_of_a_layout_picture_names_its_buffers_and_the_padding() -> None:
    axis = layout_figure(Layout.from_json(json.dumps(LAYOUT))).axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == [
        "buffer 0\n27 elements",
        "buffer 1\n24 elements",
    ]
    assert axis.get_xticks().tolist() == pytest.approx([27 / 51 / 2, 0.02 + (27 + 24 / 2) / 51])
    assert axis.get_title() == "4 shards, 198 elements, 3.03 % padding"
    slots = [
        {**SLOTS[0], "buffer": k, "name": f"t{k}", "offset": 0, "shape": [size]}
        for k, size in enumerate((54, 6, 4))
    ]
    narrow = Layout.from_json(changed(num_shards=2, shard_sizes=[27, 3, 2], slots=slots))
    # Labels of narrow buffers stand by turns on two levels.
    assert [label.get_text() for label in layout_figure(narrow).axes[0].get_xticklabels()] == [
        "buffer 0\n27 elements",
        "\n\nbuffer 1\n3 elements",
        "buffer 2\n2 elements",
    ]


def test_the_chunk_picture_has_the_runs_of_every_bar() -> None:
    rows = bars_of(chunks_figure([tensor((4, 2), ((0, 0), (3, 2)), ((3, 0), (1, 2)))]))
    assert [(a, b) for a, b, colour in rows[0] if not colour.startswith("/")] == [(0.0, 0.75), (0.75, 1.0)]


def test_nothing_but_metadata_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.core.formats.orbax.reader import OrbaxReader

    write(tmp_path / "a", "orbax", {"w": np.ones(3)}, {})
    monkeypatch.setattr(OrbaxReader, "read", None)
    assert "  |aaa|\n" in call("inspect", tmp_path / "a", "--layout").stdout


def test_a_layout_cannot_be_changed() -> None:
    layout = Layout.from_json(json.dumps(LAYOUT))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_shards = 5  # type: ignore[misc]  # the mistake under test
