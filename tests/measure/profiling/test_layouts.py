"""How values lie in memory: as they do in a real step."""

from __future__ import annotations

import pytest
import torch
from small_models import CASES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import InvalidValue
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.measure.profiling.profile import LEAST, MOST, Layout, layouts, maker

CPU = torch.device("cpu")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "name", ["lstm_cell", "channels_last", "transposed_gradient", "split", "strided_input", "writes"]
)
def test_layouts_are_those_of_the_graph_and_of_its_sources(name: str) -> None:
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    known = layouts(graph)
    for tensor in range(graph.num_tensors):
        if tensor not in known:
            continue
        assert known[tensor].shape == graph.tensor_shapes[tensor]
        assert str(known[tensor].dtype).removeprefix("torch.") == graph.tensor_dtypes[tensor]
    for op, source in require_program(graph).sources.items():
        assert known[int(graph.output_offsets[op])].strides == source.value.stride()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4),
        torch.ones(6, 9)[1::2, 2:6],
        torch.ones(3, 1).expand(3, 5),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=str,
)
def test_a_made_tensor_lies_like_the_one_that_it_stands_for(value: Tensor) -> None:
    made = Layout(tuple(value.shape), value.stride(), value.dtype).make(CPU, generator())
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    real = torch.view_as_real(made) if made.is_complex() else made
    assert torch.all((real >= LEAST - 1e-3) & (real <= MOST + 1e-3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_zero_a_valid_index_everywhere(dtype: torch.dtype) -> None:
    assert not torch.any(Layout((3,), (1,), dtype).make(CPU, generator()))


def test_models_of_fake_tensors_and_without_a_program() -> None:
    with FakeTensorMode():
        model, inputs = nn.Embedding(5, 4), torch.zeros(3, dtype=torch.int64)
    graph = capture(model, inputs)
    known = layouts(graph)
    assert known[int(graph.output_tensors[0])] == Layout((3, 4), (4, 1), torch.float32)
    from micrographs import op_graph

    with pytest.raises(InvalidValue, match="capture it again"):
        layouts(op_graph([[]]))


def test_one_value_is_made_once_and_without_anyones_generator() -> None:
    from rlplace.graphs.program import Ref

    torch.manual_seed(7)
    before = torch.get_rng_state()
    make = maker({0: Layout((2,), (1,), torch.float32), 1: Layout((2,), (1,), torch.float32)}, CPU)
    assert make(Ref(0)) is make(Ref(0))
    assert make(Ref(0)) is not make(Ref(1))
    assert torch.equal(before, torch.get_rng_state())
