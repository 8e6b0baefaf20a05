"""Jobs that all ranks do in processes of their own: answers, ranks that fail, and ranks that are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from many_ranks import facts_of, nodes_of

from rlplace.errors import RunnerError
from rlplace.measure.hosts import fresh_ranks
from rlplace.measure.hosts.fresh_ranks import FreshRanks, serve
from rlplace.measure.hosts.nodes import Nodes

JOB = """
import sys
def main(answers, word, fails=False):
    print("from a library")
    for line in sys.stdin:
        print(f'"{line.strip()} {word}"', file=answers, flush=True)
    if fails:
        raise SystemExit(3)
"""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Nodes]]:
    (tmp_path / "job_of_a_test.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(fresh_ranks.JOBS, "echo", "from job_of_a_test import main")
    ranks = nodes_of(facts_of(["a", "b"]))
    yield ranks
    ranks[0].end()


def test_the_first_rank_is_told_and_answers(two: list[Nodes]) -> None:
    serve(two[1])
    with contextlib.closing(FreshRanks(two[0], "echo", {"word": "back"})) as ranks:
        for word in ("there", "again"):
            ranks.tell(word)
            assert ranks.answer(60.0) == f"{word} back"


def test_a_rank_that_is_gone_is_named(two: list[Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_ranks, "LOST_AFTER_S", 0.5)
    with (
        contextlib.closing(FreshRanks(two[0], "echo", {"word": "back"})) as ranks,
        pytest.raises(RunnerError, match=r"rank 1 on 'b' gave no sign for 0.5 s"),
    ):
        ranks.answer(60.0)


def test_a_rank_that_fails_is_named(two: list[Nodes]) -> None:
    serve(two[1])
    with (
        contextlib.closing(FreshRanks(two[0], "echo", {"word": "back", "unknown": 1})) as ranks,
        pytest.raises(RunnerError, match=r"the echo of (b|rank 0) failed: TypeError: .*'unknown'"),
    ):
        ranks.answer(60.0)
