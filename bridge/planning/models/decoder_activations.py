"""Activations of our decoder, traced from its own code in each runtime.

In PyTorch one forward and backward run on the meta device, with a log of allocations. Nothing is computed or allocated:
on the meta device tensors have shapes and storages without memory. A dispatch mode sees each operator's results, also
in backward, and a finalizer sees each storage's end. So autograd saves and frees the same tensors at the same moments
as on a real device.

In JAX the bytes are those of the residuals of a segment's vjp, from shapes alone. XLA stores all residuals of a unit
that gathers its weights, since ``jax_impl`` fences them, except residuals that do not depend on arguments, such as the
zeros of a mask. Elsewhere XLA may recompute some of them, and the bytes are upper bounds. ``backward`` adds the
cotangents of output and input, and the cotangent of the largest intermediate, which is as large as the largest
residual: in attention that keeps its scores, the cotangent of the scores. On TPUs ``jax_impl`` saves less (see
``jax_impl/runtime/program/residuals.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bridge.planning.models.activations import Segment, SegmentBytes
from bridge.planning.models.runtimes import abstract_module, framework, part


@dataclass(frozen=True)
class TracedSegment:
    """One segment of the decoder; ``sizes`` is a runtime's ``DecoderConfig``.

    ``kind``: "embed", "positions" (of a table), "layer" or "head", or "attention" or "mlp" of a layer.
    """

    path: str
    kind: str
    runtime: str
    sizes: Any

    @property
    def parts(self) -> tuple[Segment, ...]:
        """See ``Segment``."""
        kinds = ("attention", "mlp") if self.kind == "layer" else ()
        return tuple(TracedSegment(f"{self.path}.{kind}", kind, self.runtime, self.sizes) for kind in kinds)

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """See ``Segment``."""
        return _TRACES[self.runtime](self.kind, self.sizes, batch, length, compute)


def decoder_activations(runtime: str, sizes: Any) -> tuple[Segment, ...]:
    """The segments in the order of forward."""
    windows = getattr(sizes, "windows", ()) or (None,) * sizes.n_layers
    layers = [
        TracedSegment(f"layers.{k}", "layer", runtime, _one_layer(sizes, window))
        for k, window in enumerate(windows)
    ]
    layer = _one_layer(sizes, None)
    tables = ("embed", "positions") if getattr(sizes, "max_length", None) else ("embed",)
    first = [TracedSegment(table, table, runtime, layer) for table in tables]
    return (*first, *layers, TracedSegment("", "head", runtime, layer))


def _one_layer(sizes: Any, window: int | None) -> Any:
    """The sizes of a model with one layer."""
    return replace(sizes, n_layers=1, **({"windows": (window,)} if getattr(sizes, "windows", ()) else {}))


# All layers are alike, so one trace serves all. A trace takes far longer than the sums of a plan.
@lru_cache(maxsize=256)
def _torch(kind: str, sizes: Any, batch: int, length: int, compute: str) -> SegmentBytes:
    torch, decoder = framework("torch"), part("torch", "models.decoder")
    dtype = getattr(torch, compute)

    def tokens() -> Any:
        return torch.empty(batch, length, dtype=torch.int64)

    def hidden() -> Any:
        return torch.empty(batch, length, sizes.d_model, dtype=dtype)

    def embed() -> Any:
        return torch.nn.Embedding(sizes.vocab_size, sizes.d_model).to(dtype)

    def layer() -> Any:
        block = decoder.Block(sizes)
        return (block if kind == "layer" else getattr(block, kind)).to(dtype)

    def head() -> Any:
        norm = decoder.RMSNorm(sizes.d_model, sizes.norm_eps)
        linear = torch.nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)
        return torch.nn.Sequential(norm, linear).to(dtype)

    if kind == "embed":
        return trace_in_torch(embed, tokens)
    if kind != "head":
        return trace_in_torch(layer, hidden)
    return trace_in_torch(head, hidden, lambda logits: decoder.next_token_loss(logits, tokens()))


@lru_cache(maxsize=256)
def _jax(kind: str, sizes: Any, batch: int, length: int, compute: str) -> SegmentBytes:
    jax, models = framework("jax"), part("jax", "models")
    tokens = jax.ShapeDtypeStruct((batch, length), "int32")
    hidden = jax.ShapeDtypeStruct((batch, length, sizes.d_model), compute)
    # The modules come from the model itself, so that this file calls no constructor with arguments that may change.
    make = models.Decoder if isinstance(sizes, models.DecoderConfig) else models.CausalLM
    model = abstract_module(lambda rngs: make(sizes, rngs=rngs))
    if kind == "embed":
        return trace_in_jax(model.embed, tokens, compute)
    if kind == "positions":
        places = jax.ShapeDtypeStruct((length,), "int32")
        return trace_in_jax(model.positions, places, compute)
    layers = part("jax", "models.causal_lm")
    causal = isinstance(sizes, models.CausalLMConfig)
    if kind != "head":
        layer = model.layers[0] if kind == "layer" else getattr(model.layers[0], kind)
        if not causal or kind == "mlp":
            return trace_in_jax(layer, hidden, compute)
        # All layers have the same tables.
        tables = sizes.rotary and layers.rotary_tables(length, sizes.rotary, sizes.head_dim)
        return trace_in_jax(layer, hidden, compute, others=(tables,))

    def loss(logits: Any) -> Any:
        if causal:
            logits = layers.softcap(logits, sizes.logit_cap)
        return models.next_token_loss(logits, jax.numpy.zeros((batch, length), "int32"))

    nnx = framework("flax.nnx")

    class Tied(nnx.Module):  # type: ignore[name-defined]  # the framework is imported when it is used
        def __init__(self) -> None:
            self.norm, self.embed = model.norm, model.embed

        def __call__(self, x: Any) -> Any:
            return self.embed.attend(self.norm(x))

    head = Tied() if sizes.tied else nnx.Sequential(model.norm, model.lm_head)
    return trace_in_jax(head, hidden, compute, loss)


_TRACES: dict[str, Callable[[str, Any, int, int, str], SegmentBytes]] = {"torch": _torch, "jax": _jax}


def trace_in_torch(
    build: Callable[[], Any], make_input: Callable[[], Any], finish: Callable[[Any], Any] | None = None
) -> SegmentBytes:
    """Trace ``build()``, a module, on ``make_input()``; both are called for the meta device.

    finish: the function from the module's output to a scalar, such as a loss; None: the output's gradient is passed in.
    """
    torch = framework("torch")
    with torch.device("meta"):
        module, example = build(), make_input()
        differentiable = example.is_floating_point()
        source = example.requires_grad_() if differentiable else example
        weight = None
        parameter_gradients: set[int] = set()
        log = _Log(torch)

        def forget(parameter: Any) -> None:
            parameter_gradients.add(log.key(parameter.grad))
            parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(forget)
        if finish is None:
            weight = torch.empty_like(module(source))
        # Views of these tensors are also results of operators.
        log.ignore([source, *module.parameters(), *module.buffers(), *([] if weight is None else [weight])])
        with log.mode():
            # A leaf would stay alive in any case; an input from another segment does not.
            inside = source * 1 if differentiable else source
            size = inside.numel() * inside.element_size() if differentiable else 0
            output = module(inside)
            forward = log.peak()
            loss = (output * weight).sum() if finish is None else finish(output)
            forward = forward if finish is None else log.peak()
            del inside, output
            saved = log.live()
            mark = log.mark()
            loss.backward()
    backward = log.peak(mark, parameter_gradients)
    return SegmentBytes(saved, size, forward, backward, size + max(forward, backward), forward)


class _Log:
    """Storages that were made and dropped, in order."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._events: list[tuple[int, int]] = []
        self._alive: dict[int, int] = {}

    def key(self, tensor: Any) -> int:
        """The number of a tensor's storage; -1 for a storage that is older than the log."""
        return self._alive.get(tensor.untyped_storage()._cdata, -1)

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Ignore the bytes of storages that stay alive."""
        self._alive.update((tensor.untyped_storage()._cdata, -1) for tensor in tensors)

    def mark(self) -> int:
        return len(self._events)

    def live(self) -> int:
        """Bytes alive now."""
        return sum(size for _, size in self._events)

    def peak(self, after: int = 0, without: frozenset[int] | set[int] = frozenset()) -> int:
        """The most bytes alive at once since a mark, without the storages ``without``."""
        live = most = 0
        for index, (key, size) in enumerate(self._events):
            if key not in without:
                live += size
            if index >= after:
                most = max(most, live)
        return most

    def note(self, tensor: Any) -> None:
        """Log a result of an operator; its storage may already be known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        key, size = len(self._events), storage.nbytes()
        self._alive[address] = key
        self._events.append((key, size))
        weakref.finalize(storage, self._dropped, address, key, size)

    def _dropped(self, address: int, key: int, size: int) -> None:
        self._alive.pop(address, None)
        self._events.append((key, -size))

    def mode(self) -> Any:
        """A dispatch mode that keeps the log."""
        log, torch = self, self._torch
        base = framework("torch.utils._python_dispatch").TorchDispatchMode
        tree_map = framework("torch.utils._pytree").tree_map_only

        class Noting(base):  # type: ignore[misc, valid-type]  # the framework is imported when it is used
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = func(*args, **(kwargs or {}))
                tree_map(torch.Tensor, log.note, results)
                return results

        return Noting()


def trace_in_jax(
    module: Any,
    example: Any,
    compute: str,
    finish: Callable[[Any], Any] = lambda output: output,
    others: Sequence[Any] = (),
) -> SegmentBytes:
    """Trace an nnx module, which may be abstract, with parameters in ``compute``, on an input like ``given``.

    finish: the function from the module's output to the differentiated value, such as a loss. others: further inputs;
    their bytes are not counted.
    """
    jax, nnx, jnp = framework("jax"), framework("flax.nnx"), framework("jax.numpy")
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, compute), state)
    differentiable = jnp.issubdtype(example.dtype, jnp.floating)

    def run(state: Any, _inner: Any, values: Any) -> Any:
        return finish(nnx.merge(graph, state)(values, *others))

    def differentiated(state: Any, _inner: Any, values: Any) -> Any:
        output, vjp = jax.vjp(run, state, (), values)
        # Backward has the weights in any case.
        vjp.args_res[:2] = [None, None]
        return output, vjp

    residuals = part("jax", "runtime.program.residuals")

    def split(state: Any, values: Any) -> tuple[list[Any], list[Any]]:
        (output, vjp), depends = residuals.with_dependence(differentiated, state, (), values)
        leaves, results = jax.tree.leaves(vjp), len(jax.tree.leaves(output))
        varying = list(zip(leaves, depends[results:], strict=True))
        # Constants, such as the zeros of a mask, are made at their use.
        return [leaf for leaf, varies in varying if varies], [leaf for leaf, varies in varying if not varies]

    kept, constants = jax.eval_shape(split, state, example)
    sizes = [_bytes(leaf) for leaf in kept]
    saved, largest = sum(sizes), max(sizes, default=0)
    size = _bytes(example) if differentiable else 0
    program = jax.make_jaxpr(run)(state, (), example)
    fixed = sum(_bytes(constant.aval) for constant in residuals.constants_of(program))
    fixed_saved = sum(map(_bytes, constants))
    return SegmentBytes.of_residuals(saved, size, largest, fixed=fixed, fixed_saved=fixed_saved)


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)
