"""Arrays of an Orbax checkpoint: zarr chunks, in separate files or in the OCDBT key-value store."""
