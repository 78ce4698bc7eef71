"""The keys of Hugging Face's ``config.json``, taken one by one; a key that nobody takes is refused, never skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys that do not affect the logits of a forward pass without dropout.
_WITHOUT_EFFECT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "attn_pdrop", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "classifier_dropout", "dtype", "embd_pdrop", "eos_token_id", "hidden_dropout", "id2label",
    "label2id", "max_position_embeddings", "n_ctx", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn",
    "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache",
})  # fmt: skip
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_REQUIRED: Any = object()


class Keys:
    """Returns the checked values of a config, and knows at the end which keys were not taken.

    at: the location of the config, for errors. Methods that check raise ValueError with the key and the expected value.
    """

    def __init__(self, config: Mapping[str, Any], at: str = "config.json") -> None:
        self._config = config
        self._at = at
        self._left = {key for key, value in config.items() if value is not None and value is not False}

    def fail(self, key: str, expected: str, got: Any) -> ValueError:
        return ValueError(f"{self._at}: {key!r}: expected {expected}, got {got!r}")

    def take(self, key: str, expected_type: type, default: Any = _REQUIRED) -> Any:
        """The value of ``key``, or ``default`` if the key is missing or null."""
        self._left.discard(key)
        value = self._config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.fail(key, f"{expected_type.__name__}", None)
            return default
        if expected_type is float and type(value) is int:
            value = float(value)
        if not isinstance(value, expected_type) or (isinstance(value, bool) and expected_type is not bool):
            raise self.fail(key, expected_type.__name__, value)
        return value

    def has(self, key: str) -> bool:
        """Whether the config has ``key``, perhaps as null."""
        return key in self._config

    def positive(self, key: str, default: float) -> float:
        """The number of ``key``, above zero."""
        value: float = self.take(key, float, default)
        if not value > 0:
            raise self.fail(key, "a value > 0", value)
        return value

    def must_be(self, key: str, expected: Any) -> None:
        """Refuse any value of ``key`` except ``expected``; the key may be missing."""
        value = self.take(key, type(expected), expected)
        if value != expected:
            raise self.fail(key, f"{expected!r} (the only one supported)", value)

    def activation(self, key: str, default: str) -> str:
        """The name of an activation in ``CausalLMConfig``."""
        name = self.take(key, str, default)
        if name not in _ACTIVATIONS:
            raise self.fail(key, f"one of {sorted(_ACTIVATIONS)}", name)
        return _ACTIVATIONS[name]

    def finish(self) -> None:
        """Refuse a config with keys that were not taken and may change the model."""
        unknown = sorted(self._left - _WITHOUT_EFFECT)
        if unknown:
            listed = ", ".join(f"{key!r}: {self._config[key]!r}" for key in unknown)
            raise ValueError(
                f"{self._at}: expected known keys, got {listed}. If these keys do not change the model, remove them "
                "from the dictionary"
            )
