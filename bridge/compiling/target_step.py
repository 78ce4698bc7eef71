"""A step to compile for a target: model, loss and batch from the command's options, as shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.dtype_names import BYTES, full_name
from bridge.core.text_files import load_toml
from bridge.planning.cost.cost import Workload
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.factory import Factory, function_named
from bridge.planning.models.language_models import abstract_model, is_language_model
from bridge.planning.models.runtimes import framework, part


@dataclass(frozen=True)
class StepRequest:
    """``model``, ``stacked``, ``loss``, ``frozen`` as on the command line. ``batch``: shapes, for a user's model.

    Raises ``PlanError`` for a user's model without loss or batch, and for an optimizer that JAX cannot run.
    """

    model: str
    workload: Workload
    stacked: tuple[str, ...] = ()
    loss: str | None = None
    batch: dict[str, BatchArray] = field(default_factory=dict)
    optimizer: Optimizer = ADAMW
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if reason := self.optimizer.why_not("jax"):
            raise PlanError(reason)
        if self.is_language_model:
            if self.loss is not None or self.batch:
                raise PlanError(
                    "--loss, --batch-shapes: expected none for a language model of jax_impl, whose loss is the "
                    "next-token loss over --batch sequences of --length tokens"
                )
        elif self.loss is None or not self.batch:
            raise PlanError(
                f"model {self.model}: expected --loss package.module:function, which takes the model and a batch "
                "(arrays by name) and returns a mean over rows or (sum, weight), and --batch-shapes FILE, whose TOML "
                f"lines are like {EXAMPLE}, rows of a device and microbatch first"
            )

    @property
    def is_language_model(self) -> bool:
        """Whether the loss is the next-token loss, over sequences of the workload's length."""
        return is_language_model(self.model)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "optimizer": self.optimizer.to_json()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> StepRequest:
        batch = {
            name: BatchArray(tuple(array["shape"]), array["dtype"]) for name, array in values["batch"].items()
        }
        return StepRequest(
            values["model"],
            Workload(**values["workload"]),
            tuple(values["stacked"]),
            values["loss"],
            batch,
            Optimizer.from_json(values["optimizer"]),
            tuple(values["frozen"]),
        )

    @property
    def frozen_paths(self) -> list[str]:
        """Patterns in the form that ``frozen=`` of ``jax_impl`` takes."""
        return [pattern.replace(".", "/") for pattern in self.frozen]

    def abstract_model(self) -> Any:
        """The nnx module, or the module that represents a pytree."""
        if self.is_language_model:
            return abstract_model(self.model, bool(self.stacked))
        return Factory.named(self.model).jax_module()

    def loss_function(self) -> Callable[..., Any]:
        if self.loss is not None:
            return function_named("loss", self.loss, "package.module:function")
        models = part("jax", "models")

        def loss(model: Any, batch: Any) -> Any:
            tokens = batch["tokens"]
            return models.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

        return loss

    def global_batch(self, plan: Any) -> Any:
        """Arrays for all data ranks and microbatches."""
        jax = framework("jax")
        parts = plan.data_ranks * self.workload.microbatches
        tokens = BatchArray((self.workload.batch, self.workload.length + 1), "int32")
        arrays = self.batch or {"tokens": tokens}
        rows = jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec)
        return {
            name: jax.ShapeDtypeStruct(
                (array.shape[0] * parts, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
                sharding=rows,
            )
            for name, array in arrays.items()
        }


EXAMPLE = 'tokens = { shape = [2, 1025], dtype = "int32" }'


@dataclass(frozen=True)
class BatchArray:
    """``shape``: rows of one device and microbatch, then the other dimensions."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def load_batch_shapes(path: Path) -> dict[str, BatchArray]:
    """The batch of a user's own loss, as shapes from a TOML file: arrays by name, for one device and microbatch.

    ::

        tokens = { shape = [2, 1025], dtype = "int32" }
        mask   = { shape = [2, 1024] }                      # float32

    The first dimension counts rows and is the same for all arrays. Raises ``PlanError`` that names file, array and key
    for any other content.
    """
    try:
        content = load_toml(path, lambda text: PlanError(f"batch shapes {text}"))
    except OSError as error:
        raise PlanError(
            f"batch shapes {path}: expected a TOML file with lines such as {EXAMPLE}: {error.strerror}"
        ) from error
    arrays = {name: _array(f"batch shapes {path}: {name}", entry) for name, entry in content.items()}
    rows = {array.shape[0] for array in arrays.values()}
    if len(rows) != 1:
        raise PlanError(
            f"batch shapes {path}: expected one or more arrays with the same first dimension, rows of a device and "
            f"microbatch, got { ({name: list(array.shape) for name, array in arrays.items()}) }"
        )
    return arrays


def _array(where: str, entry: object) -> BatchArray:
    if not isinstance(entry, dict) or "shape" not in entry or entry.keys() - {"shape", "dtype"}:
        raise PlanError(f"{where}: expected shape and dtype as in {EXAMPLE}, got {entry!r}")
    shape, dtype = entry["shape"], entry.get("dtype", "float32")
    sizes = shape if isinstance(shape, list) else []
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(f"{where}: shape: expected a list of ints >= 1, rows first, got {shape!r}")
    if isinstance(dtype, str):
        dtype = full_name(dtype, BYTES)
    if dtype not in BYTES:
        raise PlanError(f"{where}: dtype: expected one of {', '.join(BYTES)}, got {dtype!r}")
    return BatchArray(tuple(sizes), dtype)
