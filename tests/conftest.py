"""Settings of every test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_intra_op_thread() -> None:
    """Tests run beside others: two threads that wait for each other on a busy core take many times as long as one."""
    torch.set_num_threads(1)
