"""DTensors over uneven rows: the placement, the supported operators, and the refusals."""

import torch

from torch_impl.dtensor.operator_rules import answer_operators
from torch_impl.dtensor.ops import dispatch
from torch_impl.dtensor.placement import FusedShard, RowShard
from torch_impl.dtensor.tensor import RowDTensor, rebuild_dtensor

# Set here, not in ``tensor``: this runs before any module of the package is used, and no module imports the package.
RowDTensor.dispatcher = dispatch
answer_operators(RowDTensor)
# ``torch.load(weights_only=True)`` needs these to read pickles; none of them runs anything that a file could choose.
torch.serialization.add_safe_globals([FusedShard, RowShard, rebuild_dtensor])
