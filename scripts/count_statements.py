"""The size of the code: python scripts/count_statements.py

Modules (`__init__.py` aside), those of less than 60 and more than 700 lines, lines, and statements: nodes of the syntax
tree that are statements, docstrings aside.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("rlplace", "scripts", "benchmarks", "tests")
SHORT, LONG = 60, 700


def num_statements(text: str) -> int:
    """Statements in a module, without bare strings."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    values = (node.value for node in found if isinstance(node, ast.Expr))
    return len(found) - sum(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in values)


def main() -> None:
    print(f"{'':12}{'modules':>9}{f'< {SHORT}':>7}{f'> {LONG}':>7}{'lines':>9}{'statements':>12}")
    for folder in FOLDERS:
        texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}
        lines = {path: len(text.splitlines()) for path, text in texts.items()}
        modules = [count for path, count in lines.items() if path.name != "__init__.py"]
        short, long = sum(count < SHORT for count in modules), sum(count > LONG for count in modules)
        statements = sum(num_statements(text) for text in texts.values())
        print(f"{folder:12}{len(modules):>9,}{short:>7}{long:>7}{sum(lines.values()):>9,}{statements:>12,}")


if __name__ == "__main__":
    main()
