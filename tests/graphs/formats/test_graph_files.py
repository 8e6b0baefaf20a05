"""Which format a file is in.

DOT: boxes, arrows, clusters, and what is left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_files import assert_same, rich_graph
from micrographs import fork_join

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.formats.graph_files import COLOURS, SOURCE_COLOUR, save_dot, to_dot


@pytest.mark.parametrize("name", ["g.json", "g.graphml", "g.xml", "g.GRAPHML"])
def test_the_ending_says_the_format(name: str, tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / name)
    assert_same(load_graph(tmp_path / name), rich_graph())


@pytest.mark.parametrize("ending", [".json", ".graphml"])
def test_the_content_says_it_where_the_ending_does_not(ending: str, tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / f"g{ending}")
    (tmp_path / "plain").write_bytes((tmp_path / f"g{ending}").read_bytes())
    assert_same(load_graph(tmp_path / "plain"), rich_graph())


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / "g.dot")
    with pytest.raises(FileProblem, match="DOT is for looking at"):
        load_graph(tmp_path / "g.dot")
    with pytest.raises(UnknownName, match=r"'.onx'.*Known: .dot, .graphml, .gv, .json, .xml"):
        save_graph(rich_graph(), tmp_path / "g.onx")
    (tmp_path / "g.txt").write_text("hello")
    with pytest.raises(UnknownName, match=r"\.txt"):
        load_graph(tmp_path / "g.txt")
    for missing in ("no.json", "no.graphml", "no.onnx", "no"):
        with pytest.raises(FileProblem, match="no such file"):
            load_graph(tmp_path / missing)


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
