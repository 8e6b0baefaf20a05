"""A heap that processes share: no two tensors overlap, dropped memory is used again, messages carry tensors."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from rlplace.graphs.optimizers import OPTIMIZERS, UpdateState
from rlplace.measure.execute import shared_heap
from rlplace.measure.execute.shared_heap import Layout, SharedHeap

BEGIN = 1 << 20


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("rlplace tests")
    yield made
    os.close(made)


@pytest.fixture
def heap(file: int) -> SharedHeap:
    return SharedHeap(file, BEGIN)


@pytest.fixture
def other(file: int) -> SharedHeap:
    """The same heap, as another process has it: at another address."""
    return SharedHeap(file, BEGIN)


def row(heap: SharedHeap, count: int, value: float = 0.0) -> Tensor:
    """So many numbers."""
    return heap.empty(Layout(torch.float32, (count,), (1,))).fill_(value)


def address(heap: SharedHeap, tensor: Tensor) -> int:
    place = heap.place(tensor)
    return place.at


TENSORS = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).T,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.float64),
    "half": lambda: torch.randn(5).half(),
    "whole numbers": lambda: torch.arange(7),
    "truth": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_another_process_has_the_same_tensor(name: str, heap: SharedHeap, other: SharedHeap) -> None:
    torch.manual_seed(0)
    original = TENSORS[name]()
    ours = heap.home(original)
    theirs = other.unpacked(heap.packed(ours))
    assert theirs.data_ptr() != ours.data_ptr()
    assert (theirs.dtype, theirs.shape, theirs.stride()) == (original.dtype, original.shape, original.stride())
    assert torch.equal(theirs, original)
    theirs.zero_()
    assert not ours.any(), "what one process writes, the other reads"
    assert original.any(), "the user's own tensor is not touched"


def test_a_copy_is_laid_out_as_pytorch_lays_out_copies(heap: SharedHeap) -> None:
    """An expanded tensor has a copy without overlaps; a slice one without gaps."""
    for tensor in (torch.randn(3, 1).expand(3, 4), torch.randn(4, 6)[:, ::2]):
        home = heap.home(tensor)
        assert torch.equal(home, tensor)
        assert home.stride() == tensor.clone().stride()


def test_what_is_here_stays_where_it_is(heap: SharedHeap) -> None:
    ours = heap.home(torch.randn(4, 6))
    assert heap.home(ours) is ours
    column = ours[1:, 2]
    assert heap.home(column) is column
    assert heap.place(torch.randn(3)) is None
    assert heap.place(torch.empty(3, device="meta")) is None


def test_a_view_has_its_own_place(heap: SharedHeap, other: SharedHeap) -> None:
    ours = heap.home(torch.arange(24.0).reshape(4, 6))
    theirs = other.unpacked(heap.packed(ours[1:, 2]))
    assert theirs.tolist() == [8.0, 14.0, 20.0]
    theirs.fill_(-1)
    assert ours[:, 2].tolist() == [2.0, -1.0, -1.0, -1.0]


def test_tensors_without_elements_are_everywhere(heap: SharedHeap, other: SharedHeap) -> None:
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert heap.home(empty) is empty
    theirs = other.unpacked(heap.packed(empty))
    assert (theirs.shape, theirs.dtype, theirs.stride()) == (empty.shape, empty.dtype, empty.stride())
    assert heap.empty(Layout.of(empty)).shape == (0, 3)


def test_memory_that_nobody_shows_is_used_again_the_first_place_first(heap: SharedHeap) -> None:
    rows = [row(heap, 100) for _ in range(4)]
    places = [address(heap, each) for each in rows]
    assert places == sorted(places)
    del rows[2]
    del rows[0]
    gc.collect()
    assert address(heap, first := row(heap, 90)) == places[0], "a tensor of another length, but of the same size class"
    assert address(heap, row(heap, 100)) == places[2]
    assert address(heap, rows[0]) == places[1]
    assert address(heap, row(heap, 1000)) > places[3]
    assert address(heap, first) == places[0]


def test_a_view_keeps_the_memory(heap: SharedHeap) -> None:
    whole = row(heap, 100, 1.0)
    place, part = address(heap, whole), whole[10:20]
    del whole
    gc.collect()
    assert address(heap, another := row(heap, 100, 2.0)) != place
    assert part.tolist() == [1.0] * 10
    del part
    gc.collect()
    assert address(heap, row(heap, 100)) == place
    assert another.tolist() == [2.0] * 100


def test_a_reader_does_not_keep_the_memory(heap: SharedHeap, other: SharedHeap) -> None:
    ours = row(heap, 100, 1.0)
    theirs, place = other.unpacked(heap.packed(ours)), address(heap, ours)
    del ours
    gc.collect()
    assert address(heap, another := row(heap, 100, 2.0)) == place
    assert torch.equal(theirs, another)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_tensors_overlap(seed: int, heap: SharedHeap, other: SharedHeap) -> None:
    """Each has its own number, through any order of making and dropping; the other process reads them all."""
    generator = np.random.default_rng(seed)
    alive: dict[int, Tensor] = {}
    num_bytes = 0
    for number in range(400):
        if alive and generator.random() < 0.45:
            del alive[int(generator.choice(list(alive)))]
        else:
            alive[number] = row(heap, int(generator.integers(1, 5000)), number)
            num_bytes += alive[number].nbytes
        if number % 40 == 0:
            for each, tensor in other.unpacked(heap.packed(alive)).items():
                assert (tensor == each).all()
    assert heap._end < num_bytes / 2, "most of it was used several times"


def test_threads_get_different_memory(heap: SharedHeap) -> None:
    found: list[Tensor] = []
    start = threading.Barrier(4)

    def make() -> None:
        start.wait()
        found.extend([row(heap, 10) for _ in range(200)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({address(heap, each) for each in found}) == 800


def test_tensors_begin_where_kernels_want_them(heap: SharedHeap) -> None:
    rows = [row(heap, count) for count in (1, 3, 17, 100, 1, 65)]
    assert all(each.data_ptr() % 64 == 0 for each in rows)


def test_a_full_heap_says_so_and_goes_on_once_something_is_dropped(
    heap: SharedHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_heap, "HEAP_BYTES", 1 << 16)
    first = row(heap, 1 << 13)
    second = row(heap, 1 << 13, 2.0)
    with pytest.raises(MemoryError, match="32,768 bytes for a tensor: 65,536 of 65,536 bytes"):
        row(heap, 1 << 13)
    del first
    gc.collect()
    assert address(heap, row(heap, 1 << 13, 1.0)) == 0
    assert second.tolist() == [2.0] * (1 << 13)


def test_a_limit_of_address_space_leaves_room_for_others(
    heap: SharedHeap, other: SharedHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has the limit, the other has none."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    ours = row(heap, 10, 3.0)
    with pytest.raises(MemoryError, match="of 262,144 bytes"):
        row(heap, 1 << 16)
    monkeypatch.undo()
    assert other.unpacked(heap.packed(ours)).tolist() == [3.0] * 10


def test_a_process_may_have_hundreds() -> None:
    """Those of earlier runs stay until the collector comes, which may be late."""
    machine_bytes = shared_heap.HEAP_BYTES // 4
    if machine_bytes > 64 << 30:
        pytest.skip("heaps are larger where the machine's memory is")
    files = [os.memfd_create("rlplace tests") for _ in range(300)]
    try:
        rows = [row(SharedHeap(file, BEGIN), 10, float(at)) for at, file in enumerate(files)]
        assert [float(each[0]) for each in rows] == list(range(300))
    finally:
        for file in files:
            os.close(file)


def test_only_what_is_used_takes_memory(file: int, heap: SharedHeap) -> None:
    row(heap, 1 << 20)
    assert os.fstat(file).st_blocks * 512 < 16 << 20
    assert os.fstat(file).st_size >= shared_heap.HEAP_BYTES


def test_messages_carry_anything_with_tensors_in_it(heap: SharedHeap, other: SharedHeap) -> None:
    weight = heap.home(torch.ones(3))
    state = UpdateState(OPTIMIZERS["adam"], weight)
    state.hold([heap.home(each) for each in state.tensors])
    message = (7, "load", {"weight": weight, "state": state}, [weight, None], frozenset({"a"}))
    number, name, held, again, names = other.unpacked(heap.packed(message))
    assert (number, name, again[1], names) == (7, "load", None, {"a"})
    held["weight"].add_(1)
    held["state"].moments[1].add_(2)
    held["state"].step.add_(3)
    assert weight.tolist() == again[0].tolist() == [2.0] * 3
    assert state.moments[1].tolist() == [2.0] * 3
    assert (float(state.step), held["state"].spec) == (3.0, state.spec)


def test_a_tensor_that_others_do_not_see_is_in_no_message(heap: SharedHeap) -> None:
    with pytest.raises(AssertionError, match="other processes do not see"):
        heap.packed({"x": torch.ones(3)})


def test_a_message_is_the_same_while_its_tensors_stay(heap: SharedHeap) -> None:
    weight = heap.home(torch.ones(3))
    before = heap.packed((OPTIMIZERS["adam"], {"weight": weight}))
    weight.mul_(2)
    assert heap.packed((OPTIMIZERS["adam"], {"weight": weight.view(3)})) == before
    assert heap.packed((OPTIMIZERS["adam"], {"weight": weight[:2]})) != before
    assert heap.packed((OPTIMIZERS["adam"], {"weight": heap.home(torch.ones(3))})) != before


def test_tensors_are_ordinary_ones_wherever_they_are_made(heap: SharedHeap, other: SharedHeap) -> None:
    """Autograd holds them and allows changes in place, also if they were made in inference mode."""
    with torch.inference_mode():
        ours = heap.empty(Layout(torch.float32, (3,), (1,)))
        theirs = other.unpacked(heap.packed(ours))
    for tensor in (ours, theirs):
        assert not tensor.is_inference()
        assert not tensor._is_view()
        parameter = torch.nn.Parameter(tensor)
        (parameter * 2).sum().backward()
        with torch.no_grad():
            parameter.fill_(1).add_(parameter.grad)
        assert parameter.tolist() == [3.0] * 3
