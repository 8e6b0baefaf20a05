"""One stage of `make gpu`, in a process of its own: python benchmarks/gpu_stage.py STAGE HOST."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

from rlplace.files import jsonable


def main(stage: str, host_word: str) -> int:
    verdict = importlib.import_module(f"gpu_stages.{stage}").run(host_word)
    print(json.dumps(jsonable(asdict(verdict))))
    return verdict.status == "failed"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
