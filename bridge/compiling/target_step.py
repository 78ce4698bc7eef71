"""A step to compile for a target: model, loss and batch from the command's options, as shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bridge.compiling.batch_shapes import EXAMPLE, BatchArray
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
