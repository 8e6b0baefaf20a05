"""The page on host files: its example is loaded and used, and every field is named."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlplace.measure import Device, Host, Link, Route
from rlplace.measure.hosts.host_file import Wiring

PAGE = Path(__file__).resolve().parents[1] / "docs" / "host-files.md"
TEXT = PAGE.read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return str(found)


def test_its_example_is_a_host_that_prints_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text(block("yaml"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block("python"), PAGE.name, "exec"), names)
    (said,) = re.findall(r"print\(host\)  # (.*)", TEXT)
    assert capsys.readouterr().out.splitlines()[0] == said
    host = names["host"]
    assert host.is_simulated
    routes = {(route.source, route.destination): route.links for route in host.routes}
    assert routes["cuda:0", "cuda:1"] == ("pcie:cuda:0:up", "pcie:cuda:1:down")
    assert routes["cpu", "cuda:1"] == ("pcie:cuda:1:down",)
    total_s = names["problem"].costs.op_time_s.sum(axis=0)
    assert total_s[0] < total_s[1] < total_s[2]  # the big GPU, the small one, the CPU


@pytest.mark.parametrize(
    ("section", "record"),
    [("The host", Host), ("Devices", Device), ("Links and routes", Link), ("Links and routes", Route)],
)
def test_every_field_has_its_row(section: str, record: type) -> None:
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    rows = " ".join(line.split("|")[1] for line in part.splitlines() if line.startswith("|"))
    assert [field.name for field in fields(record) if f"`{field.name}`" not in rows] == []


def test_the_short_form_of_links_is_told_whole() -> None:
    (part,) = re.findall(r"^## Topology\n(.*)", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert [field.name for field in fields(Wiring) if f"`{field.name}`" not in part] == []


def test_what_it_says_of_defaults_is_so() -> None:
    device, host = Device("a", "k", "simulated", 1), Host("h", (Device("a", "k", "simulated", 1),))
    assert (device.memory_granularity_bytes, device.context_bytes, device.launch_s) == (1, 0, 0.0)
    assert (host.dispatch_s, host.copy_dispatch_s, host.dispatch_order, host.run_ahead) == (0.0, 0.0, "plan", 1024)
    assert (Link("l", 1.0).latency_s, Route("a", "b", ()).blocks_source) == (0.0, False)
