"""What the script of mutants changes, and that the same seed chooses the same places."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))
TEXT = """
def f(a: int = 1, b: 'list[0]' = ()):
    if a < 2 and b:
        return a + 3
    raise ValueError(4 * a)
"""
MUTATED = ["a: int=2", "not (a < 2 and b)", "a < 2 or b", "a - 3", "a <= 2", "a + 4", "a < 3"]


def test_each_site_is_changed_alone_and_neither_annotations_nor_messages_are() -> None:
    found = []
    for number in range(len(MUTANTS["sites"](ast.parse(TEXT)))):
        tree = ast.parse(TEXT)
        assert MUTANTS["mutate"](MUTANTS["sites"](tree)[number])
        found.append(ast.unparse(ast.fix_missing_locations(tree)))
    assert len(found) == len(set(found)) == len(MUTATED)
    for change in MUTATED:
        assert sum(change in text for text in found) == 1, change


def test_the_same_seed_chooses_the_same_places_and_every_room_has_one() -> None:
    chosen = MUTANTS["choose"](ROOT, 60, 3)
    assert chosen == MUTANTS["choose"](ROOT, 60, 3) != MUTANTS["choose"](ROOT, 60, 4)
    rooms = {path.parent.name for path in (ROOT / "rlplace").glob("*/__init__.py")}
    assert {module.parts[1] for module, _ in chosen} >= rooms - {"__pycache__"}
