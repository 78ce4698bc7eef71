"""A step to compile for a target: model, loss and batch, from what the command was told, as shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bridge.planning.batch_shapes import EXAMPLE, BatchArray
from bridge.planning.cost import Workload
from bridge.planning.errors import PlanError
from bridge.planning.factory import Factory, function_named
from bridge.planning.models import decoder_config
from bridge.planning.optimizers import ADAMW, Optimizer
from bridge.planning.runtimes import framework, part
from bridge.planning.shipped_models import SHIPPED

ENGINES = ("shard_map", "pjit")


@dataclass(frozen=True)
class StepRequest:
    """``model``, ``stacked``, ``loss``, ``frozen`` as on the command line. ``batch``: shapes where the model is not the
    decoder.

    Raises ``PlanError`` for a model without a step: shapes alone, or a model without loss or batch; and for an
    optimizer that JAX cannot run, or whose state is in CPU memory.
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
        if self.optimizer.offload:
            raise PlanError(
                "--target: expected no --offload: a step is compiled with its state on the device"
            )
        if self.model in SHIPPED:
            raise PlanError(
                f"model {self.model}: expected a model that can run, for --target, got shapes alone: give "
                "decoder:CONFIG, a TOML file with its sizes, or package.module:Factory with --loss and --batch-shapes"
            )
        if self.is_decoder:
            if self.loss is not None or self.batch:
                raise PlanError(
                    "--loss, --batch-shapes: expected none for the decoder, whose loss is that of the next token over "
                    "--batch sequences of --length tokens"
                )
        elif self.loss is None or not self.batch:
            raise PlanError(
                f"model {self.model}: expected --loss package.module:function, which takes the model and a batch "
                "(arrays by name) and returns a mean over rows or (sum, weight), and --batch-shapes FILE, whose TOML "
                f"lines say {EXAMPLE}, rows of a device and microbatch first"
            )

    @property
    def is_decoder(self) -> bool:
        return self.model.startswith("decoder:")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "optimizer": self.optimizer.to_json()}

    @staticmethod
    def from_json(found: dict[str, Any]) -> StepRequest:
        batch = {name: BatchArray(tuple(one["shape"]), one["dtype"]) for name, one in found["batch"].items()}
        return StepRequest(
            found["model"],
            Workload(**found["workload"]),
            tuple(found["stacked"]),
            found["loss"],
            batch,
            Optimizer.from_json(found["optimizer"]),
            tuple(found["frozen"]),
        )

    @property
    def frozen_paths(self) -> list[str]:
        """Patterns as ``frozen=`` of ``jax_impl`` takes them."""
        return [pattern.replace(".", "/") for pattern in self.frozen]

    def abstract_model(self) -> Any:
        """The nnx module, or the one that stands for a pytree."""
        if not self.is_decoder:
            return Factory.named(self.model).jax_module()
        nnx, models = framework("flax.nnx"), part("jax", "models")
        sizes = models.DecoderConfig(**asdict(decoder_config(self.model.partition(":")[2])))
        return nnx.eval_shape(lambda: models.Decoder(sizes, rngs=nnx.Rngs(0), stacked=bool(self.stacked)))

    def loss_function(self) -> Callable[..., Any]:
        if self.loss is not None:
            return function_named("loss", self.loss, "package.module:function")
        models = part("jax", "models")

        def loss(model: Any, batch: Any) -> Any:
            tokens = batch["tokens"]
            return models.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

        return loss

    def global_batch(self, plan: Any) -> Any:
        """Arrays of all data ranks and microbatches."""
        jax = framework("jax")
        parts = plan.data_ranks * self.workload.microbatches
        arrays = self.batch or {
            "tokens": BatchArray((self.workload.batch, self.workload.length + 1), "int32")
        }
        rows = jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec)
        return {
            name: jax.ShapeDtypeStruct(
                (array.shape[0] * parts, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
                sharding=rows,
            )
            for name, array in arrays.items()
        }
