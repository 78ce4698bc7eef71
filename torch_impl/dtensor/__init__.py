"""DTensors over uneven rows: the placement, the operators, and what is refused."""

import torch

from torch_impl.dtensor.operator_rules import answer_operators
from torch_impl.dtensor.ops import dispatch
from torch_impl.dtensor.placement import FusedShard, RowShard
from torch_impl.dtensor.tensor import RowDTensor, rebuild_dtensor

# Here and not in ``tensor``: this runs before any module of the package can be used, and no module imports the package.
RowDTensor.dispatcher = dispatch
answer_operators(RowDTensor)
# ``torch.load(weights_only=True)`` reads what was pickled: none of these runs anything that a file could choose.
torch.serialization.add_safe_globals([FusedShard, RowShard, rebuild_dtensor])
