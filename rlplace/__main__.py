"""`python -m rlplace`: the command line, as `rlplace`."""

from __future__ import annotations

import atexit
import os
import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    code = main()
    if code and "TORCHELASTIC_RUN_ID" in os.environ:  # threads of lost connections would abort the process, with 134
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
