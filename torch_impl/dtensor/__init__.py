"""DTensors over uneven rows: the placement, the operators, and what is refused."""

from torch_impl.dtensor.operator_rules import answer_operators
from torch_impl.dtensor.ops import dispatch
from torch_impl.dtensor.tensor import RowDTensor

# Here and not in ``tensor``: this runs before any module of the package can be used, and no module imports the package.
RowDTensor.dispatcher = dispatch
answer_operators(RowDTensor)
