"""The axes of a policy's ``[mesh]``: one or two data-parallel ones, then at most two model axes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge.core.sharding.policy.mesh_axes import is_model_axis, why_refused
from bridge.core.sharding.policy.policy_error import PolicyError, require
from bridge.core.sharding.policy.policy_file import OPTIONS


def check_mesh(mesh: object) -> None:
    """PolicyError unless ``mesh`` maps the names of legal axes to sizes."""
    if not isinstance(mesh, Mapping):
        raise PolicyError(f"[mesh]: expected a table of axes, got {mesh!r}")
    for name, size in mesh.items():
        require(name not in OPTIONS, "[mesh]", f"axes of other names than {' and '.join(OPTIONS)}", name)
        legal = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        require(legal, "[mesh]", "axis names of letters, digits and _", name)
        require(
            size == "all" or (type(size) is int and size >= 1), f"[mesh] {name}", 'a size >= 1 or "all"', size
        )
    names = ", ".join(mesh)
    refusal = why_refused(mesh)
    if refusal is not None:
        raise PolicyError(f"[mesh]: {refusal}")
    kinds = [is_model_axis(name) for name in mesh]
    if kinds.count(False) not in (1, 2) or kinds.count(True) > 2:
        raise PolicyError(
            f"[mesh]: expected one or two data-parallel axes, then at most two model axes, got {names or 'none'}"
        )
    if kinds != sorted(kinds):
        raise PolicyError(f"[mesh]: expected data-parallel axes before model axes, got {names}")
    if list(mesh.values()).count("all") > 1:
        raise PolicyError(f'[mesh]: expected "all" for one axis at most, got it for {names}')
