"""One process a platform compiles all settings of these tests, each setting once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from tests.support.compilers.setting import Compiled, Setting
from tests.support.compilers.worker import Compiler, unavailable

# Its assertions tell both sides only where pytest rewrites them.
pytest.register_assert_rewrite("tests.jax_impl.compilers.expected")

Compile = Callable[[Setting], Compiled]


def _compile(platform: str) -> Iterator[Compile]:
    if reason := unavailable(platform):
        pytest.skip(reason)
    compiler = Compiler(platform)
    yield functools.cache(compiler.compile)
    compiler.close()


@pytest.fixture(scope="package")
def gpu() -> Iterator[Compile]:
    yield from _compile("gpu")


@pytest.fixture(scope="package")
def tpu() -> Iterator[Compile]:
    yield from _compile("tpu")
