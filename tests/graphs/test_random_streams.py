"""Draws by their places in streams of random state: as in eager, equal draws are equal, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from placed_steps import alternating
from small_models import Model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rlplace import capture
from rlplace.errors import CaptureError
from rlplace.export import to_module, to_step
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.portable import portable
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import SplitPlan
from rlplace.graphs.random_streams import DrawKey, Streams
from rlplace.measure import Placement
from rlplace.measure.hosts.host import Host

HOST = core_host(2)
Op = Callable[[Tensor], Tensor]


class Product(nn.Module):
    """`f(x @ w)`: for an `f` that is linear but for its draws, the loss `f(x @ w).sum()` is the product of w and its
    gradient, if the backward has the draws of the forward."""

    def __init__(self, f: Op) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x @ self.w)


X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def total(output: Tensor) -> Tensor:
    return output.sum()


def placement_of(graph: OpGraph, host: Host = HOST) -> Placement:
    names = tuple(device.name for device in host.devices)
    return Placement(naive_plan(graph, alternating(graph, 2)), graph.fingerprint, host.fingerprint, names)


def placed_steps(f: Op, count: int = 3, **cut: Any) -> list[tuple[float, float]]:
    """Of each step the loss, and the product of w and its gradient."""
    model = Product(f)
    before = torch.get_rng_state()
    graph = capture(model, X, total, "sgd", **cut)
    assert torch.equal(torch.get_rng_state(), before)
    found = []
    with to_step(model, graph, placement_of(graph), host=HOST) as step:
        w = dict(step.named_parameters())["w"]
        for _ in range(count):
            w.grad = None
            loss = float(step.backward(X))
            assert w.grad is not None
            found.append((loss, float((w.detach() * w.grad).sum())))
    return found


def again(f: Op) -> Op:
    return lambda h: checkpoint(f, h, use_reentrant=False)  # type: ignore[no-any-return]


def seeded(h: Tensor, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(h.shape, dtype=h.dtype)


def around_a_fork(h: Tensor) -> Tensor:
    h = functional.dropout(h)
    return functional.dropout(h * seeded(h, 3))


class FromState(torch.autograd.Function):
    """Keeps the random state in place of the mask; its backward draws from a copy of the state."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(torch.get_rng_state())
        return h * (torch.rand_like(h) < 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.saved_tensors[0].clone())
            return gradient * (torch.rand_like(gradient) < 0.5)


def twin_generator(h: Tensor) -> Tensor:
    """A generator that begins where PyTorch's own one is."""
    twin = torch.Generator()
    twin.set_state(torch.get_rng_state())
    first, second = torch.rand(h.shape, generator=twin), torch.rand(h.shape)
    return h * (first + (first - second) * 1e6)


def gumbel(h: Tensor) -> Tensor:
    return h * functional.gumbel_softmax(torch.zeros_like(h), hard=True)


def permuted(h: Tensor) -> Tensor:
    return h[:, torch.randperm(5)] * torch.arange(5)


def chosen(h: Tensor) -> Tensor:
    return h * torch.multinomial(torch.ones(5), 5).to(h.dtype)


RECOMPUTED: dict[str, Op] = {
    "nested": again(lambda h: again(functional.dropout)(functional.dropout(h, 0.3)) * 1.0),
    "sequential": lambda h: checkpoint_sequential(
        [nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.2)], 2, h, use_reentrant=False
    ),
    "around a fork": again(around_a_fork),
    "alpha": again(lambda h: functional.dropout1d(functional.dropout(h, 0.3), 0.4) * 1.0),
    "gumbel": again(gumbel),
    "bernoulli": again(lambda h: h * torch.bernoulli(torch.full_like(h, 0.5))),
    "permuted": again(permuted),
    "chosen": again(chosen),
    "function": FromState.apply,
    "twin": again(twin_generator),
}


@pytest.mark.parametrize(("name", "micro_batches"), [(n, k) for n in RECOMPUTED for k in (1, 2)])
def test_a_recomputed_draw_is_the_same_draw(name: str, micro_batches: int) -> None:
    cut = {"micro_batches": 2, "loss": "accumulated"} if micro_batches > 1 else {}
    steps = placed_steps(RECOMPUTED[name], **cut)
    for loss, product in steps:
        assert product == pytest.approx(loss, rel=1e-9)
    assert len({loss for loss, _ in steps}) == 3  # each step draws anew


def test_seeds_within_a_step_give_the_numbers_of_eager_in_every_step() -> None:
    def f(h: Tensor) -> Tensor:
        for index in (4, 5, 4):
            h = h * seeded(h, index) + torch.randn(5, dtype=h.dtype, generator=torch.Generator().manual_seed(index))
        return h

    expected = float(Product(f)(X).detach().sum())
    losses = [loss for loss, _ in placed_steps(f)]
    assert losses == pytest.approx([expected] * 3, rel=1e-12)


def test_restored_states_give_equal_draws() -> None:
    def f(h: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = torch.randn_like(h)
        torch.set_rng_state(state)
        return h * (first - torch.randn_like(h)) + h * torch.rand_like(h).sign()

    model = Product(f)
    assert placed_steps(f, 2) == [pytest.approx((float((X @ model.w.detach()).sum()),) * 2)] * 2


def test_keys_are_places_in_streams() -> None:
    found: list[DrawKey] = []

    def noted(key: DrawKey, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(key)
        return func(*args, **kwargs)

    own, before = torch.Generator().manual_seed(3), torch.get_rng_state()
    with Streams(noted).step():
        torch.rand(3)
        state = torch.get_rng_state()
        torch.randn(2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            torch.rand(3)
            torch.rand(3)
        torch.set_rng_state(state)
        functional.dropout(torch.ones(4))
        torch.rand(3, generator=torch.Generator().manual_seed(7))
        torch.rand(3, generator=own)
    assert found == [*(DrawKey(0), DrawKey(1), DrawKey(0, 7), DrawKey(1, 7), DrawKey(1), DrawKey(0, 7)), DrawKey(0, 3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_eager_draws_as_placed_steps_and_modules_do() -> None:
    model = Product(RECOMPUTED["nested"])
    graph = capture(model, X, total, "sgd")
    placement = placement_of(graph)
    for number in range(2):
        streams = Streams()
        with portable(model), streams.step(number):
            expected = float(model(X).detach().sum())
        with to_step(model, graph, placement, host=HOST) as step:
            assert [float(step.backward(X)) for _ in range(number + 1)][-1] == pytest.approx(expected, rel=1e-12)
        with closing(to_module(model, graph, placement, host=HOST)) as placed:
            assert [float(placed(X).detach().sum()) for _ in range(number + 1)][-1] == pytest.approx(
                expected, rel=1e-12
            )
    with to_step(model, graph, placement, host=HOST) as step, Streams().step():
        own = float(model(X).detach().sum())
    with to_step(model, graph, placement, host=HOST) as step:
        assert float(step(X)) == pytest.approx(own, rel=1e-12)


def test_forwards_that_wait_keep_their_draws() -> None:
    model = Product(RECOMPUTED["nested"])
    graph = capture(model, X, total, "sgd")
    with closing(to_module(model, graph, placement_of(graph), host=HOST)) as placed:
        first, second = placed(X).sum(), placed(X).sum()
        assert not torch.equal(first, second)
        (first + 2.0 * second).backward()
        w: Any = placed.w
        assert float((w.detach() * w.grad).sum()) == pytest.approx(float((first + 2.0 * second).detach()), rel=1e-9)


def test_ranks_draw_alike() -> None:
    model, processes = Product(RECOMPUTED["sequential"]), core_host(2).as_processes("cores")
    graph = capture(model, X, total, "sgd")
    losses = []
    for host in (HOST, processes):
        with to_step(model, graph, placement_of(graph, host), host=host) as step:
            losses.append([float(step.backward(X)) for _ in range(2)])
    assert losses[0] == losses[1]


def test_micro_batches_share_draws_without_a_part_for_each_sample() -> None:
    """The whole batch has one such draw; and each sample has its own of the others."""

    def f(h: Tensor) -> Tensor:
        return h * torch.rand(5, dtype=h.dtype) + h * torch.rand_like(h)

    draws = require_program(capture(Product(f), X, total, "sgd", micro_batches=2)).draws
    assert {key: len(ops) for key, ops in draws.items()} == {
        DrawKey(0): 2, DrawKey(1, micro_batch=0): 1, DrawKey(1, micro_batch=1): 1
    }  # fmt: skip
    shared = [loss for loss, _ in placed_steps(lambda h: h * torch.rand(5, dtype=h.dtype), 2, micro_batches=2)]
    for number, loss in enumerate(shared):
        with Streams().step(number):
            assert loss == pytest.approx(float((X @ Product(total).w.detach() * torch.rand(5, dtype=X.dtype)).sum()))


def test_accumulated_micro_batches_share_what_each_of_them_seeds() -> None:
    model = Product(lambda h: functional.dropout(h) * seeded(h, 7))
    program = require_program(capture(model, X, total, "sgd", micro_batches=2, loss="accumulated"))
    assert set(program.draws) == {DrawKey(0, micro_batch=0), DrawKey(0, micro_batch=1), DrawKey(0, 7)}


def test_shards_draw_apart_and_draws_that_are_made_again_are_whole() -> None:
    def draws_of(f: Op) -> set[DrawKey]:
        model = nn.Sequential(nn.Linear(6, 8), Model(lambda _, x: f(x)), nn.Linear(8, 3))
        graph = capture(model, X.float(), total, "sgd", split=SplitPlan(("mlp",)))
        return set(require_program(graph).draws)

    assert draws_of(functional.dropout) == {DrawKey(0, shard=0), DrawKey(0, shard=1)}
    assert draws_of(lambda h: h * seeded(h, 7)) == {DrawKey(0, 7)}
    assert draws_of(again(functional.dropout)) == {DrawKey(0)}


OWN = torch.Generator().manual_seed(5)


def seeded_later(h: Tensor) -> Tensor:
    h = functional.dropout(h)
    torch.manual_seed(7)
    return h * torch.rand_like(h)


def seeded_anew(h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        return h * torch.rand_like(h)


def seeded_by_its_seed(h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() % 1000 + 1)
        return h * torch.rand_like(h)


@pytest.mark.parametrize(
    "f", [lambda h: h * torch.rand(h.shape, generator=OWN), seeded_later, seeded_anew, seeded_by_its_seed]
)
def test_states_that_go_on_from_step_to_step_are_refused(f: Op) -> None:
    before, own = torch.get_rng_state(), OWN.get_state()
    with pytest.raises(CaptureError, match=r"op aten\.(rand|bernoulli).*Leave `generator=` out"):
        capture(Product(f), X, total, "sgd")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(OWN.get_state(), own)
