"""`rlplace`: parses the command line, runs the command, turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro
from tyro.extras import SubcommandApp

from rlplace import __version__
from rlplace.cli import compare, graph, learn, look, time_steps
from rlplace.errors import RlplaceError, UserError

DESCRIPTION = "Finds where each op of a PyTorch model should run so that the measured step is shortest."

COMMANDS = {
    name: command for room in (learn, compare, time_steps, look, graph) for name, command in room.COMMANDS.items()
}

app = SubcommandApp()
for name, command in COMMANDS.items():
    app.command(command, name=name)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `rlplace ARGV`: 0, 2 for a mistake of the user's, 1 for a failure, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"rlplace {__version__}")
        return 0
    try:
        app.cli(
            prog="rlplace",
            description=DESCRIPTION,
            args=arguments or ["--help"],
            use_underscores=False,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except UserError as error:
        print(f"rlplace: error: {error}", file=sys.stderr)
        return 2
    except RlplaceError as error:
        print(f"rlplace: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlplace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
