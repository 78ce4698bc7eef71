"""Programs of libtpu that jaxlib cannot read, from the texts that libtpu writes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from bridge.compiling.machines import tpu_text

LOWERED = "module @jit_update attributes {mhlo.num_partitions = 4 : i32} {"


class Unreadable:
    def as_text(self) -> str:
        raise JaxRuntimeError("RET_CHECK failure: async-update instruction should have 1 operands but sees 4")


class Readable:
    def as_text(self) -> str:
        return "HloModule from jaxlib"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINSHARD_TPU_TEXTS", str(tmp_path))
    return tmp_path


def write(folder: Path, number: int, name: str, rest: str = "") -> None:
    (folder / f"{number}-TLP-hlo.txt").write_text(f"HloModule {name}, is_scheduled=true{rest}\n")


def test_what_jaxlib_reads_is_taken(folder: Path) -> None:
    write(folder, 1, "jit_update")
    assert tpu_text.text_of(Readable(), LOWERED) == "HloModule from jaxlib"


def test_what_jaxlib_cannot_read_is_the_text_of_that_program(folder: Path) -> None:
    write(folder, 1, "jit_gradients")
    write(folder, 2, "jit_update", ", second")
    write(folder, 3, "jit_update_of_others")
    (folder / "2-TLP-00-memory-space-assignment.txt").write_text("HloModule jit_update, not this one")
    assert tpu_text.text_of(Unreadable(), LOWERED) == "HloModule jit_update, is_scheduled=true, second\n"
    tpu_text.clear()
    assert [path.name for path in folder.iterdir()] == ["2-TLP-00-memory-space-assignment.txt"]
    with pytest.raises(JaxRuntimeError, match="async-update"):
        tpu_text.text_of(Unreadable(), LOWERED)


def test_two_programs_of_one_name_are_not_guessed_between(folder: Path) -> None:
    write(folder, 1, "jit_update", ", first")
    write(folder, 2, "jit_update", ", second")
    with pytest.raises(JaxRuntimeError):
        tpu_text.text_of(Unreadable(), LOWERED)


def test_without_a_folder_the_error_of_jaxlib_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINSHARD_TPU_TEXTS", raising=False)
    with pytest.raises(JaxRuntimeError, match="async-update"):
        tpu_text.text_of(Unreadable(), LOWERED)
    tpu_text.clear()


def test_a_libtpu_without_the_flags_is_started_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--given=1")
    assert tpu_text.settings("/texts", [tmp_path]) == {}
    (tmp_path / "libtpu").mkdir()
    library = tmp_path / "libtpu" / "libtpu.so"
    library.write_bytes(b"\0FLAGS_xla_jf_dump_to\0")
    assert tpu_text.settings("/texts", [tmp_path]) == {}
    flags = ("to", "hlo_text", "llo_text", "llo_pass_label_regex")
    library.write_bytes(b"".join(f"\0FLAGS_xla_jf_dump_{flag}\0".encode() for flag in flags))
    # The first library counts, as it does for imports.
    environment = tpu_text.settings("/texts", [tmp_path / "none", tmp_path])
    assert environment["LIBTPU_INIT_ARGS"].startswith(
        "--given=1 --xla_jf_dump_to=/texts --xla_jf_dump_hlo_text=true "
    )
    assert environment["TWINSHARD_TPU_TEXTS"] == "/texts"
