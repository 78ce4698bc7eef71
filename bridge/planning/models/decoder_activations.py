"""Activations of our decoder, traced from its own code in each runtime: see ``torch_trace`` and ``jax_trace``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bridge.planning.models import jax_trace, torch_trace
from bridge.planning.models.abstract import abstract_module
from bridge.planning.models.activations import Segment, SegmentBytes
from bridge.planning.models.runtimes import framework, part


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
        return torch_trace.trace_segment(embed, tokens)
    if kind != "head":
        return torch_trace.trace_segment(layer, hidden)
    return torch_trace.trace_segment(head, hidden, lambda logits: decoder.next_token_loss(logits, tokens()))


@lru_cache(maxsize=256)
def _jax(kind: str, sizes: Any, batch: int, length: int, compute: str) -> SegmentBytes:
    jax, models = framework("jax"), part("jax", "models")
    tokens = jax.ShapeDtypeStruct((batch, length), "int32")
    hidden = jax.ShapeDtypeStruct((batch, length, sizes.d_model), compute)
    # The modules come from the model itself, so that this file calls no constructor with arguments that may change.
    make = models.Decoder if isinstance(sizes, models.DecoderConfig) else models.CausalLM
    model = abstract_module(lambda rngs: make(sizes, rngs=rngs))
    if kind == "embed":
        return jax_trace.trace_segment(model.embed, tokens, compute)
    if kind == "positions":
        places = jax.ShapeDtypeStruct((length,), "int32")
        return jax_trace.trace_segment(model.positions, places, compute)
    layers = part("jax", "models.causal_lm_layers")
    causal = isinstance(sizes, models.CausalLMConfig)
    if kind != "head":
        layer = model.layers[0] if kind == "layer" else getattr(model.layers[0], kind)
        if not causal or kind == "mlp":
            return jax_trace.trace_segment(layer, hidden, compute)
        # All layers have the same tables.
        tables = sizes.rotary and layers.rotary_tables(length, sizes.rotary, sizes.head_dim)
        return jax_trace.trace_segment(layer, hidden, compute, others=(tables,))

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
    return jax_trace.trace_segment(head, hidden, compute, loss)


_TRACES: dict[str, Callable[[str, Any, int, int, str], SegmentBytes]] = {"torch": _torch, "jax": _jax}
