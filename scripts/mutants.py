"""Whether the tests notice small faults: python scripts/mutants.py [--count 60] [--seed 0] [--tree FOLDER]

Seeded places in all rooms of the package are changed one at a time, in a clone of the tree: a comparison, an operator,
a condition or a number. Each mutant meets the tests that name its module and those of its folder, short ones before
those marked `slow`, until one fails. Both rates are lower bounds: other tests may notice more.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
TIMEOUT_S = 900
"""A mutant that runs longer than this is killed: it may loop for ever."""


def sites(tree: ast.Module) -> list[ast.AST]:
    """Nodes that `mutate` can change, annotations and messages of errors left out."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns", "exc")]
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            parts.append(node)
        skipped.update(inner for part in parts if isinstance(part, ast.AST) for inner in ast.walk(part))
    return [node for node in ast.walk(tree) if node not in skipped and mutate(node, is_trial=True)]


def mutate(node: ast.AST, *, is_trial: bool = False) -> str:
    """Changes `node` in place, and says how; "" where there is nothing to change."""
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in SWAPS:
            new = SWAPS[type(op)]()
            if not is_trial:
                node.__dict__.update({"ops": [new]} if isinstance(node, ast.Compare) else {"op": new})
            return f"{type(op).__name__} -> {type(new).__name__}"
        case ast.If() | ast.While() | ast.IfExp():
            if not is_trial:
                node.test = ast.UnaryOp(ast.Not(), node.test)
            return "condition negated"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            if not is_trial:
                node.value = value + 1
            return f"{value} -> {value + 1}"
    return ""


def choose(root: Path, count: int, seed: int) -> list[tuple[Path, int]]:
    """`count` mutants as (module, number of its site), from the rooms in turn."""
    rng, rooms = random.Random(seed), {}
    for path in sorted((root / "rlplace").rglob("*.py")):
        if path.name != "__init__.py":
            rooms.setdefault(path.relative_to(root / "rlplace").parts[0], []).append(path)
    chosen: list[tuple[Path, int]] = []
    folders = [found for name, found in rooms.items() if not name.endswith(".py")]
    while len(chosen) < count:
        path = rng.choice(folders[len(chosen) % len(folders)])
        if places := sites(ast.parse(path.read_text(encoding="utf-8"))):
            chosen.append((path.relative_to(root), rng.randrange(len(places))))
    return chosen


def test_files(root: Path, module: Path) -> list[str]:
    """Tests that name the module, then those of its folder."""
    dotted, mirror = ".".join(module.with_suffix("").parts), root / "tests" / Path(*module.parts[1:-1])
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("test_*.py"))}
    named = [path for path, text in texts.items() if dotted in text]
    return [str(path) for path in dict.fromkeys([*named, *(path for path in texts if mirror in path.parents)])]


def is_killed(root: Path, tests: list[str], marks: str) -> bool:
    """Whether one of the tests fails; a room that has none with these marks kills nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    options = parser.parse_args()
    ended: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", str(options.tree.resolve()), str(root)], check=True)
        for number, (module, site) in enumerate(choose(root, options.count, options.seed), start=1):
            text = (root / module).read_text(encoding="utf-8")
            tree = ast.parse(text)
            node = sites(tree)[site]
            line, how = getattr(node, "lineno", 0), mutate(node)
            (root / module).write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
            tests = test_files(root, module)
            marks = [marks for marks in ("not slow", "slow") if tests]
            ended.append(next((marks for marks in marks if is_killed(root, tests, marks)), "survived"))
            (root / module).write_text(text, encoding="utf-8")
            print(f"{number:3} {module}:{line} {how}: {ended[-1]}", flush=True)
    short, survived = ended.count("not slow"), ended.count("survived")
    print(f"killed: {len(ended) - survived} of {len(ended)}, by the short tests alone {short}")


if __name__ == "__main__":
    main()
