"""`lazy`: names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562) that finds names where its `if TYPE_CHECKING:` block imports them.

    The block tells type checkers and readers where a name is; this makes it true at run time, and nothing is imported
    before it is used. A package imported from itself (`from rlplace import measure`) is a room of it.

    Args:
        package: `__name__` of the package.
        file: its `__file__`.

    Returns:
        A function of a name; it raises AttributeError for one that the block does not import.
    """

    @cache
    def homes() -> dict[str, str]:
        import ast

        whole = ast.parse(Path(file).read_text(encoding="utf-8")).body
        blocks = [each for each in whole if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in imports for alias in node.names if node.module}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes()[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes()[name]), name)

    return get
