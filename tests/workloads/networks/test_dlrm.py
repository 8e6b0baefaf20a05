"""`DLRM` against its definition, sample by sample."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rlplace.workloads import build, parse_workload
from rlplace.workloads.configs import CRITEO_ROWS, DLRMConfig
from rlplace.workloads.networks.dlrm import Interaction

TINY = "dlrm@tables=3,max_rows=11,width=4,dense=5,lookups=2,hidden=16,batch=6"


def test_tables_have_the_rows_of_the_data_up_to_a_most() -> None:
    assert len(CRITEO_ROWS) == 26
    assert sum(CRITEO_ROWS) == 33_762_577
    assert DLRMConfig.paper().rows == CRITEO_ROWS
    assert DLRMConfig(tables=28, max_rows=600).rows[:3] == (600, 583, 600)
    assert DLRMConfig(tables=28, max_rows=600).rows[26:] == (600, 583)


def test_interaction_is_every_pair_once() -> None:
    torch.manual_seed(0)
    vectors_BVW = torch.randn(2, 4, 3)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    expected = torch.stack([(vectors_BVW[:, i] * vectors_BVW[:, j]).sum(dim=1) for i, j in pairs], dim=1)
    interaction = Interaction(4)
    assert interaction.num_pairs == len(pairs) == len(list(itertools.combinations(range(4), 2)))
    torch.testing.assert_close(interaction(vectors_BVW), expected)


def test_one_sample_by_hand() -> None:
    workload = build(parse_workload(TINY))
    model, (dense_BD, rows_TBL, clicks_B) = workload.model, tuple(workload.inputs)
    output = model(dense_BD, rows_TBL, clicks_B)
    sample = 3
    vectors = [model.bottom(dense_BD[sample])]
    vectors += [
        table.weight[rows_TBL[t, sample, 0]] + table.weight[rows_TBL[t, sample, 1]]
        for t, table in enumerate(model.tables)
    ]
    dots = torch.stack([vectors[i] @ vectors[j] for i in range(4) for j in range(i)])
    torch.testing.assert_close(output.logits[sample], model.top(torch.cat((vectors[0], dots)))[0])
    torch.testing.assert_close(output.loss, binary_cross_entropy_with_logits(output.logits, clicks_B))
    assert model(dense_BD, rows_TBL).loss is None
    assert set(clicks_B.tolist()) <= {0.0, 1.0}
