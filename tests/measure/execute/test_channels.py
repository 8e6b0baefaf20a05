"""Channels by themselves: copies, hand-overs, acknowledgements, and giving up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from core_hosts import core_device

from rlplace.measure.execute.device_threads import Channel, CudaChannel, CudaClock, Streams
from rlplace.measure.hosts.host import Device


def test_a_copy_is_a_tensor_of_its_own() -> None:
    channel = Channel(is_copy=True)
    original = torch.arange(6.0).reshape(2, 3).t()
    for step in range(3):  # used once a step, again and again
        channel.send(original)
        channel.wait_ready()
        copy = channel.take()
        original.add_(1)
        assert torch.equal(copy + 1, original), step
        assert copy.stride() == original.stride()


def test_a_hand_over_is_the_tensor_itself() -> None:
    channel = Channel(is_copy=False)
    original = torch.zeros(3)
    channel.send(original)
    channel.wait_ready()
    assert channel.take() is original


def test_taking_waits_for_sending_and_overwriting_for_the_acknowledgement() -> None:
    channel = Channel(is_copy=True)
    events: list[str] = []
    may_send, may_acknowledge = threading.Event(), threading.Event()

    def producer() -> None:
        may_send.wait()
        events.append("sent")
        channel.send(torch.zeros(1))
        channel.wait_copied()
        events.append("overwrites")

    def consumer() -> None:
        channel.wait_ready()
        channel.take()
        events.append("taken")
        may_acknowledge.wait()
        events.append("acknowledged")
        channel.acknowledge()

    threads = start(producer, consumer)
    may_send.set()
    may_acknowledge.set()
    join(threads)
    assert events == ["sent", "taken", "acknowledged", "overwrites"]


def test_giving_up_wakes_both_sides_and_may_come_twice() -> None:
    channel = Channel(is_copy=True)
    failed: list[str] = []

    def receiver() -> None:
        channel.wait_ready()
        try:
            channel.take()
        except AssertionError:
            failed.append("receiver")

    threads = start(receiver, lambda: channel.wait_copied() and None)
    channel.abort()
    channel.abort()
    join(threads)
    assert failed == ["receiver"]


def test_cores_get_channels_without_a_gpu() -> None:
    source, destination = core_device("cpu:0"), core_device("cpu:1")
    for is_copy in (True, False):
        channel = Streams().channel(source, destination, is_copy=is_copy)
        assert not isinstance(channel, CudaChannel)
        tensor = torch.zeros(1)
        channel.send(tensor)
        channel.wait_ready()
        assert (channel.take() is tensor) != is_copy


GPU = Device("cuda:0", "gpu", "cuda", memory_bytes=1 << 30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_gpu_copies_on_its_own_stream_and_tells_when(to_gpu: bool) -> None:
    core = core_device("cpu")
    source, destination = (core, GPU) if to_gpu else (GPU, core)
    clock = CudaClock(torch.device("cuda:0"))
    clock.start()
    channel = Streams().channel(source, destination, is_traced=True)
    assert isinstance(channel, CudaChannel)
    original = torch.arange(5.0, device="cpu" if to_gpu else "cuda")
    for _ in range(2):
        begin = clock.mark()
        channel.send(original)
        channel.wait_ready()
        copy = channel.take()
        channel.wait_arrived()
        channel.acknowledge()
        channel.wait_copied()
        original.add_(1)
        end = clock.mark()
        assert copy.device.type == ("cuda" if to_gpu else "cpu")
        assert torch.equal(copy.cpu() + 1, original.cpu())
        assert channel.began is not None
        times = [clock.seconds(mark) for mark in (begin, channel.began, channel.arrived, end)]
        assert times[1] <= times[2] <= times[3]


def start(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
