"""Exports a run's placement: python scripts/export_placement.py DIR [--check] ... (as `rlplace export`)."""

import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
