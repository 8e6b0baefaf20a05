"""Placed models that several threads call, that are called within a call, or in a forked process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from loops import HOST, apart, batches, captured, classifier, in_a_fork, module_of, placed, twin
from naive_plan import naive_plan
from torch import Tensor
from torch.nn import functional

from rlplace.errors import RunnerError, UserError
from rlplace.export import PlacedModel
from rlplace.graphs import capture

THREADS = [2, 8]
NUM_INPUTS = 16


def called_by_threads(num_threads: int, num_calls: int, call: Callable[[int], bool]) -> int:
    """How many calls gave something else than expected: `call` is given the number of a batch and tells."""
    together = threading.Barrier(num_threads, timeout=120)

    def run(thread: int) -> int:
        together.wait()
        return sum(not call((thread + number) % NUM_INPUTS) for number in range(num_calls))

    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(run, range(num_threads)))


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", THREADS)
def test_an_inference_gives_every_thread_its_own_output(num_threads: int) -> None:
    model = classifier().eval()
    inputs = [x for x, _ in batches(NUM_INPUTS)]
    graph = capture(model, inputs[0])
    expected = [model(x).detach() for x in inputs]
    with PlacedModel(graph, HOST, apart(graph)) as placed_model:
        assert not called_by_threads(num_threads, 500, lambda k: torch.equal(placed_model(inputs[k]), expected[k]))


@pytest.mark.parametrize("num_threads", THREADS)
def test_gradients_of_several_threads_add_up(num_threads: int) -> None:
    """And evaluations, states and options that other threads ask for meanwhile are those between two steps."""
    model = classifier()
    data, eager, num_calls = batches(NUM_INPUTS), twin(model), NUM_INPUTS * 4
    losses = [functional.cross_entropy(eager(x), labels) for x, labels in data]
    torch.autograd.backward([loss * num_threads * 4 for loss in losses])
    with placed(captured(model, "sgd")) as step:

        def call(k: int) -> bool:
            x, labels = data[k]
            loss = step.backward(x, targets=labels)
            step.lr = 0.1
            is_alike = torch.equal(step.state_dict()["second.weight"], model.second.weight)
            return is_alike and torch.allclose(loss, losses[k].detach(), rtol=1e-12)

        assert not called_by_threads(num_threads, num_calls, call)
        assert step.num_steps == num_threads * num_calls
        found = {name: parameter.grad for name, parameter in step.named_parameters()}
    for name, parameter in eager.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", THREADS)
def test_a_module_has_forwards_and_backwards_of_several_threads(num_threads: int) -> None:
    model = classifier()
    data, expected = batches(NUM_INPUTS), []
    for x, labels in data:
        given = x.clone().requires_grad_()
        expected.append(torch.autograd.grad(functional.cross_entropy(model(given), labels), given)[0])
    module = module_of(model)

    def call(k: int) -> bool:
        x, labels = data[k][0].clone().requires_grad_(), data[k][1]
        functional.cross_entropy(module(x), labels).backward()
        assert x.grad is not None
        return torch.allclose(x.grad, expected[k], rtol=1e-9, atol=1e-12)

    assert not called_by_threads(num_threads, 100, call)
    module.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_forwards_wait_for_their_backwards_in_any_order(order: tuple[int, ...]) -> None:
    model = classifier()
    module, eager = module_of(model), twin(model)
    for each in (module, eager):
        each.requires_grad_()
    found: dict[str, list[Tensor]] = {"placed": [], "eager": []}
    for key, each in (("placed", module), ("eager", eager)):
        losses = [functional.cross_entropy(each(x), labels) for x, labels in batches(3)]
        for k in order:
            found[key] += torch.autograd.grad(losses[k], [each.first.weight, each.second.weight])
    for one, other in zip(found["placed"], found["eager"], strict=True):
        torch.testing.assert_close(one, other)
    module.close()


def test_it_is_closed_between_two_calls() -> None:
    (x, labels), *_ = batches(1)
    step = placed(captured(classifier()))
    has_begun, closed = threading.Event(), []

    def train() -> None:
        while True:
            step.backward(x, targets=labels)
            has_begun.set()

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(train) for _ in range(4)]
        assert has_begun.wait(timeout=120)
        step.close()
        closed = [str(each.exception(timeout=120)) for each in found]
    assert all("close" in error for error in closed)


def test_a_call_within_a_call_is_refused() -> None:
    (x, labels), *_ = batches(1)
    step, seen = placed(captured(classifier())), []

    def hook(parameter: Tensor, call: Callable[[], Any]) -> None:
        seen.append(call())

    weight = dict(step.named_parameters())["second.weight"]
    for call in (lambda: step.backward(x, targets=labels), lambda: step.evaluate(x), lambda: step(x, targets=labels)):
        handle = weight.register_post_accumulate_grad_hook(partial(hook, call=call))
        with pytest.raises(UserError, match="within a call of itself"):
            step.backward(x, targets=labels)
        handle.remove()
    assert not seen
    handle = weight.register_post_accumulate_grad_hook(partial(hook, call=step.state_dict))
    step.backward(x, targets=labels)
    handle.remove()
    assert "second.weight" in seen[0]
    step.backward(x, targets=labels)
    step.close()


@pytest.fixture
def calling() -> Iterator[list[Callable[[], object]]]:
    """What an op of a model calls; the op is registered as long as the test runs."""
    inner: list[Callable[[], object]] = []
    with torch.library._scoped_library("rlplace_test_calling", "DEF") as library:
        library.define("same(Tensor x) -> Tensor")

        def same(x: Tensor) -> Tensor:
            for call in inner:
                call()
            return x.clone()

        library.impl("same", same, "CPU")
        library.impl("same", lambda x: torch.empty_like(x), "Meta")
        yield inner


class Calling(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.rlplace_test_calling.same(x)
        return out


def test_an_op_that_calls_its_model_is_refused_by_the_thread_that_runs_it(
    calling: list[Callable[[], object]],
) -> None:
    x = torch.ones(2)
    graph = capture(Calling(), x)
    with PlacedModel(graph, HOST, naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))) as model:
        for call in (partial(model, x), model.state_dict):
            calling[:] = [call]
            with pytest.raises(RunnerError, match="within a call of itself"):
                model(x)
        calling.clear()
        assert torch.equal(model(x), x)


@pytest.mark.parametrize("kind", ["step", "module"])
def test_a_forked_process_is_told_and_may_read_the_state(kind: str) -> None:
    (x, labels), *_ = batches(1)
    model = classifier()
    shared: Any = placed(captured(model)) if kind == "step" else module_of(model)
    calls = [shared.evaluate, partial(shared.backward, targets=labels)] if kind == "step" else [shared]
    for call in calls:
        call(x)
        error, message = in_a_fork(partial(call, x))
        assert error is UserError
        assert "forked" in message
    assert in_a_fork(lambda: shared.state_dict()["second.weight"]) == model.second.weight.tolist()
    calls[0](x)
    shared.close()
