"""What goes from a device to another arrives as it was: all ordered pairs, both ways at once, then overwritten."""

from __future__ import annotations

import itertools

import torch

from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.measure import Device, resolve_host
from rlplace.measure.execute.device_threads import Channel, Crew, Job, torch_device

ROUNDS = 3


def run(host_word: str) -> Verdict:
    host = resolve_host(host_word)
    wrong: list[str] = []
    pairs = list(itertools.combinations(host.devices, 2))
    for one, other in pairs:
        wrong += _exchange(one, other)
    line = f"{len(pairs)} pairs on {host.name}, {len(_originals(0))} tensors, both directions at once, {ROUNDS} times"
    line += f": wrong are {', '.join(wrong[:4])}" if wrong else ""
    return Verdict.of(not wrong and bool(pairs), line, wrong=wrong)


def _exchange(one: Device, other: Device) -> list[str]:
    """What did not arrive as it was."""
    wrong: list[str] = []
    crew = Crew((one, other))
    try:
        for number in range(ROUNDS):
            ways = ((one, other, 2 * number), (other, one, 2 * number + 1))
            originals = {source.name: _originals(seed) for source, _, seed in ways}
            here: dict[str, list[torch.Tensor]] = {}
            for device in (one, other):
                with cuda.settled(torch_device(device)):
                    here[device.name] = [_like(tensor, torch_device(device)) for tensor in originals[device.name]]
            channels = {
                source.name: [crew.streams.channel(source, destination) for _ in originals[source.name]]
                for source, destination, _ in ways
            }
            jobs = [
                _job(device, partner, here[device.name], originals[partner.name], channels, wrong)
                for device, partner in ((one, other), (other, one))
            ]

            def give_up(made: dict[str, list[Channel]] = channels) -> None:
                for channel in itertools.chain(*made.values()):
                    channel.abort()

            crew.run(jobs, number, on_error=give_up, deadline_s=60.0)
    finally:
        crew.stop()
    return wrong


def _job(
    device: Device,
    partner: Device,
    mine: list[torch.Tensor],
    expected: list[torch.Tensor],
    channels: dict[str, list[Channel]],
    wrong: list[str],
) -> Job:
    outgoing, incoming = channels[device.name], channels[partner.name]

    def run(_: int) -> None:
        arrived = []
        for tensor, channel in zip(mine, outgoing, strict=True):
            channel.send(tensor)
        for channel in incoming:
            channel.wait_ready()
            arrived.append(channel.take())
            channel.wait_arrived()
            channel.acknowledge()
        for tensor, channel in zip(mine, outgoing, strict=True):
            channel.wait_copied()
            tensor.zero_()  # the copy must not see this
        for index, (tensor, original) in enumerate(zip(arrived, expected, strict=True)):
            is_there = tensor.device.type == torch_device(device).type
            if not is_there or not torch.equal(tensor.cpu(), original):
                what = f"tensor {index} ({original.dtype} {tuple(original.shape)})"
                wrong.append(f"{partner.name} to {device.name}: {what}")

    return run


def _originals(seed: int) -> list[torch.Tensor]:
    """Of one element and of 32 MiB, of four types, dense and not."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(8 << 20, generator=generator)
    square = torch.randn(257, 511, generator=generator)
    return [
        torch.randn((), generator=generator),
        torch.randn(1000, generator=generator),
        big,
        square,
        square.t(),
        square[::3, 5::2],
        torch.randn(4, 1, 6, generator=generator).expand(4, 5, 6),
        torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last),
        square.to(torch.bfloat16),
        torch.randint(-9, 9, (333,), generator=generator),
        torch.randn(99, generator=generator) > 0,
        torch.empty(0, 7),
    ]


def _like(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """The same values with the same strides on `place`, in memory of its own."""
    if 0 in tensor.stride() or not tensor.numel():
        return tensor.contiguous().to(place, copy=True)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    base = torch.empty(1 + reach, dtype=tensor.dtype, device=place)
    return base.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
