"""Roles of ops, slices of batches and the column `micro_batch`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Slicing, even_sizes
from rlplace.graphs.synthetic import synthetic
from rlplace.search.parallel.layouts import roles


def chain() -> OpGraph:
    graph = synthetic("layered", layers=2, width=1)
    return dataclasses.replace(graph, targets=("parameter", *["aten.relu"] * (graph.num_ops - 1)))


def test_a_graph_is_not_cut_unless_it_says_so() -> None:
    graph = chain()
    assert graph.micro_batch.tolist() == [-1] * graph.num_ops
    assert graph.num_micro_batches == 1


def test_copies_share_a_role_and_the_rest_has_its_own() -> None:
    graph = chain()
    column = np.full(graph.num_ops, -1)
    column[1:5] = [0, 0, 1, 1]
    cut = dataclasses.replace(graph, micro_batch=column)
    found = roles(cut).tolist()
    assert cut.num_micro_batches == 2
    assert found[1:5] == [found[1], found[2], found[1], found[2]]
    assert len({found[0], found[1], found[2], *found[5:]}) == 3 + graph.num_ops - 5
    assert roles(graph).tolist() == list(range(graph.num_ops))


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidValue, match="micro_batch"):
        dataclasses.replace(chain(), micro_batch=np.zeros(2))


def test_slices_cover_the_batch_and_differ_by_one() -> None:
    assert even_sizes(10, 4) == (3, 3, 2, 2)
    slicing = Slicing(dims=(0, None, 1), sizes=even_sizes(5, 2))
    tensors = [torch.arange(5), torch.ones(3), torch.arange(10).reshape(2, 5)]
    first, second = (slicing.cut(tensors, index) for index in range(2))
    assert slicing.batch == 5
    assert slicing.starts == (0, 3)
    assert torch.equal(torch.cat([first[0], second[0]]), tensors[0])
    assert torch.equal(torch.cat([first[2], second[2]], dim=1), tensors[2])
    assert first[1] is tensors[1]
