"""Two models side by side, one in PyTorch and one in JAX, and two trainings (``curves``).

    from bridge.parity import parity

    report = parity(torch_model, jax_model, tokens, mapping="llama", loss="next_token", weights="torch")
    print(report.summary())

The sides may also run separately: ``capture_torch`` and ``capture_jax`` write traces for ``compare_traces``.

Only the modules of ``torch`` and ``jax`` import a framework. The names below are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.parity.compare.captured import capture_jax, capture_torch, compare_traces
    from bridge.parity.compare.parity import parity, write_report
    from bridge.parity.recorded.recording import tap
    from bridge.parity.report_page.report import ParityReport

__all__ = ["ParityReport", "capture_jax", "capture_torch", "compare_traces", "parity", "tap", "write_report"]

_HOMES = {
    "ParityReport": "bridge.parity.report_page.report", "capture_jax": "bridge.parity.compare.captured",
    "capture_torch": "bridge.parity.compare.captured", "compare_traces": "bridge.parity.compare.captured",
    "parity": "bridge.parity.compare.parity", "tap": "bridge.parity.recorded.recording",
    "write_report": "bridge.parity.compare.parity",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(
                f"module 'bridge.parity' has no attribute {name!r}: it has {', '.join(__all__)}"
            )
        return getattr(importlib.import_module(_HOMES[name]), name)
