"""Learns a placement: python scripts/train_placer.py WORKLOAD [--policy P --learner L] ... (as `rlplace train`).

As a program of a Weights & Biases sweep (`scripts/sweep.yaml`) every run has a folder of its own: runs/sweep/ID.
"""

import os
import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    words = sys.argv[1:]
    if "WANDB_SWEEP_ID" in os.environ and "--run" not in words:
        words += ["--run", f"runs/sweep/{os.environ['WANDB_RUN_ID']}"]
    sys.exit(main(["train", *words]))
