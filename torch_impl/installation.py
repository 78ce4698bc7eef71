"""``install``: programs that import FSDP2 by themselves get this package's ``fully_shard`` instead of torch's.

Frameworks (accelerate, transformers, TRL, torchtitan, torchtune) import ``fully_shard`` and ``FSDPModule`` from torch,
where a user cannot change the import. ``install`` puts this package's under torch's names; nothing else of torch
changes. Names that modules imported earlier are theirs: they are left, and told of by a warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.distributed import fsdp

from torch_impl.api import fully_shard
from torch_impl.fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

_OURS = {
    "fully_shard": fully_shard,
    "FSDPModule": FSDPModule,
    "UnshardHandle": UnshardHandle,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
# By torch's own names, so taken before anything is replaced.
_TORCHS = {name: getattr(fsdp, name) for name in _OURS}
# torch's pipelines hold the two names and reach into FSDP2's private state by them: they keep torch's.
_KEEP_TORCHS = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")


@dataclass(frozen=True)
class Installation(AbstractContextManager["Installation"]):
    """What one ``install`` replaced; leaving it as a context manager undoes that.

    replaced: paths of the names that are this package's now, such as ``torch.distributed.fsdp.fully_shard``. Empty for
        an ``install`` inside of another one.
    bound_before: paths of names in modules that had been imported before and keep torch's, such as
        ``trl.models.utils.FSDPModule``. The model that such a module shards is torch's FSDP2; its ``isinstance`` does
        not know this package's sharded modules.
    """

    replaced: tuple[str, ...]
    bound_before: tuple[str, ...]

    def __exit__(self, *error: object) -> None:
        _put(_OURS, _TORCHS, self.replaced)


def install() -> Installation:
    """Put this package's ``fully_shard`` and what belongs to it under torch's names, until ``uninstall``.

    Replaced are ``fully_shard``, ``FSDPModule``, ``UnshardHandle``, ``register_fsdp_forward_method`` and
    ``share_comm_ctx`` of ``torch.distributed.fsdp`` and of its older place, ``torch.distributed._composable.fsdp``.
    torch's ``MixedPrecisionPolicy``, ``CPUOffloadPolicy``, ``OffloadPolicy`` and ``DataParallelMeshDims`` stay, since
    this package's ``fully_shard`` takes them. torch's own modules go on using torch's.

    Call it before the program's imports, on all ranks::

        import torch_impl
        torch_impl.install()
        import accelerate, trl  # these and all later imports find this package's

    or for a while: ``with torch_impl.install(): ...``. A model that was sharded meanwhile stays what it is. A second
    call changes nothing, and leaving it undoes nothing.

    A module that had imported one of the names before keeps torch's: the model that it shards is torch's FSDP2, and
    its ``isinstance(model, FSDPModule)`` is False for this package's models. A UserWarning lists such modules, as does
    ``Installation.bound_before``; import them after ``install``, or replace the name there.
    """
    for path in _KEEP_TORCHS:
        importlib.import_module(path)
    replaced = _put(_TORCHS, _OURS)
    bound = _bound_before()
    if replaced and bound:
        warnings.warn(
            f"torch_impl.install: {', '.join(bound)} was imported from torch before and stays torch's FSDP2, which "
            "does not know torch_impl's modules: import these modules after torch_impl.install()",
            UserWarning,
            stacklevel=2,
        )
    return Installation(replaced, bound)


def uninstall() -> None:
    """Give torch its names back; without ``install`` before, nothing happens.

    A name that someone else replaced meanwhile is left alone. Models keep the ``fully_shard`` that sharded them.
    """
    _put(_OURS, _TORCHS)


def _places() -> list[ModuleType]:
    """The modules from which programs import FSDP2, as far as this torch has them."""
    places: list[ModuleType] = [fsdp]
    try:
        places.append(importlib.import_module("torch.distributed._composable.fsdp"))
        # Its name is that of the function, which hides the module as an attribute.
        places.append(importlib.import_module("torch.distributed._composable.fsdp.fully_shard"))
    except ModuleNotFoundError:
        # Older places, which a new torch may drop.
        pass
    return places


def _put(old: dict[str, Any], new: dict[str, Any], paths: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Replace ``old`` objects by ``new`` ones, at ``paths`` only if these are given; where, as paths."""
    done = []
    for module in _places():
        for name, value in old.items():
            path = f"{module.__name__}.{name}"
            if (paths is None or path in paths) and vars(module).get(name) is value:
                setattr(module, name, new[name])
                done.append(path)
    return tuple(done)


def _bound_before() -> tuple[str, ...]:
    """Names of modules other than torch's that are torch's ``fully_shard`` or ``FSDPModule``."""
    paths = []
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] in ("torch", "torch_impl") or not isinstance(module, ModuleType):
            continue
        # A copy: another thread may be importing. Not getattr, which would run lazy imports.
        for name, value in list(vars(module).items()):
            if value is _TORCHS["fully_shard"] or value is _TORCHS["FSDPModule"]:
                paths.append(f"{path}.{name}")
    return tuple(paths)
