"""``jax_impl.Offload`` on a GPU: what lies in the host's memory, and the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_impl import Offload
from tests.gpu import jax_jobs as jobs
from tests.gpu.devices import needs_jax_device
from tests.gpu.jax_process import JaxProcess

pytestmark = needs_jax_device

HOST = ["pinned_host"]
ALL = Offload(moments=1.0, main_weights=True)


@pytest.mark.parametrize(
    ("offload", "options"),
    [
        (Offload(moments=1.0), {}),
        (ALL, {}),
        (ALL, {"engine": "pjit"}),
        (ALL, {"stacked": ["layers"]}),
        (Offload(moments=0.5), {"strategy": "no_shard"}),
    ],
    ids=str,
)
def test_a_state_in_the_hosts_memory_trains_with_the_bits_of_one_on_the_device(
    exact_jax_process: JaxProcess, offload: Offload, options: dict[str, Any]
) -> None:
    report = exact_jax_process.run(jobs.offloaded, offload, options)
    assert report["before"] == report["after"]
    of_weights, of_moments = report["after"]
    assert (of_weights == HOST) == offload.main_weights
    assert "pinned_host" in of_moments
    assert report["losses"] == report["expected"]
    for mine, other in zip(report["arrays"], report["expected arrays"], strict=True):
        assert np.array_equal(mine, other)


def test_the_hosts_processor_updates_what_lies_in_its_memory(exact_jax_process: JaxProcess) -> None:
    """Processors round products and sums in one step or in two, so that last bits differ."""
    report = exact_jax_process.run(jobs.offloaded, jobs.HOST_UPDATE, {})
    assert report["before"] == report["after"] == (HOST, HOST)
    np.testing.assert_allclose(report["losses"], report["expected"], rtol=1e-5)
    for mine, other in zip(report["weights"], report["expected weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6)


def test_a_checkpoint_is_loaded_into_the_hosts_memory(exact_jax_process: JaxProcess, tmp_path: Any) -> None:
    of_weights, losses, expected = exact_jax_process.run(jobs.loaded_to_host, str(tmp_path))
    assert of_weights == HOST
    assert losses == expected
