"""What a user may ask for of a batch that is cut, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs import SplitPlan
from rlplace.measure.placement import PlacedSplit
from rlplace.session.setup import WHOLE, CutOptions, parse_batch_dims, parse_count


def test_nothing_is_cut_by_default() -> None:
    assert WHOLE.count == 1
    assert not WHOLE.is_auto
    assert CutOptions("auto").is_auto


@pytest.mark.parametrize("count", [0, -1, 1025, True, 2.0, "4", "many", None])
def test_other_counts_are_refused(count: Any) -> None:
    with pytest.raises(InvalidValue, match=r"micro_batches is .*expected `auto`, or a number from 1 to 1024"):
        CutOptions(count)


@pytest.mark.parametrize("loss", [None, 3])
def test_a_loss_is_a_word(loss: Any) -> None:
    with pytest.raises(InvalidValue, match=r"loss is .*, expected 'auto', 'separate'"):
        CutOptions(2, loss=loss)


def test_options_of_a_cut_need_one() -> None:
    with pytest.raises(InvalidValue, match=r"loss is 'joined', expected `auto` for a batch that is not cut.*--micro-b"):
        CutOptions(1, loss="joined")
    with pytest.raises(InvalidValue, match=r"batch_dims is .*expected none for a batch that is not cut"):
        CutOptions(1, batch_dims=(0,))
    with pytest.raises(UnknownName, match="did you mean 'joined'"):
        CutOptions(2, loss="join")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "-1", "2.0", "k", "1025", "²", "auto4"])
def test_other_words_for_a_count_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="micro_batches"):
        parse_count(text)


@pytest.mark.parametrize("text", ["0,", "x", "-1", "0,x=1", "x=0,x=1", "=0", "x=", "1.5", "1000"])
def test_other_words_for_dimensions_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"batch_dims is .*expected a dimension or `none` for every tensor"):
        parse_batch_dims(text)


def test_what_is_kept_is_plain_data() -> None:
    assert CutOptions(4, (0, None), "separate").to_dict() == {
        "asked": 4,
        "batch_dims": [0, None],
        "loss": "separate",
        "exact": False,
    }
    assert CutOptions("auto", {"x": 0}, is_exact=True).to_dict() == {
        "asked": "auto",
        "batch_dims": {"x": 0},
        "loss": "auto",
        "exact": True,
    }


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, rlplace.session.setup; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_split_is_kept_and_needs_no_cut() -> None:
    asked = CutOptions(1, split="mlp", split_parts="3:1")
    assert asked.plan == SplitPlan(("mlp",), (3, 1))
    assert asked.to_dict() == {**WHOLE.to_dict(), "split": "mlp", "split_parts": "3:1"}
    assert WHOLE.plan is None
    for count in (1, 4):
        assert asked.again(count, None, PlacedSplit("mlp", "3:1"))[1].plan == asked.plan
        assert asked.again(count, None, None)[1].plan is None
    with pytest.raises(InvalidValue, match=r"split_parts is '4', expected none without a split.*--split"):
        CutOptions(split_parts="4")
    with pytest.raises(UnknownName, match="class to split"):
        CutOptions(split="heads")
    chosen = CutOptions(split="auto")
    assert chosen.plan is None
    in_chunks = asked.again(1, None, PlacedSplit("mlp", "2/chunks"))[1]
    assert in_chunks.plan == SplitPlan(("mlp",), 2, "chunks")
    assert str(PlacedSplit("mlp", "3:1/chunks")) == "mlp in shards 3:1, sums in chunks"
    assert chosen.to_dict() == {**WHOLE.to_dict(), "split": "auto"}
