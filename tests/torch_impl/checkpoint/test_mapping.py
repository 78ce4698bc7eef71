"""Saving under another model's names and layouts, and loading from them: as ``twinshard convert`` does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.convert import convert
from bridge.checkpoints.verify import verify
from bridge.formats import open_checkpoint
from tests.support.torch_impl import mapped_jobs as jobs


def assert_equal(one: Path, other: Path) -> None:
    """All tensors and objects: names, tree paths, shapes, dtypes, and every bit."""
    with open_checkpoint(one) as found, open_checkpoint(other) as expected:
        assert {n: (i.path, i.shape, i.dtype) for n, i in found.tensors.items()} == {
            n: (i.path, i.shape, i.dtype) for n, i in expected.tensors.items()
        }
        for name in expected.tensors:
            assert found.read(name).tobytes() == expected.read(name).tobytes(), name
        assert dict(found.object_paths) == dict(expected.object_paths)
        assert dict(found.objects) == dict(expected.objects)


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    path = tmp_path / "fused.toml"
    path.write_text(jobs.QKV)
    return str(path)


KINDS = {"decoder": ("decoder", "jax"), "fused": ("", "split")}


@pytest.mark.parametrize(
    ("kind", "strategy", "dtype", "world"),
    [
        ("fused", "optim_grads_params", "float8_e4m3fn", 4),
        ("decoder", "optim_grads_params", "float16", 2),
        pytest.param("fused", "no_shard", "float16", 2, marks=pytest.mark.slow),
        pytest.param("decoder", "optim_grads", "float32", 3, marks=pytest.mark.slow),
        pytest.param("decoder", "optim", "float8_e4m3fn", 3, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_saved_under_a_mapping_is_the_plain_one_converted(
    ranks, tmp_path, mapping, kind, strategy, dtype, world
):
    name, into = KINDS[kind]
    name = name or mapping
    args = (kind, strategy, dtype, name, str(tmp_path), world == 2)
    empty = ranks.run(world, jobs.save_both, *args)
    if world == 4:
        assert max(empty) > 0, "expected a rank without rows of some parameter"
    convert(tmp_path / "plain", tmp_path / "converted", to="dcp", mapping=name, into=into)
    assert_equal(tmp_path / "mapped", tmp_path / "converted")
    assert not verify(tmp_path / "mapped").problems
    # Loaded on other ranks the runs are one: states, train values, and the next steps.
    fewer = max(1, world // 2)
    expected = ranks.run(fewer, jobs.go_on, kind, strategy, dtype, None, str(tmp_path / "plain"))
    for path in ("mapped", "plain"):
        found = ranks.run(fewer, jobs.go_on, kind, strategy, dtype, name, str(tmp_path / path))
        for (state, *rest), (state_before, *rest_before) in zip(found, expected, strict=True):
            assert state.keys() == state_before.keys()
            assert [n for n, a in state_before.items() if not np.array_equal(state[n], a)] == [], path
            assert rest == rest_before
