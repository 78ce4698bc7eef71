"""A leg of a relay with a planted fault: ``python -m tests.support.parity.faulty_leg FAULT FRAMEWORK JOB``.

``rope`` doubles the rotary base. ``beta2`` sets the optimizer's second beta to 0.99.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from bridge.relay.job import main

BETA2 = 0.99


def plant_rope(leg: ModuleType) -> None:
    right = leg.DecoderConfig

    def config(**sizes: Any) -> Any:
        return right(**{**sizes, "rope_theta": 2 * sizes["rope_theta"]})

    leg.DecoderConfig = config  # type: ignore[attr-defined]


def plant_beta2(leg: ModuleType) -> None:
    if hasattr(leg, "main_weight_adamw"):
        right = leg.main_weight_adamw
        leg.main_weight_adamw = lambda lr, b1, _, **others: right(lr, b1, BETA2, **others)  # type: ignore[attr-defined]
        return
    load = leg.load_checkpoint

    # After loading, which sets the betas that the checkpoint holds.
    def loaded(path: Any, model: Any, optimizer: Any, **options: Any) -> Any:
        train = load(path, model, optimizer, **options)
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], BETA2)
        return train

    leg.load_checkpoint = loaded  # type: ignore[attr-defined]


if __name__ == "__main__":
    fault, framework, file = sys.argv[1:]
    module = importlib.import_module(f"bridge.relay.{framework}_leg")
    {"rope": plant_rope, "beta2": plant_beta2}[fault](module)
    sys.argv[1:] = [file]
    main(module.run, module.rehearse, rank=int(os.environ.get("RANK", "0")))
    # As torch_leg does, and for its reason.
    os._exit(0)
