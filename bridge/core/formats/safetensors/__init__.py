"""safetensors, one file or Hugging Face's sharded folders."""
