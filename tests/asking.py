"""Commands, run in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from rlplace.cli.main import main


def asked(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr; an error that nobody expected comes through."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()
