"""Sharded training, implemented in both PyTorch and JAX: convert checkpoints, compare the two, plan, and train.

    import twinshard

    twinshard.convert("runs/torch/step_40", "runs/jax/step_40", mapping="llama")
    report = twinshard.parity(torch_model, jax_model, tokens, mapping="llama")
    costs = twinshard.plan("llama3-8b", "fsdp", 64, "jax", twinshard.Workload(batch=1, length=4096))
    sharded = twinshard.jax.fully_shard(model, mesh)
    twinshard.torch.fully_shard(model, mesh=mesh)

A name is imported when it is first used, so `import twinshard` needs neither PyTorch nor JAX. On the command line,
`twinshard`, or `python -m twinshard`, does the same. Types are in `twinshard-stubs`: for a single-file module, mypy
reads types only there (PEP 561).
"""

from __future__ import annotations

import importlib
from types import MappingProxyType

from bridge.core.version import __version__

_HOMES = MappingProxyType(
    {
        "CheckpointError": ("bridge.core.formats", "CheckpointError"),
        "Selection": ("bridge.checkpoints.ground.selection", "Selection"),
        "Tolerance": ("bridge.checkpoints.compare.ulp", "Tolerance"),
        "Workload": ("bridge.planning", "Workload"),
        "convert": ("bridge.checkpoints.convert", "convert"),
        "create_checkpoint": ("bridge.core.formats", "create_checkpoint"),
        "curves": ("bridge.parity.curves.compare", "compare_runs"),
        "diff": ("bridge.checkpoints.compare.diff", "diff"),
        "inspect": ("bridge.checkpoints.inspect.summary", "inspect"),
        "jax": ("jax_impl", ""),
        "open_checkpoint": ("bridge.core.formats", "open_checkpoint"),
        "parity": ("bridge.parity", "parity"),
        "plan": ("bridge.planning", "make_plan"),
        "torch": ("torch_impl", ""),
        "verify": ("bridge.checkpoints.verify", "verify"),
    }
)
"""For each name, its module and its name there; "" for the module itself."""
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'twinshard' has no attribute {name!r}: it has {', '.join(__all__)}")
    home, attribute = _HOMES[name]
    module = importlib.import_module(home)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if __name__ == "__main__":
    from bridge.commands.main import main

    main()
