"""What a worker died of: the signal, and the op that the stacks show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_hosts import core_host, process_host
from faulty_ops import faulty_graph
from naive_plan import naive_plan

from rlplace.measure.execute import distributed
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.isolate import worker as post_mortem

DUMP = """Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "<placed step, device 0>", line 9 in run

Current thread 0x00007f2 (most recent call first):
  File "/home/me/ops.py", line 12 in misbehave
  File "/venv/torch/_library/custom_ops.py", line 5 in backend_impl
  File "<placed step, device 1>", line {line} in run
  File "/rlplace/measure/execute/device_threads.py", line 70 in _loop

Thread 0x00007f3 (most recent call first):
  File "<placed step, device 0>", line 2 in run
"""


@pytest.mark.parametrize(
    ("code", "words", "is_outside"),
    [(-6, "SIGABRT", False), (-11, "SIGSEGV", False), (-9, "SIGKILL", True), (-15, "SIGTERM", True), (3, "3", False)],
)
def test_how_it_ended(code: int, words: str, is_outside: bool) -> None:
    assert words in post_mortem.ending(code)
    assert (-code in post_mortem.FROM_OUTSIDE) is is_outside


def test_the_thread_at_fault_comes_first() -> None:
    stacks = post_mortem.stacks_of(DUMP.format(line=3))
    assert [stack[0][0] for stack in stacks] == [
        "/home/me/ops.py",
        "/usr/lib/python3.11/threading.py",
        "<placed step, device 0>",
    ]
    assert stacks[0][0] == ("/home/me/ops.py", 12, "misbehave")
    assert post_mortem.stacks_of("") == []


def test_the_line_of_generated_code_names_the_op() -> None:
    graph, host = faulty_graph(("abort",)), core_host(2)
    plan = naive_plan(graph, np.array([0, 1, 0], dtype=np.int32))
    items = StepCode(graph, host, plan).line_items[1]
    dump = DUMP.format(line=items.index(1) + 1)
    (said,) = post_mortem.ops_at_fault([dump], graph, host, plan)
    assert said.startswith("op 'faulty' (")
    assert said.endswith("on cpu:1, /home/me/ops.py:12 in misbehave")
    assert post_mortem.ops_at_fault([DUMP.format(line=10_000)], graph, host, plan) == [""]
    assert post_mortem.ops_at_fault([""], graph, host, plan) == [""]


def test_threads_that_wait_are_not_why_a_step_is_stuck() -> None:
    graph, host = faulty_graph(("hang",)), core_host(2)
    plan = naive_plan(graph, np.array([0, 1, 0], dtype=np.int32))
    waits = 'Thread 0x1 (most recent call first):\n  File "<placed step, device 1>", line 2 in run\n'
    assert post_mortem.ops_at_fault([waits], graph, host, plan, is_stuck=True) == [""]
    host = process_host(2)
    host = replace(host, devices=tuple(replace(device, memory_pool="") for device in host.devices))
    items = StepCode(graph, host, plan, is_wired=True).line_items[1]
    waits = f'Thread 0x1 (most recent call first):\n  File "{distributed.__file__}", line 5 in settle\n'
    waits += f'  File "<placed step, device 1>", line {items.index(1) + 1} in run\n'
    assert post_mortem.ops_at_fault([waits], graph, host, plan, is_stuck=True) == [""]
    (said,) = post_mortem.ops_at_fault([waits], graph, host, plan)
    assert said.startswith("the wait for an input of op 'faulty' (")
    within = "Thread 0x1 (most recent call first):\n"
    within += f'  File "<placed step, device 1>", line {items.index(1) + 1} in run\n'
    within += f'  File "{distributed.__file__}", line 5 in whole\n'  # it runs the program, and is no wait of it
    (said,) = post_mortem.ops_at_fault([within], graph, host, plan)
    assert said.startswith("op 'faulty' (")
    hung = within.replace(":\n", ':\n  File "/home/me/ops.py", line 12 in misbehave\n', 1)
    (said,) = post_mortem.ops_at_fault([hung], graph, host, plan, is_stuck=True)
    assert said.startswith("op 'faulty' (")
