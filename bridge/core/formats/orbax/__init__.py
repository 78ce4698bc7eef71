"""Orbax checkpoints: OCDBT index, zarr chunks, tree metadata, reader and writer."""
