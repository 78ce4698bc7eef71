"""Arrays of an Orbax checkpoint: zarr chunks, in files of their own or in the OCDBT key-value store."""
