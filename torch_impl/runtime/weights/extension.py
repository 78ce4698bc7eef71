"""Parameters whose class determines what is gathered: FSDP2's extensions, as in torchao.

The class of such a parameter has two methods, which are called on this rank's rows of the parameter::

    fsdp_pre_all_gather(mesh)                           -> (tensors to gather, anything for post)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)      the same
    fsdp_post_all_gather(gathered, anything, dtype)     -> (whole parameter, tensors of its memory)
    fsdp_post_all_gather(..., out=whole parameter)      -> None, after the gathered tensors were filled again

``mesh`` is the axis over which the gather runs. ``outer_size`` and ``outer_stride`` belong to the whole parameter (for
a tensor-parallel one, to this rank's part). Methods of the first form get only the mesh.

Further requirements for the class: ``torch.chunk`` along dimension 0, ``new_zeros``, ``narrow``, ``copy_`` and, beyond
two dimensions, ``view`` keep the class; a wrapper reveals its inner tensors by ``__tensor_flatten__``; and
``as_strided`` gives a whole parameter its shape. Rows are cut as in FSDP2, into equal parts rounded up, so the last
ranks may hold fewer or none. If a gathered tensor has as many rows as the rank's part, its rows are padded to the
number on the first rank; ranks must agree on all sizes.

    at rest     RowDTensor over the class, each parameter in separate memory
    gather      the result of pre, as bytes, in one call for a group; then post
    forward     the parameter that post returned, always the same object
    gradient    as for any parameter: autograd's result, a plain tensor, in the group's flat buffers

``extended_weights`` has the weights of a group of such parameters.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.layout.rows import local_shape, rows_of
from bridge.core.sharding.layout.slot import Slot
from bridge.core.sharding.policy.strategy import Strategy
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.dtensor.local import plain_parts
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy

WAY_OUT = "leave it unsharded (ignored_params), or make it a plain tensor before fully_shard"


def extended_layout(owned: Sequence[OwnedParameter], num_shards: int) -> Layout:
    """Each parameter in a separate buffer, cut along dimension 0 into equal parts rounded up."""
    sizes, slots = [], []
    for buffer, parameter in enumerate(owned):
        shape = tuple(parameter.local_shape)
        together = rows_of(shape)[1] // shape[0] if len(shape) > 2 else 1
        sizes.append(-(-shape[0] // num_shards) * math.prod(shape[1:]))
        slots.append(Slot(parameter.name, shape, together, buffer, 0))
    return Layout(num_shards, tuple(sizes), tuple(slots))


def check_extension(parameter: OwnedParameter, mesh: DataParallelMesh, strategy: Strategy) -> None:
    """ValueError or NotImplementedError for a parameter whose extension cannot be sharded."""
    values: Any = parameter.local
    class_name = type(values).__name__
    if not callable(getattr(values, "fsdp_post_all_gather", None)):
        raise ValueError(
            f"{parameter.name}: expected both fsdp_pre_all_gather and fsdp_post_all_gather in a "
            f"{class_name}, got only one; {WAY_OUT}"
        )
    if not values.ndim or not values.numel():
        raise ValueError(
            f"{parameter.name}: expected a {class_name} with rows, which its fsdp_pre_all_gather "
            f"gathers, got shape {tuple(values.shape)}; {WAY_OUT}"
        )
    if _arguments_of(values) not in (1, 5):
        raise ValueError(
            f"{parameter.name}: expected fsdp_pre_all_gather(mesh) or fsdp_pre_all_gather(mesh, "
            f"outer_size, outer_stride, module, mp_policy) of a {class_name}, got "
            f"{inspect.signature(values.fsdp_pre_all_gather)}; {WAY_OUT}"
        )
    if strategy.optimizer != 1:
        raise NotImplementedError(
            f"{parameter.name}: strategy {strategy.name!r} is not available for a {class_name}, "
            "whose fsdp_pre_all_gather supports only one axis: use 'optim_grads_params', "
            f"'optim_grads', 'optim' or 'hsdp', or {WAY_OUT}"
        )
    if mesh.ndim > 1 and mesh.mesh.mesh_dim_names is None:
        raise ValueError(
            f"{parameter.name}: expected a mesh with axis names, because fsdp_pre_all_gather of a "
            f"{class_name} gets an axis by name, got {mesh.mesh}; pass mesh_dim_names to "
            "init_device_mesh"
        )


def own_rows(parameter: OwnedParameter, dtype: torch.dtype, index: int, num_shards: int) -> torch.Tensor:
    """A copy of part ``index`` of the parameter, of its class and in ``dtype``, else ValueError."""
    values, value_class = parameter.local, type(parameter.local)
    try:
        with torch.no_grad():
            shard = _part(values if values.dtype == dtype else values.to(dtype), index, num_shards)
            as_matrix(shard)
            # A wrapper that does not reveal what it wraps has no memory that could be read.
            for part in plain_parts(shard):
                part.untyped_storage()
    except Exception as error:
        raise ValueError(
            f"{parameter.name}: a {value_class.__name__} of shape {tuple(values.shape)} cannot be "
            f"cut into {num_shards} parts of rows ({type(error).__name__}: {error}); {WAY_OUT}"
        ) from error
    if type(shard) is not value_class or shard.dtype != dtype:
        raise ValueError(
            f"{parameter.name}: expected rows of a {value_class.__name__} to be a "
            f"{value_class.__name__} of {dtype}, got a {type(shard).__name__} of {shard.dtype} "
            f"from chunk, new_zeros and copy_; {WAY_OUT}"
        )
    return shard


def _part(values: torch.Tensor, index: int, num_shards: int) -> torch.Tensor:
    chunks = torch.chunk(values, num_shards, dim=0)
    # As FSDP2 does, and so with the operators that such classes have.
    shard = values.new_zeros(chunks[0].shape)
    rows = len(chunks[index]) if index < len(chunks) else 0
    if rows == len(shard):
        shard.copy_(chunks[index])
        return shard
    if rows:
        shard.narrow(0, 0, rows).copy_(chunks[index])
    return shard.narrow(0, 0, rows)


def as_matrix(shard: torch.Tensor) -> torch.Tensor:
    """The shard in the shape in which a sharded tensor holds it."""
    if shard.ndim <= 2:
        return shard
    return shard.view(local_shape(shard.shape, math.prod(shard.shape[:-1])))


def _pair(answer: Any) -> tuple[Any, Any]:
    """The pair that both methods of an extension return. TypeError, with the type found, for others."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"{_found(answer)} in place of two values")
    return answer[0], answer[1]


def _tensors(answer: Any) -> tuple[torch.Tensor, ...]:
    """One tensor, or several. TypeError as in ``_pair``."""
    several = (answer,) if isinstance(answer, torch.Tensor) else answer
    if not isinstance(several, tuple | list) or not all(
        isinstance(tensor, torch.Tensor) for tensor in several
    ):
        raise TypeError(f"{_found(answer)} in place of tensors")
    return tuple(several)


def _found(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_found, value))})"
    return f"a {type(value).__name__}"


def zeros_on(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A shard like one on the meta device, with zeros on ``device``."""
    with torch.no_grad():
        zeros = torch.empty_like(shard, device=device)
        if is_traceable_wrapper_subclass(zeros):
            for name in zeros.__tensor_flatten__()[0]:
                inner = getattr(zeros, name)
                # torchao's NF4 does not move tensors that are the same for all rows.
                if isinstance(inner, torch.Tensor) and inner.is_meta:
                    setattr(zeros, name, zeros_on(inner, device))
        for part in plain_parts(zeros):
            part.zero_()
    return zeros


def _arguments_of(values: Any) -> int:
    return len(inspect.signature(values.fsdp_pre_all_gather).parameters)


class ExtendedWeight:
    """One parameter of a group: its rows at rest, and the tensors gathered from them."""

    def __init__(self, parameter: OwnedParameter, shard: torch.Tensor, mesh: DeviceMesh, ranks: int) -> None:
        self.name, self.shard = parameter.name, shard
        # Weak: see ``ParameterGroup``.
        self._module = weakref.ref(parameter.sites[0][0])
        self.size = torch.Size(parameter.local_shape)
        self._mesh, self._rows, self._ranks = mesh, -(-self.size[0] // ranks), ranks
        self._stride = torch.empty(self.size, device="meta").stride()
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self._metadata: Any = None
        # The tensors that post returned as the memory of the whole parameter.
        self.inner: tuple[torch.Tensor, ...] = ()
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def pre(self, policy: MixedPrecisionPolicy, device: torch.device) -> list[tuple[tuple[int, ...], str]]:
        """Ask the rows what to gather; returns shapes and dtypes, on which ranks must agree."""
        shard: Any = self.shard if self.shard.device == device else self.shard.to(device)
        arguments = (self._mesh, self.size, self._stride, self._module(), policy)
        inputs, self._metadata = _pair(shard.fsdp_pre_all_gather(*arguments[: _arguments_of(shard)]))
        self.inputs = [self._padded(tensor) for tensor in _tensors(inputs)]
        return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in self.inputs]

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        rows = len(self.shard)
        if rows == self._rows or not values.ndim or len(values) != rows:
            return values.contiguous()
        padded = values.new_zeros(self._rows, *values.shape[1:])
        padded[:rows] = values
        return padded

    def allocate(self) -> None:
        """Allocate the memory of the gathered tensors."""
        if not self.outputs:
            self.outputs = [source.new_empty(self._ranks * source.numel()) for source in self.inputs]
            self._hold(self.outputs)
        for storage, nbytes in self._storages:
            # resize_ allocates new memory and copies, even to the same size.
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """Release all memory of the whole parameter; tensors over it stay."""
        # The result of pre may be as large as the shard.
        self.inputs, self._metadata = [], None
        for storage, _ in self._storages:
            # Only the storages: post gets the same tensors again, by ``out``.
            storage.resize_(0)

    def _hold(self, tensors: Sequence[torch.Tensor]) -> None:
        plain = [part for tensor in tensors for part in plain_parts(tensor)]
        self._storages += [(part.untyped_storage(), part.untyped_storage().nbytes()) for part in plain]

    @property
    def held(self) -> list[torch.Tensor]:
        """Plain tensors over the memory."""
        return [part for tensor in (*self.outputs, *self.inner) for part in plain_parts(tensor)]

    def post(self, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """The whole parameter from the gathered tensors; ``out``: the one of the first call."""
        rows: Any = self.shard
        gathered = tuple(
            output.view(-1, *source.shape[1:])
            for output, source in zip(self.outputs, self.inputs, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        self.inputs = []
        if out is not None:
            rows.fsdp_post_all_gather(gathered, metadata, dtype, out=out)
            return out
        try:
            whole, inner = _pair(rows.fsdp_post_all_gather(gathered, metadata, dtype))
            self.inner = _tensors(inner)
            (whole,) = _tensors(whole)
            if whole.numel() < self.size.numel():
                raise TypeError(f"a whole of shape {tuple(whole.shape)}")
        except TypeError as error:
            raise TypeError(
                f"{self.name}: expected fsdp_post_all_gather of a {type(rows).__name__} to return "
                f"a tensor of shape {tuple(self.size)}, or with more rows, and the tensors whose "
                f"memory it uses, got {error}; {WAY_OUT}"
            ) from error
        self._hold(self.inner)
        # Padding rows are at the end.
        return torch.as_strided(whole, self.size, self._stride, 0)
