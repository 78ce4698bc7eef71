"""A third checkpoint for a comparison of two: another run of the same training, which shows how far runs diverge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo, is_whole
from bridge.core.mapping.plan.plan import TranslationPlan
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.text import first_of


@dataclass(frozen=True)
class Noise:
    """The tensors of a noise checkpoint under the names of ``b``."""

    reader: CheckpointReader
    plan: TranslationPlan

    @staticmethod
    def find(
        reader: CheckpointReader,
        wanted: Sequence[TensorInfo],
        format: str,
        mapped: Callable[[], TranslationPlan | None],
    ) -> Noise:
        """The tensors of an open checkpoint that correspond to ``wanted``, the floating-point tensors of ``b``.

        The checkpoint has the names of ``b``, by tree path if ``b`` has another ``format``, or the names of ``a``,
        which ``mapped`` translates (to None without a mapping). Any floating-point dtype is accepted.

        Raises CheckpointError that names missing tensors, or tensors of another shape or kind.
        """
        plan = make_plan(reader, format)
        missing, reason = _missing(plan, wanted), ""
        if missing:
            try:
                translated = mapped() or plan
            except CheckpointError as error:
                reason = f"; the mapping does not fit either: {error}"
            else:
                plan = min(plan, translated, key=lambda candidate: len(_missing(candidate, wanted)))
                missing = _missing(plan, wanted)
        if missing:
            raise CheckpointError(
                f"noise checkpoint {reader.path}: expected every floating-point tensor that is compared, under its "
                f"name in B or, with a mapping, in A; missing: {first_of(missing)}{reason}"
            )
        unlike = []
        for info in wanted:
            planned = plan.tensors[info.name]
            if planned.shape != info.shape:
                unlike.append(f"{info.name} of shape {list(planned.shape)} where B has {list(info.shape)}")
            elif _kind(planned.dtype) != _kind(info.dtype):
                unlike.append(f"{info.name} of dtype {planned.dtype} where B has {info.dtype}")
        if unlike:
            raise CheckpointError(
                f"noise checkpoint {reader.path}: expected the tensors of B, got {first_of(unlike)}"
            )
        return Noise(reader, plan)

    def itemsize(self, name: str) -> int:
        """Bytes per element of the tensor that corresponds to ``name`` of ``b``; 0 for integers without one."""
        planned = self.plan.tensors.get(name)
        return 0 if planned is None else planned.dtype.itemsize

    def read(self, name: str, box: Box) -> np.ndarray:
        """A region of the tensor that corresponds to ``name`` of ``b``, in the dtype of the noise checkpoint."""
        return self.plan.tensors[name].read(self.reader, box)


def _missing(plan: TranslationPlan, wanted: Sequence[TensorInfo]) -> list[str]:
    return [info.name for info in wanted if info.name not in plan.tensors]


def _kind(dtype: np.dtype) -> str:
    """Complex, integer, or floating-point of any width."""
    if dtype.kind in "biuc":
        return dtype.kind
    return "i" if is_whole(dtype) else "f"
