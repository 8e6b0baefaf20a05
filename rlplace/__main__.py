"""`python -m rlplace`: the command line, as `rlplace`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the current folder first, which may be a stranger's: what a command imports is not from there.
    # A user's function is looked for there all the same (`rlplace.workloads.user_function`).
    first, home = sys.path[0] or ".", os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_current = not sys.flags.safe_path and os.path.isdir(first) and os.path.samefile(first, ".")
    if is_current and not os.path.samefile(first, home):  # rlplace itself may be there: a checkout
        del sys.path[0]

    from rlplace.cli.main import main

    sys.exit(main())
