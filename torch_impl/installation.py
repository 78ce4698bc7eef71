"""``install``: programs that import FSDP2 themselves get this package's ``fully_shard`` instead of torch's.

Frameworks (accelerate, transformers, TRL, torchtitan, torchtune) import ``fully_shard`` and ``FSDPModule`` from torch,
where a user cannot change the import. ``install`` binds torch's names to this package's objects, and changes nothing
else in torch. Names that modules imported earlier are left unchanged; a warning lists them.
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
# By torch's own names, so read before anything is replaced.
_TORCHS = {name: getattr(fsdp, name) for name in _OURS}
# torch's pipelines use the two names to access FSDP2's private state, so they keep torch's objects.
_KEEP_TORCHS = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")


@dataclass(frozen=True)
class Installation(AbstractContextManager["Installation"]):
    """The replacements of one ``install``; leaving it as a context manager undoes them.

    replaced: paths of the names that now refer to this package, such as ``torch.distributed.fsdp.fully_shard``. Empty
        for an ``install`` inside another one.
    bound_before: paths of names that modules imported before and that keep torch's objects, such as
        ``trl.models.utils.FSDPModule``. Such a module shards models with torch's FSDP2, and its ``isinstance`` does
        not recognize this package's sharded modules.
    """

    replaced: tuple[str, ...]
    bound_before: tuple[str, ...]

    def __exit__(self, *error: object) -> None:
        _put(_OURS, _TORCHS, self.replaced)


def install() -> Installation:
    """Bind torch's names to this package's ``fully_shard`` and related objects, until ``uninstall``.

    This replaces ``fully_shard``, ``FSDPModule``, ``UnshardHandle``, ``register_fsdp_forward_method`` and
    ``share_comm_ctx`` of ``torch.distributed.fsdp`` and of its older path, ``torch.distributed._composable.fsdp``.
    torch's ``MixedPrecisionPolicy``, ``CPUOffloadPolicy``, ``OffloadPolicy`` and ``DataParallelMeshDims`` stay, since
    this package's ``fully_shard`` accepts them. torch's own modules continue to use torch's objects.

    Call it before the program's imports, on all ranks::

        import torch_impl
        torch_impl.install()
        import accelerate, trl  # these and all later imports find this package's names

    or temporarily: ``with torch_impl.install(): ...``. A model that was sharded inside remains unchanged afterwards. A
    second call changes nothing, and leaving it undoes nothing.

    A module that had already imported one of the names keeps torch's: it shards models with torch's FSDP2, and its
    ``isinstance(model, FSDPModule)`` is False for this package's models. A UserWarning lists such modules, and so does
    ``Installation.bound_before``; import them after ``install``, or replace the name there.
    """
    for path in _KEEP_TORCHS:
        importlib.import_module(path)
    replaced = _put(_TORCHS, _OURS)
    bound = _bound_before()
    if replaced and bound:
        warnings.warn(
            f"torch_impl.install: {', '.join(bound)} was imported from torch before and stays torch's FSDP2, which "
            "does not recognize torch_impl's modules: import these modules after torch_impl.install()",
            UserWarning,
            stacklevel=2,
        )
    return Installation(replaced, bound)


def uninstall() -> None:
    """Restore torch's names; without a previous ``install``, nothing happens.

    A name that someone else replaced meanwhile remains unchanged. Models keep the ``fully_shard`` that sharded them.
    """
    _put(_OURS, _TORCHS)


def _places() -> list[ModuleType]:
    """The modules from which programs import FSDP2, if this torch has them."""
    places: list[ModuleType] = [fsdp]
    try:
        places.append(importlib.import_module("torch.distributed._composable.fsdp"))
        # The function has the same name and hides the module as an attribute.
        places.append(importlib.import_module("torch.distributed._composable.fsdp.fully_shard"))
    except ModuleNotFoundError:
        # Older paths, which a new torch may drop.
        pass
    return places


def _put(old: dict[str, Any], new: dict[str, Any], paths: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Replace ``old`` objects by ``new`` ones, only at ``paths`` if given; returns the paths of the replacements."""
    done = []
    for module in _places():
        for name, value in old.items():
            path = f"{module.__name__}.{name}"
            if (paths is None or path in paths) and vars(module).get(name) is value:
                setattr(module, name, new[name])
                done.append(path)
    return tuple(done)


def _bound_before() -> tuple[str, ...]:
    """Names in modules other than torch's that refer to torch's ``fully_shard`` or ``FSDPModule``."""
    paths = []
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] in ("torch", "torch_impl") or not isinstance(module, ModuleType):
            continue
        # A copy: another thread may be importing. Not getattr, which would trigger lazy imports.
        for name, value in list(vars(module).items()):
            if value is _TORCHS["fully_shard"] or value is _TORCHS["FSDPModule"]:
                paths.append(f"{path}.{name}")
    return tuple(paths)
