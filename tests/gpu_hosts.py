"""Hosts of real GPUs, for tests that are marked `gpu`: those without one are skipped, as are those that need two."""

from __future__ import annotations

import pytest
import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import resolve_host

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WORDS = ("cuda", "cuda+cpu", "cuda/2", "cuda/2+cpu", "cuda/4")
"""Of hosts with two devices and more; `cuda` needs two GPUs for that."""


def on_gpus(word: str) -> Host:
    """The host, if it has two devices at least here."""
    if word == "cuda" and cuda.num_gpus() < 2:
        pytest.skip("needs two CUDA GPUs; on one, its parts (cuda/2) stand for them")
    return resolve_host(word)
