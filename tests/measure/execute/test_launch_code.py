"""Generated code of one small step, line by line.

Calls and views as Python source, and which constants get a name.

Signals between a gang and its members, on a chain of ops by hand.

Updates that follow each other are one call, which computes the same and is timed in shares.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from small_models import CASES, mean_square, step_graph
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Call, Program, Ref, Update
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.launch_code import Constants, Expressions, StepCode
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_programs import GangSignals, gang_signals, update_runs
from rlplace.measure.execute.residents import Residents
from rlplace.measure.problem import Plan

# 0 weight, 1 bias, 2 input, 3 addmm, 4 relu, 5 sum, 6 ones_like, 7 threshold_backward, 8 mm, 9 sum, 10 and 11 updates
SPLIT = [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]


def linear_step() -> OpGraph:
    return capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(5, 2), torch.sum, "adam")


def code_of(devices: list[int], *, has_gang: bool = False, is_traced: bool = False) -> StepCode:
    graph = linear_step()
    host = core_host(2, has_gang=has_gang)
    return StepCode(graph, host, naive_plan(graph, np.array(devices, dtype=np.int32)), is_traced=is_traced)


def lines_of(code: StepCode, device: int) -> list[str]:
    return [line.strip() for line in code.sources[device].strip().splitlines()]


def test_everything_on_one_device_needs_no_channel() -> None:
    code = code_of([0] * 12)
    assert lines_of(code, 0) == [
        "def run(step):",
        "O[0] = None",
        "v0 = g0(t0)",
        "t3 = f3(t1, t2, v0)",
        "t4 = f4(t3)",
        "del t3",
        "t5 = f5(t4)",
        "t6 = f6(t5, pin_memory=False, memory_format=c0)",
        "v2 = g2(t6, [5, 3])",
        "v1 = g1(t4)",
        "v3 = g3(v1)",
        "t7 = f7(v2, v3, 0)",
        "del v1, v3, t4",
        "del v2, t6",
        "v4 = g4(t7)",
        "t8 = f8(v4, t2)",
        "t9 = f9(t7, [0], True)",
        "del v4, t7",
        "v5 = g5(t8)",
        "v7 = g7(v5)",
        "v6 = g6(t9, [3])",
        "u11(v7, v6)",
        "del v5, v7, t8",
        "del v6, t9",
        "v8 = g8(t5)",
        "O[0] = v8",
        "return None",
    ]
    assert code.sources[1] == "def run(step):\n    return None\n"
    assert code.constants.values == {"c0": torch.preserve_format}
    assert code.items == [[*range(12)], []]
    assert not code.acknowledged
    assert code.signals.count == 0


def test_a_step_over_two_devices() -> None:
    """Transfers in order of (tensor, device): weight, bias, input, addmm, relu, ones_like."""
    code = code_of(SPLIT)
    assert lines_of(code, 1) == [
        "def run(step):",
        "O[0] = None",
        "k2_send(t2)",
        "k0_wait()",
        "t0 = k0_take()",
        "k0_done()",
        "k1_wait()",
        "t1 = k1_take()",
        "k1_done()",
        "v0 = g0(t0)",
        "t3 = f3(t1, t2, v0)",
        "del v0, t0",
        "del t1",
        "k3_send(t3)",
        "del t3",
        "k4_wait()",
        "t4 = k4_take()",
        "t5 = f5(t4)",
        "del t4",
        "t6 = f6(t5, pin_memory=False, memory_format=c0)",
        "k5_send(t6)",
        "del t6",
        "v8 = g8(t5)",
        "O[0] = v8",
        "return None",
    ]
    assert lines_of(code, 0)[1:3] == ["k0_send(t0)", "k1_send(t1)"]
    assert code.acknowledged == {0, 1}
    assert code.is_handover == (False,) * 6
    assert code.items[1] == [12, 13, 2, 3, 16, 5, 6]


def test_an_update_waits_until_its_parameter_has_been_copied() -> None:
    lines = lines_of(code_of(SPLIT), 0)
    assert lines.index("k0_copied()") < lines.index("k1_copied()") < lines.index("u11(v7, v6)")
    assert not {"k2_copied()", "k3_copied()"} & set(lines)


def test_memory_begins_with_a_tensor_and_ends_with_its_last_use() -> None:
    code = code_of(SPLIT)
    assert code.ranks.allocations(1) == [(12, 0), (13, 1), (3, 3), (16, 4), (5, 5), (6, 6)]
    assert code.ranks.releases(1) == [(3, 0), (3, 1), (3, 3), (5, 4), (6, 6)]  # the loss, tensor 5, stays


def test_traced_code_marks_every_item_and_nothing_else() -> None:
    code = code_of(SPLIT, is_traced=True)
    for device in range(2):
        lines = lines_of(code, device)
        plain = [line for line in lines if not line.startswith(("B[", "E["))]
        assert plain == lines_of(code_of(SPLIT), device)
        begun, ended = (
            [int(re.split(r"[][]", line)[1]) for line in lines if line[:2] == mark] for mark in ("B[", "E[")
        )
        runs = code.update_runs[device]
        assert begun == [item for item in code.items[device] if item > 2 and all(item not in run[1:] for run in runs)]
        assert ended == [item for item in code.items[device] if item > 2 and all(item not in run[:-1] for run in runs)]
        for first, last in zip(begun, ended, strict=True):
            assert first == last or (first, last) in [(run[0], run[-1]) for run in runs]
            begin, end = lines.index(f"B[{first}] = clock()"), lines.index(f"E[{last}] = clock()")
            between = lines[begin + 1 : end]
            assert between
            assert not any("_wait" in line or "_copied" in line or "_send" in line for line in between)


def test_gpus_are_held_back_at_the_start_and_every_few_ops_and_cores_never() -> None:
    graph, gpus = linear_step(), plain_gpus.gpu_host(2, 1 << 30)
    plan = naive_plan(graph, np.array(SPLIT, dtype=np.int32))
    plain = StepCode(graph, gpus, plan, is_traced=True)
    held = StepCode(graph, gpus, plan, is_traced=True, hold_every=2)
    for device in range(2):
        runs = [item for kind, item, _ in held.ranks.programs[device] if kind in ("op", "updates", "receive")]
        places = [k for k, line in enumerate(lines_of(held, device)) if line == "hold()"]
        before = [held.line_items[device][k + 1] for k in places]  # a line more: the function's first
        assert before == runs[::2]
        assert [line for line in lines_of(held, device) if line != "hold()"] == lines_of(plain, device)
    cores = StepCode(graph, core_host(2), plan, is_traced=True, hold_every=2)
    assert "hold()" not in "".join(cores.sources)


def test_a_hand_over_is_acknowledged_after_its_last_reader() -> None:
    gang = [2 if device == 1 else 0 for device in SPLIT]
    code = code_of(gang, has_gang=True)
    lines = lines_of(code, 2)
    assert lines.index("t3 = f3(t1, t2, v0)") < lines.index("k0_done()") < lines.index("del v0, t0")
    assert all(code.is_handover)
    assert [tensor for _, tensor in code.ranks.allocations(2)] == [3, 5, 6]
    assert [tensor for _, tensor in code.ranks.releases(2)] == [3, 6]


def test_a_gang_and_its_members_take_turns() -> None:
    """addmm on the gang, relu on core 0, sum on the gang, ones_like on core 1, the rest on core 0."""
    code = code_of([0, 0, 2, 2, 0, 2, 1, 0, 0, 0, 0, 0], has_gang=True)
    assert code.signals.count == 4
    first, second, gang = (lines_of(code, device) for device in range(3))
    assert gang.index("t3 = f3(t1, t2, v0)") + 1 == gang.index("s0_set()")
    assert first.index("s0_wait()") + 1 == first.index("t4 = f4(t3)")
    assert gang.index("s1_wait()") + 1 == gang.index("t5 = f5(t4)")
    assert gang[gang.index("t5 = f5(t4)") + 1 :][:2] == ["s2_set()", "s3_set()"]
    assert second.index("s2_wait()") < second.index("t6 = f6(t5, pin_memory=False, memory_format=c0)")
    assert first.index("s3_wait()") < first.index("t7 = f7(v2, v3, 0)")


@pytest.mark.parametrize("seed", range(3))
def test_every_signal_is_used_once_on_each_side(seed: int) -> None:
    graph, host = linear_step(), core_host(3, has_gang=True)
    generator = np.random.default_rng(seed)
    plan = naive_plan(graph, random_devices(graph, 4, generator), generator)
    code = StepCode(graph, host, plan)
    words = Counter(line for device in range(4) for line in lines_of(code, device))
    for signal in range(code.signals.count):
        assert words[f"s{signal}_set()"] == words[f"s{signal}_wait()"] == 1
    for transfer in range(plan.num_transfers):
        tensor = plan.transfer_tensor[transfer]
        assert words[f"k{transfer}_send(t{tensor})"] == words[f"t{tensor} = k{transfer}_take()"] == 1
        is_acknowledged = transfer in code.acknowledged
        assert words[f"k{transfer}_done()"] == words[f"k{transfer}_copied()"] == int(is_acknowledged)


def test_every_line_knows_its_item() -> None:
    code = code_of(SPLIT)
    for device in range(2):
        lines = code.sources[device].splitlines()
        assert len(lines) == len(code.line_items[device])
        for line, item in zip(lines, code.line_items[device], strict=True):
            if f" = f{item}(" in line or line.strip().startswith(f"u{item}("):
                assert item >= 3
            if " = f" in line:
                assert f" = f{item}(" in line


def test_random_ops_get_the_step_and_factories_their_device() -> None:
    class Draws(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(y, 0.5) + torch.arange(3, device=y.device)

    graph = capture(Draws(), torch.ones(3))
    devices = np.ones(graph.num_ops, dtype=np.int32)
    source = StepCode(graph, core_host(), naive_plan(graph, devices)).sources[1]
    assert "(step, " in source
    assert "device=D1" in source


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_code_of_every_model_drops_what_it_made(name: str) -> None:
    """Whatever is allocated on a device is freed there, but for results."""
    graph = step_graph(name, "sgd")
    generator = np.random.default_rng(0)
    code = StepCode(graph, core_host(), naive_plan(graph, random_devices(graph, 2, generator), generator))
    kept = set(graph.output_tensors.tolist())
    for device in range(2):
        made = Counter(tensor for _, tensor in code.ranks.allocations(device))
        freed = Counter(tensor for _, tensor in code.ranks.releases(device))
        assert set(made.values()) <= {1}
        assert not freed - made
        assert set(made - freed) <= kept


def test_a_graph_without_a_program_has_no_code() -> None:
    graph = dataclasses.replace(linear_step(), program=None)
    with pytest.raises(InvalidValue, match="capture it again"):
        StepCode(graph, core_host(), naive_plan(graph, np.zeros(12, dtype=np.int32)))


@pytest.fixture
def program() -> Program:
    """View 0 is the weight, transposed; view 3 is a view of view 1, both of the relu's output, tensor 4."""
    graph = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(5, 2), torch.sum, "adam")
    return require_program(graph)


def call(*args: object, outputs: tuple[int, ...] = (7,), returns_tuple: bool = False, **kwargs: object) -> Call:
    return Call(torch.ops.aten.relu.default, args, kwargs, outputs, returns_tuple)


def test_what_python_has_a_literal_for_is_written_out(program: Program) -> None:
    constants = Constants()
    words = Expressions(program, 0, constants)
    lines = words.call(9, call(1, 0.5, True, None, "sum", [2, (Ref(4),)], ()))
    assert lines == ["t7 = f9(1, 0.5, True, None, 'sum', [2, (t4, )], ())"]
    assert not constants.values


def test_other_values_get_one_name_each_over_all_devices(program: Program) -> None:
    constants = Constants()
    first, second = (Expressions(program, device, constants) for device in range(2))
    assert first.call(8, call(math.inf, dtype=torch.float16)) == ["t7 = f8(c0, dtype=c1)"]
    assert second.call(9, call(torch.float16, math.inf)) == ["t7 = f9(c1, c0)"]
    assert constants.values == {"c0": math.inf, "c1": torch.float16}


def test_outputs_are_unpacked_as_the_op_returns_them(program: Program) -> None:
    words = Expressions(program, 0, Constants())
    assert words.call(9, call(outputs=(7, -1), returns_tuple=True)) == ["t7, _ = f9()"]
    assert words.call(9, call(outputs=(7,), returns_tuple=True)) == ["t7, = f9()"]
    assert words.call(9, call(outputs=(-1,))) == ["f9()"]


def test_a_view_is_defined_once_after_the_views_that_it_is_of_until_its_tensor_is_dropped(program: Program) -> None:
    words = Expressions(program, 0, Constants())
    view = Ref(program.num_tensors + 3)
    made = ["v1 = g1(t4)", "v3 = g3(v1)"]
    assert words.views([view]) == made
    assert words.name(view) == "v3"
    assert words.views([view]) == []
    assert words.forget(4) == ["v1", "v3"]
    assert words.forget(4) == []
    assert words.views([view]) == made
    words.forget_all()
    assert words.views([view]) == made


GANG = 2
NONE = GangSignals({}, {}, 0)


def chain() -> OpGraph:
    """Op 0 is the input; 1 to 4 follow each other."""
    return capture(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ReLU()), torch.ones(3))


def signals_of(devices: list[int], *, is_handover: bool = True, second: tuple[int, ...] = ()) -> GangSignals:
    graph, host = chain(), core_host(2, has_gang=True)
    plan = naive_plan(graph, np.array(devices, dtype=np.int32))
    return gang_signals(graph, host, plan, [is_handover] * plan.num_transfers, second)


def test_members_alone_wait_for_nobody() -> None:
    assert signals_of([0, 0, 1, 0, 1]) == NONE
    assert signals_of([GANG] * 5) == NONE


def test_a_gang_waits_for_each_member_that_was_busy_and_they_for_it() -> None:
    signals = signals_of([0, 0, 1, GANG, 0])
    assert signals.waits == {3: [0, 1], 4: [2]}
    assert signals.sets == {1: [0], 2: [1], 3: [2]}
    assert signals.count == 3


def test_sources_and_hand_overs_keep_nobody_busy_and_copies_do() -> None:
    assert signals_of([GANG, 0, 0, 0, 0]) == NONE
    handed, copied = (signals_of([0, 0, GANG, GANG, 1], is_handover=is_handover) for is_handover in (True, False))
    assert (handed.sets, handed.waits) == ({1: [0], 3: [1]}, {2: [0], 4: [1]})
    assert (copied.sets, copied.waits) == ({1: [0], 3: [1]}, {5: [0], 6: [1]})  # items 5 and 6 are the copies


def test_the_second_part_begins_when_all_are_done() -> None:
    signals = signals_of([0, 0, 1, GANG, 0], second=(3, 4))
    assert signals == GangSignals({3: [0]}, {4: [0]}, 1)


def mlp(dtype: torch.dtype = torch.float32) -> OpGraph:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2).to(dtype), nn.Linear(2, 2).to(dtype))

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[3](self.layers[2](self.layers[1](self.layers[0](x)).to(dtype)))

    return capture(Casting(), torch.ones(5, 4), mean_square, "adam")


def updates_of(graph: OpGraph) -> list[int]:
    return [op for op, call in sorted(graph.program.calls.items()) if isinstance(call, Update)]


def test_a_run_ends_where_something_else_stands_or_a_gang_takes_over() -> None:
    graph = mlp()
    a, b, c, d, *_ = (op for op in updates_of(graph) if not graph.workspace_bytes[op])
    plain = next(op for op, call in graph.program.calls.items() if not isinstance(call, Update))
    transfer = graph.num_ops

    def runs(*items: int, waits: tuple[int, ...] = (), sets: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
        assert graph.program is not None
        return update_runs(graph, items, waits, sets)

    source = next(iter(graph.program.sources))
    assert runs(a, b, c) == ((a, b, c),)
    assert runs(a, source, b) == ((a, b),), "a source is no code"
    assert runs(a, plain, b, c, transfer, d) == ((a,), (b, c), (d,))
    assert runs(a, b, c, waits=(b,)) == ((a,), (b, c))
    assert runs(a, b, c, sets=(b,)) == ((a, b), (c,))
    assert runs() == ()


def test_parameters_of_another_dtype_are_a_run_of_their_own() -> None:
    graph = mlp(torch.float64)
    assert graph.program is not None
    runs = update_runs(graph, updates_of(graph), (), ())
    assert sorted(map(len, runs)) == [2, 4]


@pytest.mark.parametrize("is_traced", [False, True])
def test_one_call_a_run_and_every_update_done(is_traced: bool) -> None:
    graph, host = mlp(), core_host(2)
    assert graph.program is not None
    none = np.zeros(0, dtype=np.int32)
    plan = Plan(np.zeros(graph.num_ops, dtype=np.int32), none, none, np.arange(graph.num_ops, dtype=np.int32))
    code = StepCode(graph, host, plan, is_traced=is_traced)
    (run,), _ = code.update_runs
    assert list(run) == updates_of(graph)
    assert code.sources[0].count(f"u{run[-1]}(") == 1
    assert sum(code.sources[0].count(f"u{op}(") for op in run) == 1
    crew, residents = Crew(host.devices), Residents(graph, host)
    try:
        step = PlacedStep(graph, host, plan, residents, crew, is_traced=is_traced)
        parameters = [op for op, source in graph.program.sources.items() if source.kind == "parameter"]
        before = {op: residents.tensor(op, 0).clone() for op in parameters}
        step.run()
        assert all(not torch.equal(residents.tensor(op, 0), value) for op, value in before.items())
        if is_traced:
            timeline = step.timeline()
            starts, ends = timeline.op_start_s[list(run)], timeline.op_end_s[list(run)]
            assert np.allclose(starts[1:], ends[:-1])
            shares = (ends - starts) / (ends[-1] - starts[0])
            assert np.allclose(shares, graph.bytes_moved[list(run)] / graph.bytes_moved[list(run)].sum())
    finally:
        crew.stop()
