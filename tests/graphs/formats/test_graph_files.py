"""Which format a file is in."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_files import assert_same, rich_graph

from rlplace.errors import FileProblem, UnknownName
from rlplace.graphs.formats import load_graph, save_graph


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
