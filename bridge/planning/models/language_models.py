"""The language models of ``jax_impl`` by name: the decoder, and ``CausalLM`` from a configuration.

``decoder:CONFIG``      a TOML file with a table ``[model]``, or a relay's name
``llama3-8b``, ...      the built-in shapes that ``CausalLM`` supports
``path/config.json``    a configuration as Hugging Face writes it, or the folder that contains it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.core.formats.stores.store import hub_repository
from bridge.core.text_files import load_json, load_toml
from bridge.planning.models.errors import PlanError
from bridge.planning.models.runtimes import abstract_module, part
from bridge.planning.models.shipped_models import SHIPPED, DecoderShape, DenseMlp, Experts, GroupedQueries
from bridge.relay.config import BUILT_IN, ConfigError, ModelConfig


def is_decoder(name: str) -> bool:
    return name.startswith("decoder:")


def is_config(name: str) -> bool:
    """Whether ``name`` is a path to a ``config.json`` or its folder: a path with a colon is not a Python path."""
    path = Path(name)
    return path.suffix == ".json" or path.is_dir() or ("/" in name and ":" not in name)


def is_language_model(name: str) -> bool:
    """Whether ``abstract_model`` makes this model, or refuses it with a reason."""
    return is_decoder(name) or name in SHIPPED or is_config(name)


def decoder_config(name_or_path: str) -> ModelConfig:
    """The ``[model]`` table of a relay file, or of any TOML file. Raises ``PlanError`` if there is none."""
    built_in = BUILT_IN / f"{name_or_path}.toml"
    path = built_in if built_in.is_file() else Path(name_or_path)
    try:
        table = load_toml(path, lambda text: PlanError(f"decoder {text}"))
    except OSError as error:
        names = ", ".join(sorted(p.stem for p in BUILT_IN.glob("*.toml")))
        raise PlanError(
            f"decoder {path}: expected a TOML file or one of {names}: {error.strerror}"
        ) from error
    model = table.get("model")
    if not isinstance(model, Mapping):
        raise PlanError(f"decoder {path}: expected a table [model], got {model!r}")
    try:
        return ModelConfig(**model)
    except (TypeError, ConfigError) as error:
        raise PlanError(f"decoder {path}: {error}") from error


def causal_lm_config(name: str) -> Any:
    """A ``jax_impl.models.CausalLMConfig``. Raises ``PlanError`` for a file from which it cannot be read."""
    models = part("jax", "models")
    if name in SHIPPED:
        keywords = SHIPPED[name]().causal_lm()
        if keywords is None:
            raise PlanError(
                f"model {name}: expected a model that jax_impl.models.CausalLM supports, to compile it, got one with "
                "latent attention and shared experts: its shapes can be planned, without --compile and --target"
            )
        return models.CausalLMConfig(**keywords, rotary=models.Rotary(theta=SHIPPED[name]().rope_theta))
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        config = load_json(
            path, lambda text: PlanError(f"model {text}"), "JSON, as Hugging Face writes a config.json"
        )
    except OSError as error:
        raise PlanError(
            f"model {path}: expected a config.json, as Hugging Face writes it: {error.strerror}"
            f"{_on_the_hub(name)}"
        ) from error
    if not isinstance(config, Mapping):
        raise PlanError(f"model {path}: expected a table of names and values, got a {type(config).__name__}")
    try:
        return models.CausalLMConfig.from_hf(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"model {path}: {error}") from error


def idle_elements(name: str) -> int:
    """Elements of the experts that do not process a given token, over all layers. Raises as ``causal_lm_config``."""
    if is_decoder(name):
        return 0
    config = causal_lm_config(name)
    of_expert = (3 if config.gated else 2) * config.d_model * config.d_ff
    return int(config.n_layers * (config.n_experts - config.experts_per_token) * of_expert)


def shape_of(config: Any) -> DecoderShape | None:
    """The shape of a ``CausalLMConfig``; None if the layers are not Llama's or Mixtral's."""
    variations = (
        config.norm != "rms",
        not config.input_norms,
        config.output_norms,
        config.parallel,
        config.residual_scale != 1,
        config.logit_scale != 1,
        config.query_key_norms,
        not config.gated,
        config.activation != "silu",
        config.qkv_bias,
        config.out_bias,
        config.mlp_bias,
        config.rotary is None,
        config.attention_cap,
        config.logit_cap,
    )
    if any(variations):
        return None
    attention = GroupedQueries(config.n_heads, config.n_kv_heads, config.head_dim)
    experts = Experts(config.n_experts, config.experts_per_token, config.d_ff)
    mlp = experts if config.n_experts > 1 else DenseMlp(config.d_ff)
    return DecoderShape(
        config.vocab_size,
        config.d_model,
        config.n_layers,
        attention,
        mlp,
        rope_theta=config.rotary.theta,
        tied=config.tied,
    )


def abstract_model(name: str, stacked: bool) -> Any:
    """The nnx module from shapes alone. Raises ``PlanError`` for a configuration that is not supported."""
    models = part("jax", "models")
    make: Callable[..., Any]
    if is_decoder(name):
        make = models.Decoder
        sizes = models.DecoderConfig(**asdict(decoder_config(name.partition(":")[2])))
    else:
        make, sizes = models.CausalLM, causal_lm_config(name)
    try:
        return abstract_module(lambda rngs: make(sizes, rngs=rngs, stacked=stacked))
    except ValueError as error:
        raise PlanError(f"model {name}: {error}") from error


def _on_the_hub(name: str) -> str:
    repository = hub_repository(name)
    if repository is None:
        return ""
    return (
        f"; for a model of the Hugging Face Hub, fetch the file first: hf download {repository} config.json"
    )
