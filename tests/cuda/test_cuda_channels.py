"""Channels between made-up GPUs, and their streams, by themselves."""

from __future__ import annotations

import pytest
import torch
from fake_gpus.gpu_plans import gpu_host
from fake_gpus.late_queues import FakeEvent, FakeStream
from fake_gpus.machine import Machine
from fake_gpus.plan_runs import judged, machine_installed

from rlplace import cuda
from rlplace.measure.execute.device_threads import Streams
from rlplace.measure.profiling.profile import profile_links


def test_what_may_be_taken_has_been_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that `abort` woke takes what is there: never a tensor whose event is still that of another step."""
    with machine_installed() as machine, machine.attached():
        source, destination = gpu_host(("cuda:0", "cuda:1")).devices
        channel = Streams().channel(source, destination)
        tensor, record = torch.ones(3, device=torch.device("cuda", 0)), cuda.record

        def take_first(event: FakeEvent, stream: FakeStream) -> None:
            with pytest.raises(AssertionError, match="nothing was sent"):
                channel.take()
            record(event, stream)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "record", take_first)
            channel.send(tensor)
        assert channel.take().device == torch.device("cuda", 1)


@pytest.mark.slow
def test_links_are_measured_in_order() -> None:
    def body(_: Machine) -> list[str]:
        links = profile_links(gpu_host(("cuda:0/0", "cuda:0/1", "cuda:1", "cpu")), repeats=1).links
        return [link.name for link in links if not link.bandwidth_bytes_per_s > 0]

    verdict = judged(body, "compute")
    assert not verdict.caught_by, str(verdict)


def test_streams_of_threads_left_behind_are_waited_for_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that timed out goes on there, in memory that is about to be set anew."""
    with machine_installed(), monkeypatch.context() as patch:
        (device,) = gpu_host(("cuda:0",)).devices
        streams, busy = Streams(), set[object]()
        patch.setattr(cuda, "is_done", lambda stream: stream not in busy)
        busy.add(streams.renew_compute(device))
        streams.renew_compute(device)
        assert not streams.settle(0.0)
        busy.clear()
        assert streams.settle(0.0)
