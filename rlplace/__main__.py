"""`python -m rlplace`: the command line, as `rlplace`."""

from __future__ import annotations

import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
