"""The page on exports: its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from core_hosts import core_host
from spmd_ranks import launched, scattered

from rlplace.measure import Placement
from rlplace.measure.placement import save_placement

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exports.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_its_code_runs() -> None:
    names: dict[str, Any] = {}
    for code in blocks("python"):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["entries"] == {"": 0}, "a small model is best off on the faster GPU"
    assert names["problem"].grouping.num_groups == 4, "the four modules of the text"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_its_loop_of_ranks_trains_as_plain_pytorch_which_reads_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = (code for code in blocks("py") if "to_rank" in code)
    (reading,) = (code for code in blocks("py") if "set_optimizer_state_dict" in code)
    names: dict[str, Any] = {}
    exec(program.partition("step = to_rank")[0], names)
    graph, host, model = names["graph"], core_host(2), names["model"]
    devices = tuple(device.name for device in host.devices)
    placement = Placement(scattered(graph, 2), graph.fingerprint, host.fingerprint, devices)
    monkeypatch.chdir(tmp_path)
    save_placement(placement, "placement.json")
    Path("train.py").write_text(program, encoding="utf-8")
    printed = float(launched(tmp_path / "train.py", 2))

    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.zeros(())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(names["x"]), names["y"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert printed == pytest.approx(loss.item(), rel=1e-4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
        parameter.grad = None  # as of a new model: with one, PyTorch does not ask for state
    exec(reading, names)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=1e-3, atol=1e-5)
    assert names["plain"].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.99**20)
    assert {float(state["step"]) for state in names["plain"].state.values()} == {20.0}
