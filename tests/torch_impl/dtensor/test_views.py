"""Views of sharded tensors that rows can represent share memory and count their writes."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import RankGroup
from tests.support.torch_impl.dtensor_cuts import CUTS, placed
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import is_tensor_parallel
from torch_impl.dtensor.tensor import RowDTensor


def slices() -> None:
    plain = [cut for cut in CUTS if not is_tensor_parallel(cut.tensor_parallel)]
    for cut, full, tensor in placed(cuts=plain):
        if full.ndim == 0 or not full.shape[0]:
            continue
        for index in range(-full.shape[0], full.shape[0]):
            view, version = tensor[index], local_of(tensor)._version
            assert type(view) is RowDTensor
            assert torch.equal(view.full_tensor(), full[index]), cut
            assert local_of(tensor)._version == version
            view.mul_(-2)
            full[index].mul_(-2)
            assert local_of(tensor)._version > version
            assert torch.equal(tensor.full_tensor(), full), cut
        with pytest.raises(IndexError):
            tensor[full.shape[0]]


def test_an_item_of_the_first_dimension_is_a_view_whose_writes_count(ranks: RankGroup) -> None:
    ranks.run(4, slices)
