"""How much of a method's time goes into measuring, by hand."""

from __future__ import annotations

from rlplace.training.searches.racing_host import LoopBudget


def test_budgets_count_the_placements_that_fit() -> None:
    budget = LoopBudget.of(100.0, 0.6, reference_s=0.1)
    assert budget.measurements == int((0.4 - 0.15) * 100.0 / 0.65)
    assert LoopBudget.of(1.0, 0.6, reference_s=60.0).measurements == 4  # what the last race needs
    traced = LoopBudget.of(100.0, 0.6, reference_s=0.1, is_traced=True)
    assert traced.measurements == int((0.4 - 0.15) * 100.0 / 0.85)
