import sys

import numpy as np
import pytest

from rlplace.errors import MissingExtra
from rlplace.graphs.grouping.groups import metis_parts


def parts_of(num_parts, node_weight):
    # a path of six nodes whose edges weigh 5, 1, 5, 1, 5
    path = np.arange(5)
    return metis_parts(6, path, path + 1, np.array([5.0, 1.0, 5.0, 1.0, 5.0]), np.array(node_weight), num_parts)


def test_light_edges_are_cut():
    pytest.importorskip("pymetis")
    parts = parts_of(3, [1.0] * 6).tolist()
    assert parts[0] == parts[1]
    assert parts[2] == parts[3]
    assert parts[4] == parts[5]
    assert len(set(parts)) == 3


def test_as_many_parts_as_nodes_need_no_metis():
    pytest.importorskip("pymetis")
    assert parts_of(9, [1.0] * 6).tolist() == list(range(6))


def test_absence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingExtra, match=r"rlplace\[metis\]"):
        parts_of(2, [1.0] * 6)
