"""`rlplace fidelity`: what it tells people."""

from __future__ import annotations

from rlplace.cli.simulate import fidelity_words
from rlplace.measure.prediction_error import Fidelity


def test_fidelity_tells_people_its_figures() -> None:
    figures = Fidelity(0.978, 0.56, 0.031, 0.069, 0.004, 0.001, 0.943, -0.07, 40)
    words = fidelity_words({**figures.to_dict(), "plot": "fidelity.png"})
    for figure in ("40 unseen placements", "0.978", "median 3.1%", "0.4% slower"):
        assert figure in words
    assert words.endswith("scatter plot: fidelity.png")


def test_fidelity_says_where_there_is_no_rank_correlation() -> None:
    figures = Fidelity(0.978, None, 0.031, 0.069, 0.004, 0.001, 0.943, None, 8)
    words = fidelity_words({**figures.to_dict(), "plot": "fidelity.png"})
    assert (
        "correlation 0.978 (two measurements of the same placements: 0.943); among the best quarter none (none)"
        in words
    )
