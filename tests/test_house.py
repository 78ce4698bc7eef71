"""The house has three floors, and no room imports one above it or a sibling that imports it in turn.

    bridge/*                      tools, and the command line
    torch_impl    jax_impl        the runtimes
    bridge/core                   layouts, policies, formats, mappings

Imports inside functions, for type checking and by name also count, because a reader has to follow them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.support.house import (
    ROOT,
    arrows,
    circles,
    files,
    functions,
    imports,
    lines_of,
    missing_modules,
    missing_names_in_programs,
    parameters_of,
    rooms,
    tree_of,
)

FORMATS = {
    f"bridge.core.formats.{name}"
    for name in ("dcp", "orbax", "safetensors", "torch_save", "npz", "flax_msgpack")
}
# A flag is a parameter of its command, which has a file of its own.
MANY_FILES = {"bridge.commands"}
MOST_FILES, MOST_LINES = 20, 400
MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 60, 8
LONG_FUNCTIONS = {
    "bridge.core.formats.dcp.pickle._run": "opcodes that are done without a call take a third of the time",
}
FSDP2 = "the arguments of FSDP2 and of the layouts"
OPTIMIZER = "the arguments of torch's or optax's optimizer, and the dtypes of its state"
MANY_PARAMETERS = {
    "bridge.checkpoints.compare.diff.diff": "users name what they choose",
    "bridge.checkpoints.convert.conversion.convert": "users name what they choose",
    "bridge.checkpoints.jobs.array_jobs.convert_part": "the part, the arguments of a conversion, and whom to tell",
    "bridge.parity.compare.captured.capture_torch": "users name what they choose",
    "bridge.parity.compare.parity.parity": "users name what they choose of two models",
    "bridge.parity.torch.sharded.capture_sharded": "the arguments of capture_torch",
    "jax_impl.checkpoint.loading.load_checkpoint": "users name what they choose",
    "jax_impl.checkpoint.manager.save": "the arguments of save_checkpoint, the step and its metrics",
    "jax_impl.optimizer.main_weight_adamw.main_weight_adamw": OPTIMIZER,
    "jax_impl.optimizer.main_weight_muon.main_weight_muon": OPTIMIZER,
    "jax_impl.train.make_train_step": "users name what they choose of a step",
    "torch_impl.api.fully_shard": FSDP2,
    "torch_impl.optimizer.main_weight_adamw.__init__": OPTIMIZER,
    "torch_impl.optimizer.main_weight_muon.__init__": OPTIMIZER,
    "torch_impl.optimizer.main_weight_sgd.__init__": OPTIMIZER,
}


def test_nothing_imports_what_is_above_it() -> None:
    below = {"bridge.core": set(), "torch_impl": {"bridge.core"}, "jax_impl": {"bridge.core"}}
    wrong = [
        text
        for floor, targets in arrows("").items()
        for target, texts in targets.items()
        if floor in below and target not in below[floor]
        for text in texts
    ]
    assert not wrong, "\n".join(sorted(wrong))
    # `bridge` itself is the door to its rooms.
    wrong = [
        module
        for module, others in imports().items()
        if "bridge" in others and module != "bridge.commands.main"
    ]
    assert not wrong


@pytest.mark.parametrize("room", [room for room in rooms() if room])
def test_siblings_do_not_import_each_other_in_a_circle(room: str) -> None:
    imports = arrows(room)
    for members in circles(imports):
        texts = [text for a in members for b in members for text in imports[a].get(b, ())]
        pytest.fail("\n".join([f"{' and '.join(members)} are a circle:", *sorted(texts)]))


def test_modules_that_text_names_exist() -> None:
    """Names that ``importlib``, tables of lazy names and ``part`` get, which no type checker reads."""
    # Its keys are old paths, whose modules have moved.
    wrong = {
        module: names
        for module in files()
        if module != "bridge.old_paths" and (names := missing_modules(module))
    }
    assert not wrong


def test_programs_in_the_text_of_tests_import_what_exists() -> None:
    """Slow tests run seldom, so nobody saw that two of them named moved modules."""
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := missing_names_in_programs(path))
    }
    assert not wrong


def test_formats_do_not_import_each_other() -> None:
    def format_of(module: str) -> str | None:
        return next((name for name in FORMATS if (module + ".").startswith(name + ".")), None)

    # Safetensors is DCP's second serialization. A chunk of DCP is a file of torch.save, with the checksums of a zip
    # file.
    allowed = {
        ("bridge.core.formats.dcp", "bridge.core.formats.safetensors"),
        ("bridge.core.formats.torch_save", "bridge.core.formats.dcp"),
        ("bridge.core.formats.npz", "bridge.core.formats.dcp"),
    }
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if format_of(module) and format_of(other) not in (None, format_of(module))
        if (format_of(module), format_of(other)) not in allowed
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_imports_form_a_circle() -> None:
    assert not circles(imports())


def test_no_room_is_a_hall_and_no_file_is_a_book() -> None:
    for room in rooms():
        if room and room not in MANY_FILES:
            count = len(list(files()[room].parent.glob("*.py")))
            assert count <= MOST_FILES, f"{room} has {count} files"
    for module, path in files().items():
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert count <= MOST_LINES, f"{module} has {count} lines"


def test_a_package_says_in_thirty_lines_what_is_in_it() -> None:
    for room in rooms():
        if room:
            text = ast.get_docstring(tree_of(room)) or ""
            assert 1 <= len(text.splitlines()) <= 30, (
                f"{room}: the docstring has {len(text.splitlines())} lines"
            )


def test_functions_are_short_and_take_few_arguments() -> None:
    """Docstrings, ``self`` and ``cls`` do not count. A listed function that is neither long nor wide fails, too."""
    measured = [
        (f"{module}.{function.name}", lines_of(function), parameters_of(function))
        for module in files()
        for function in functions(module)
    ]
    assert {name for name, lines, _ in measured if lines > MOST_LINES_OF_A_FUNCTION} == {*LONG_FUNCTIONS}
    assert {name for name, _, parameters in measured if parameters > MOST_PARAMETERS} == {*MANY_PARAMETERS}


def test_the_top_level_holds_what_the_layout_names() -> None:
    # A test that writes into the current folder leaves a checkpoint here, and somebody commits it.
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, which tells what is committed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    top_level = {path.partition("/")[0] for path in listed.stdout.split("\0") if path}
    folders = {
        "torch_impl",
        "jax_impl",
        "bridge",
        "tests",
        "notebooks",
        "docs",
        "twinshard-stubs",
        ".ci",
        ".github",
    }
    files = {
        "twinshard.py",
        "pyproject.toml",
        ".pre-commit-config.yaml",
        "AGENTS.md",
        "CITATION.cff",
        "SECURITY.md",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".gitignore",
    }
    assert top_level <= folders | files | {"constraints.txt", "constraints-lowest.txt"}


# The links that a newcomer clicks, from README.md on, and the text in the last file that answers the question.
QUESTIONS = {
    "where is a shard boundary decided": (
        ["docs/explanation/code.md", "bridge/core/sharding/layout/planner.py"],
        "def plan_layout(",
    ),
    "who frees full weights in torch": (
        ["docs/explanation/code.md", "torch_impl/runtime/weights/compute_buffer.py"],
        "Release the memory of the whole weights",
    ),
    "who frees full weights in JAX": (
        ["docs/explanation/code.md", "jax_impl/runtime/unit/order.py"],
        "This module does not free memory: XLA frees an array",
    ),
    "what is on disk": (
        ["docs/explanation/code.md", "docs/reference/on-disk.md"],
        "which file of a checkpoint holds what",
    ),
    "how to add a model family": (
        ["docs/explanation/code.md", "docs/reference/mapping-language.md"],
        "A mapping is a TOML table of rules",
    ),
    "how to add a mesh axis": (
        ["docs/explanation/code.md", "bridge/core/sharding/policy/mesh_axes.py"],
        "MODEL_AXES = (",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_clicks_from_the_readme_to_the_answer(question: str) -> None:
    clicks, answer = QUESTIONS[question]
    assert len(clicks) <= 3
    for page, target in zip(["README.md", *clicks], clicks, strict=False):
        links = re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text(encoding="utf-8"))
        folder = os.path.dirname(page)
        assert target in {os.path.normpath(os.path.join(folder, link)) for link in links}, page
    assert answer in (ROOT / clicks[-1]).read_text(encoding="utf-8")


def test_the_glossary_is_in_order_and_each_word_has_its_file() -> None:
    lines = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line.startswith("- ")]
    words = [line.split("**")[1] for line in entries]
    assert words == sorted(set(words))
    assert [line for line in entries if "](../" not in line] == []


# Files that a reader meets, by path through the running code.
MOST_FILES_OF_A_WALK = {
    "torch": {"torch: backward": 12, "torch: optimizer.step": 7},
    "jax": {"jax: first step": 33, "jax: later step": 7},
    "convert": {"convert": 40},
    "parity": {"parity": 48},
    "plan": {"plan: first": 40, "plan: second": 40},
}


@pytest.mark.slow
@pytest.mark.parametrize("walk", MOST_FILES_OF_A_WALK)
def test_a_reader_follows_a_call_through_few_files(walk: str) -> None:
    command = [sys.executable, "-m", "tests.support.walks", walk]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = re.findall(r"^(\S.*?) +(\d+) files", output, re.M)
    assert [name for name, _ in counts] == [*MOST_FILES_OF_A_WALK[walk]], output
    assert all(int(count) <= MOST_FILES_OF_A_WALK[walk][name] for name, count in counts), output
