"""Processes of plain PyTorch train as one process does: replicas, shards and stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replica_ranks import Job, losses_of_ranks, whole_losses

pytestmark = pytest.mark.slow
DDP = {"bucket_mb": 1.0, "in_bf16": False}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", DDP),
    ("ddp", {**DDP, "num_accumulated": 2}),
    ("fsdp2", {"by_block": False, "keeps": True}),
    ("fsdp2", {"by_block": True, "keeps": False}),
    ("fsdp2", {"by_block": True, "keeps": False, "num_accumulated": 2}),
    ("fsdp2", {"by_block": True, "keeps": True, "num_accumulated": 2}),
)
JOBS: list[Job] = [(kind, name, each) for kind, each in OPTIONS for name in ("skipping", "unrolled")]
ROUNDED: Job = ("ddp", "skipping", DDP | {"in_bf16": True})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    return losses_of_ranks(tmp_path_factory.mktemp("replicas"), [*JOBS, ROUNDED])


@pytest.mark.parametrize("number", range(len(JOBS)), ids=[f"{kind}-{name}-{each}" for kind, name, each in JOBS])
def test_replicas_train_as_one_process(number: int, trained: list[list[list[float]]]) -> None:
    """Micro-batches of a replica are equal here, so accumulated gradients are those of one."""
    losses = trained[number]
    assert losses[0] != losses[1], "each has a part of the batch of its own"
    np.testing.assert_allclose(np.mean(losses, axis=0), whole_losses(JOBS[number][1]), rtol=0, atol=1e-10)


def test_gradients_in_bf16_are_another_arithmetic(trained: list[list[list[float]]]) -> None:
    apart = np.abs(np.mean(trained[-1], axis=0) - whole_losses("skipping"))
    assert apart[0] < 1e-10, "nothing was updated before"
    assert 1e-9 < apart[-1] < 1e-2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_stages_train_as_one_process(tmp_path: Path) -> None:
    """The third process has no stage."""
    options = {"num_stages": 2, "begins": ["model.blocks.1"], "dims": [0, 0, 0], "num_micro_batches": 4}
    options |= {"averages": True}
    each = (options | {"schedule": name} for name in ("ScheduleGPipe", "Schedule1F1B"))
    jobs: list[Job] = [("pipeline", "skipping", given) for given in each]
    for losses in losses_of_ranks(tmp_path, jobs, count=3):
        assert losses[0] == losses[2] == []
        np.testing.assert_allclose(losses[1], whole_losses("skipping"), rtol=0, atol=1e-10)


def test_rows_over_the_ranks_of_torchrun(tmp_path: Path) -> None:
    rows = ("ddp", "ddp-bf16-gradients", "fsdp2", "torch-pipeline")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command += ["rlplace", "compare", "gpt2@layers=2,width=16,heads=2,batch=8,tokens=6,vocab=19", "--host", "nodes"]
    command += ["--methods", ",".join(("single", *rows)), "--micro-batches", "2", "--evaluations", "20"]
    command += ["--store", "off", "--json"]
    env = {**os.environ, "RLPLACE_IN_PROCESS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {row["method"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert {found[name]["status"] for name in rows} == {"ok"}, found
    assert found["ddp"]["why"].startswith("buckets of ")
    assert "another arithmetic" in found["ddp-bf16-gradients"]["why"]
    assert "stages, cut before " in found["torch-pipeline"]["why"]
