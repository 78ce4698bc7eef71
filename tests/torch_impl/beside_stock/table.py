"""All programs, by aspect."""

from __future__ import annotations

from tests.torch_impl.beside_stock import (
    autograd,
    clip_grad_norm,
    comm,
    computing,
    extensions,
    frozen,
    ignore_params,
    init,
    loading,
    mixed_precision,
    offload,
    script,
    state_dict,
    storage,
    training,
    wrong_once,
)

_ASPECTS = (
    *(training, state_dict, clip_grad_norm, frozen, mixed_precision, init, autograd, comm),
    *(ignore_params, extensions, offload, wrong_once, loading, storage, computing, script),
)
PROGRAMS = tuple(program for aspect in _ASPECTS for program in aspect.PROGRAMS)
ITEMS = tuple(sorted((row for row in PROGRAMS if row.item is not None), key=lambda row: row.item or 0))
