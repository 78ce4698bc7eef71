"""The row of a parameter group in the layout reports of both runtimes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupReport:
    """Parameters of a unit that share flat buffers, or at least dtypes, and are all trainable or all frozen.

    parameters: their names. numel: elements; padded_numel: with padding. num_shards: the number of shards of the main
    weights. shard_sizes: elements of one shard, by buffer, multiples of align. fingerprint: of the layout. main_dtype,
    compute_dtype, reduce_dtype, grad_dtype: as text, see ``bridge.core.sharding.policy.group_dtypes``. gather_dtype:
    the dtype of weights on the network, compute_dtype or a float8 format. gather_bytes: bytes to gather the whole
    group, padding and scales included.
    """

    parameters: tuple[str, ...]
    trainable: bool
    numel: int
    padded_numel: int
    num_shards: int
    shard_sizes: tuple[int, ...]
    align: int
    strategy: str
    fingerprint: str
    main_dtype: str
    compute_dtype: str
    reduce_dtype: str
    grad_dtype: str
    gather_dtype: str
    gather_bytes: int

    @property
    def padding(self) -> float:
        """Padding as a fraction of the real elements."""
        return self.padded_numel / self.numel - 1 if self.numel else 0.0

    @property
    def cells(self) -> dict[str, str]:
        """The row of a table, by column."""
        dtypes = [self.main_dtype, self.compute_dtype, self.reduce_dtype, self.grad_dtype]
        gathered = "" if self.gather_dtype == self.compute_dtype else f" gathered as {self.gather_dtype}"
        return {
            "params": f"{len(self.parameters)}{'' if self.trainable else ' frozen'}",
            "elements": f"{self.numel:,}",
            "padding": f"{100 * self.padding:.2f} %",
            "shards": str(self.num_shards),
            "shard": " + ".join(f"{size:,}" for size in self.shard_sizes) or "0",
            "align": str(self.align),
            "strategy": self.strategy,
            "dtypes": "/".join(dtypes[:1] if len(set(dtypes)) == 1 else dtypes) + gathered,
        }
