"""Learns a placement: python scripts/train_placer.py WORKLOAD [--budget 5m] ... (as `rlplace train`)."""

import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
