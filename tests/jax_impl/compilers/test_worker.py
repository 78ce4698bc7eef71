"""What crosses to the compilers' process and back, and what that process does not take."""

from __future__ import annotations

import pytest

from jax_impl.diagnostics.scheduled import Array, Scheduled
from tests.support.compilers.setting import Compiled, Setting, Stored
from tests.support.compilers.worker import Compiler


def test_targets_of_another_compiler_are_refused():
    with pytest.raises(ValueError, match="expected a target of tpu, got h100:8"):
        Compiler("tpu").compile(Setting("h100:8", "pjit"))


def test_what_was_compiled_crosses_processes_whole():
    gathers = Scheduled("all_gather", (Array("f32", 8), Array("f32", 1)), 3, True, "s")
    compiled = Compiled(1.5, 7, (gathers,), (Stored("layers/0", 8, 1, True),), (4, 2))
    assert Compiled.from_json(compiled.to_json()) == compiled
    assert compiled.sizes() == {("all_gather", 8): 3}
