"""Files of torch.save, read without PyTorch: one zip file, or the shards of a Hugging Face model."""
