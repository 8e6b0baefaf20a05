"""DOT: boxes, arrows, clusters, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_files import rich_graph
from micrographs import fork_join

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.graph_files import COLOURS, SOURCE_COLOUR, save_dot, to_dot


def test_ops_are_boxes_in_their_module_coloured_by_phase() -> None:
    lines = to_dot(rich_graph(), depth=1).splitlines()
    start = lines.index('subgraph cluster_0 { label="enc"; color=gray;')
    assert lines[start + 1] == f'n0 [label="w\\nparameter" fillcolor="{SOURCE_COLOUR}"];'
    assert lines[start + 2].startswith(r'n2 [label="mm \"1\"\nü\naten.mm.default"')
    assert [line.split()[0] for line in lines[start + 1 : start + 6]] == ["n0", "n2", "n3", "n4", "n5"]
    assert COLOURS["forward"] in lines[start + 2]
    assert COLOURS["backward"] in lines[start + 3]
    assert COLOURS["update"] in lines[start + 5]
    assert 'n2 -> n3 [tooltip="1099511627776 bytes"];' in lines
    assert sum("->" in line for line in lines) == 7
    assert to_dot(rich_graph(), depth=2).count("subgraph") == 2


def test_a_big_graph_is_cut_and_says_so() -> None:
    text = to_dot(fork_join(9, 9), max_ops=11)
    assert text.count("label=") == 12
    assert 'label="... and 80 more ops"' in text
    assert text.count("->") == 18
    assert "more ops" not in to_dot(fork_join(9, 9))


def test_a_file_and_mistakes(tmp_path: Path) -> None:
    save_dot(rich_graph(), tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text().count("{") == (tmp_path / "g.dot").read_text().count("}") == 3
    for options in ({"max_ops": 0}, {"depth": 0}):
        with pytest.raises(InvalidValue, match="at least 1"):
            to_dot(rich_graph(), **options)
