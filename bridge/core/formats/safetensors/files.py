"""Which files make up a safetensors checkpoint.

weights.safetensors                       one file, whatever its name
dir/model.safetensors                     or the only *.safetensors in the directory
dir/model.safetensors.index.json          Hugging Face shards: the index says which file holds which tensor
   /model-00001-of-00002.safetensors
   /model-00002-of-00002.safetensors      without an index: all numbers must be there
dir/shard-00001-model-00001-of-00001.safetensors    PyTorch's HuggingFaceStorageWriter: each rank's own pieces
   /shard-00002-model-00001-of-00001.safetensors
"""

from __future__ import annotations

import re
from typing import Final

from bridge.core.formats.reading.model_files import FileKind

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
SAFETENSORS_FILES: Final = FileKind(
    (SUFFIX,),
    # The names that transformers and diffusers look for. Variants, such as diffusion_pytorch_model.fp16.safetensors,
    # may be next to them.
    (SINGLE_FILE, INDEX_FILE, f"diffusion_pytorch_{INDEX_FILE}", f"diffusion_pytorch_{SINGLE_FILE}"),
    rank=re.compile(r"shard-\d+-(?=model-\d+-of-\d+\.safetensors\Z)"),
)
