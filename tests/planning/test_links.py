"""Times of collectives against the formulas of a ring, by hand."""

from __future__ import annotations

import pytest

from bridge.compiling.machines.hardware import HARDWARE, Fabric, Machine, machine_named, seconds_on_links
from bridge.compiling.machines.targets import CARDS, TPUS
from bridge.core.hlo.collectives import Transfer
from bridge.planning.models.errors import PlanError

GB = 10**9


def seconds(machine: str, collective: str, group: range | tuple[int, ...]) -> float:
    """Of a gigabyte."""
    return seconds_on_links(Transfer(collective, GB, (tuple(group),)), machine_named(machine))


@pytest.mark.parametrize(
    ("machine", "collective", "group", "expected"),
    [
        # NVLink, 450 GB/s: 7 of 8 parts come from elsewhere.
        ("h100:8", "all_gather", range(8), 7 / 8 / 450),
        ("h100:8", "reduce_scatter", range(8), 7 / 8 / 450),
        ("h100:8", "psum", range(8), 2 * 7 / 8 / 450),
        ("h100:64", "all_gather", range(8, 16), 7 / 8 / 450),
        # Eight adapters of 50 GB/s a host together, below NVLink.
        ("h100:64", "all_gather", range(64), 63 / 64 / 400),
        # One GPU of each host has one adapter.
        ("h100:64", "psum", range(0, 64, 8), 2 * 7 / 8 / 50),
        ("h100:64", "all_gather", (0, 1, 8, 9), 3 / 4 / 100),
        # A GPU keeps 1 of 64 parts, 7 go by NVLink, 56 by its adapter.
        ("h100:64", "all_to_all", range(64), 56 / 64 / 50),
        ("h100:8", "all_to_all", range(8), 7 / 8 / 450),
        ("h100:64", "ppermute", (0, 8), 1 / 50),
        ("h100:64", "ppermute", (0, 7), 1 / 450),
        ("h100:64", "ppermute", (3, 3), 0),
        ("a100:16", "all_gather", range(16), 15 / 16 / 200),
        # Two rings of 16, both ways: 4 x 45 GB/s.
        ("v5e:16x16", "all_gather", range(256), 255 / 256 / 180),
        ("v5e:16x16", "all_gather", range(16), 15 / 16 / 90),
        ("v5e:16x16", "all_gather", range(0, 256, 16), 15 / 16 / 90),
        # Nothing closes a part of an axis, nor a small slice: one way at the end of a line.
        ("v5e:16x16", "all_gather", range(4), 3 / 4 / 45),
        ("v5e:4x4", "psum", range(16), 2 * 15 / 16 / 90),
        ("v5p:4x4x4", "all_gather", range(64), 63 / 64 / 540),
        ("v5p:2x2x4", "all_gather", range(16), 15 / 16 / 270),
        # A ring of 16: pieces of a sixteenth go 4 chips far on average, 16 x 16 / 16 / 4 of them on 2 links.
        ("v5e:16x16", "all_to_all", range(16), 4 / 90),
        ("v5p:4x4x4", "ppermute", (0, 1), 1 / 90),
    ],
)
def test_a_gigabyte(machine: str, collective: str, group: range, expected: float) -> None:
    assert seconds(machine, collective, group) == pytest.approx(expected)


def test_the_slowest_pair_of_a_permutation_counts() -> None:
    machine = Machine(HARDWARE["h100"], (16,))
    pairs = ((0, 1), (7, 8))
    assert seconds_on_links(Transfer("ppermute", GB, pairs), machine) == pytest.approx(1 / 50)


def test_a_transfer_without_groups_takes_no_time() -> None:
    assert seconds_on_links(Transfer("psum", GB), machine_named("h100:8")) == 0


def test_a_program_of_more_devices_is_refused() -> None:
    with pytest.raises(
        ValueError, match="program for 8 devices, as the machine has, got a psum with device 15"
    ):
        seconds("h100:8", "psum", range(16))


def test_a_machine_by_name() -> None:
    assert machine_named("v5e:4x8") == Machine(HARDWARE["v5e"], (4, 8))
    assert machine_named("v5e:4x8").devices == 32
    for wrong in ("h900:8", "h100", "h100:", "h100:x", "v5e:4x-4", "v5p:4x4", "h100:0", "h100:8x8"):
        with pytest.raises(PlanError, match=r"^target.*: expected"):
            machine_named(wrong)
    for chip, sizes in (("v5p", (4, 4)), ("h100", (0,)), ("h100", (8, 8))):
        with pytest.raises(PlanError, match=r"expected [13] sizes of at least 1"):
            Machine(HARDWARE[chip], sizes)


def test_every_target_has_its_hardware() -> None:
    assert set(HARDWARE) == {*CARDS, *TPUS}


def test_the_table_is_ordered_as_the_cards_are() -> None:
    """A slip of a digit or unit would break an order that the data sheets have."""
    for hardware in HARDWARE.values():
        peaks = hardware.peaks
        assert (
            peaks["f32_highest"] < peaks["f32_high"] <= peaks["f32"] <= peaks["bf16"] <= peaks["f8"] <= 5e15
        )
        assert peaks["bf16"] > 1e14
        # Products of 8192 are bound by compute, by far.
        assert 100 < peaks["bf16"] / hardware.bandwidth < 600
        if isinstance(hardware.links, Fabric):
            assert hardware.bandwidth > hardware.links.inside > hardware.links.between > 1e10
        else:
            assert hardware.bandwidth > 6 * hardware.links.link > 2e11
    with pytest.raises(ValueError, match=r"v5e: expected matrix products in bf16, .*, got f64"):
        HARDWARE["v5e"].peak("f64")
