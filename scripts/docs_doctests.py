"""An extension of Griffe: examples in docstrings are shown as Python, wherever in the docstring they are."""

from itertools import pairwise
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences each run of lines that begins with `>>>`, up to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """`text` with its doctests in fences."""
    lines, indent = [], None
    for line, after in pairwise([*text.splitlines(), ""]):
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        lines.append(line)
        if indent is not None and not after.strip():
            lines.append(f"{indent}```")
            indent = None
    return "\n".join(lines)
