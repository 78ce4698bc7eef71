"""Names of the small files beside weights that belong to a model."""

from __future__ import annotations

import fnmatch
from typing import Final

CONFIG_FILE: Final = "config.json"
_NAMES: Final = (
    *(CONFIG_FILE, "*_config.json", "params.json", "preprocessor.json", "modules.json"),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "vocab.bpe", "encoder.json", "chat_template.json", "*.jinja"),
    *(
        "tokenizer.model",
        "tokenizer.model.v*",
        "spiece.model",
        "sentencepiece.bpe.model",
        "*.spm",
        "*.tiktoken",
    ),
)


def is_companion(name: str) -> bool:
    """Whether a file of this name beside a checkpoint belongs to its model."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES)
