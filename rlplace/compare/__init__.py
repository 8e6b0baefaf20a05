"""Compare: every search method on one problem, at equal budgets, beside a proven bound, in one table."""
