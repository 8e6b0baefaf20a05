"""Small random models, each made by a seed, and their placed steps held against plain PyTorch.

A member is a model of random parts (`random_model_parts`) with a loss, an optimizer and batches of several sizes. It is
captured whole and in micro-batches, and three steps of every form of it (a step, its gradients alone, a module) are
compared with plain PyTorch: losses, gradients, which parameters have one, parameters and buffers.

    python tests/random_models.py --seeds 1000:1150             a table: right, refused (why), wrong, crashed
    python tests/random_models.py --seeds 1017 --shrink         the smallest member of that kind that still fails
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import logging
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from random_model_parts import (
    DRAWS,
    DROPOUTS,
    LAYERS,
    LOSSES,
    POSITIONS,
    WRITES,
    Draw,
    Position,
    SeedOfSteps,
    State,
    Wrapper,
    Write,
)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rlplace
from rlplace.errors import UserError
from rlplace.export.formats import SeededDraws
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import torch_optimizer
from rlplace.graphs.program import OptimizerSpec, even_sizes, loss_of
from rlplace.measure import Placement

HOST = core_host(2)
NUM_STEPS = 3
MICRO_BATCHES = (1, 2, 3)
OPTIMIZERS = (
    OptimizerSpec("sgd", 0.1), OptimizerSpec("momentum", 0.05, weight_decay=0.01),
    OptimizerSpec("adam", 0.01, eps=1e-3), OptimizerSpec("adamw", 0.01, eps=1e-3, weight_decay=0.1),
)  # fmt: skip
"""With an `eps` that keeps rounding differences of gradients that are zero what they are."""


@dataclass(frozen=True)
class Part:
    """One part of a model: its kind, its name among those of that kind, its own seed, and the parts that it wraps."""

    kind: str
    name: str
    seed: int
    inner: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.inner))})" if self.inner else self.name


@dataclass(frozen=True)
class Member:
    """All that a random model, its loss and its batches are made of; equal members are equal models.

    Attributes:
        seed: of the values of parameters and batches.
        domain: what a sample is.
        parts: between the stem and the head.
        form: of the output: `tensor`, `tuple`, `dict`, or `penalty` (the loss also takes the gradient of an input).
        loss: a name of `LOSSES`.
        loss_seed: the numbers in it.
        optimizer: an index of `OPTIMIZERS`.
        sizes: of the batch of each step; the first one is captured.
        inputs: how the model takes them: `tensor`, `tuple` or `dict`.
        is_single: float32 instead of float64.
    """

    seed: int
    domain: str
    parts: tuple[Part, ...]
    form: str = "tensor"
    loss: str = "mse"
    loss_seed: int = 0
    optimizer: int = 0
    sizes: tuple[int, ...] = (8, 8, 5)
    inputs: str = "tensor"
    is_single: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_single else torch.float64

    @property
    def is_drawn(self) -> bool:
        """Whether its values depend on the random numbers that are drawn."""

        def has_dropout(parts: Sequence[Part]) -> bool:
            return any(part.kind == "dropout" or has_dropout(part.inner) for part in parts)

        return has_dropout(self.parts)

    def __str__(self) -> str:
        parts = " > ".join(map(str, self.parts))
        return f"{self.domain}: {parts} | {self.form}, {self.loss}, sizes {self.sizes}, {self.inputs}"

    def make(self) -> nn.Module:
        """The model, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return RandomModel(self).to(self.dtype)

    def batch(self, step: int) -> tuple[Any, Tensor]:
        """Inputs and targets of a step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        size = self.sizes[step]

        def values(*shape: int) -> Tensor:
            return torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(self.dtype)

        if self.domain == "sequence":
            x = torch.randint(11, (size, 6), generator=generator)
        else:
            x = values(5) if self.domain == "vector" else values(1, 6, 6)
        inputs: Any = {"tensor": x, "tuple": (x, values(1)), "dict": {"x": x, "scale": values(1)}}[self.inputs]
        return inputs, values(3)

    def loss_fn(self) -> Callable[[Any, Tensor], Tensor]:
        """Of the model's output and the targets."""
        plain, form = LOSSES[self.loss](self.loss_seed), self.form

        def loss(output: Any, t: Tensor) -> Tensor:
            if form == "tensor":
                return plain(output, t)
            if form == "dict":
                return plain(output["out"], t) + output["aux"].pow(2).mean() * 0.1
            if form == "tuple":
                return plain(output[0], t) + output[1].pow(2).mean() * 0.1
            (slope,) = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)
            return plain(output[0], t) + (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()

        return loss


class RandomModel(nn.Module):
    """A stem, the parts of a member, and a head."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.domain, self.form = member.domain, member.form
        rng = random.Random(member.seed)
        self.pooled = rng.random() < 0.7
        if self.domain == "vector":
            self.stem: nn.Module = nn.Linear(5, 12)
        else:
            self.stem = nn.Embedding(11, 8) if self.domain == "sequence" else nn.Conv2d(1, 4, 3, padding=1)
        self.parts = nn.ModuleList(built(part, self.domain) for part in member.parts)
        features = {"vector": 12, "sequence": 8 if self.pooled else 48, "image": 4 if self.pooled else 144}[self.domain]
        self.head = nn.Linear(features, 3)
        if rng.random() < 0.2:
            self.stem.requires_grad_(False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        if self.form == "penalty":
            x = x.clone().requires_grad_()
        h = self.stem(x)
        if scale is not None:
            h = h * (1 + 0.1 * scale.view(-1, *[1] * (h.dim() - 1)))
        for part in self.parts:
            h = part(h)
        inner = h
        if self.domain != "vector" and self.pooled:
            h = h.mean(1) if self.domain == "sequence" else h.mean((2, 3))
        out = self.head(h.flatten(1))
        if self.form == "penalty":
            return out, x
        return {"tensor": out, "tuple": (out, inner), "dict": {"out": out, "aux": inner, "n": 3}}[self.form]


def built(part: Part, domain: str) -> nn.Module:
    """The module of a part."""
    rng = random.Random(part.seed)
    k = rng.randrange(60)
    if part.kind == "layer":
        return LAYERS[domain][part.name](rng, domain)
    if part.kind == "dropout":
        return DROPOUTS[part.name](rng, domain)
    if part.kind == "wrapper":
        return Wrapper(part.name, nn.Sequential(*(built(each, domain) for each in part.inner)), k)
    if part.kind == "state":
        return State(part.name, domain)
    if part.name.startswith("seed_of_steps"):
        return SeedOfSteps(part.name.endswith("fixed"), k)
    return {"write": Write, "position": Position, "draw": Draw}[part.kind](part.name, k)


# --- members from seeds


def member_of(seed: int) -> Member:
    """The member of a seed: the first one of a series that plain PyTorch can train."""
    for attempt in itertools.count():
        member = _drawn(random.Random(f"{seed}/{attempt}"), seed)
        if _is_valid(member):
            return member
    raise AssertionError


def _drawn(rng: random.Random, seed: int) -> Member:
    domain = rng.choice(["vector", "vector", "sequence", "image"])
    parts = tuple(_part(rng, domain, depth=0) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
    if not any(_has_parameters(part) for part in parts):
        parts = (*parts, Part("layer", "linear", rng.randrange(1 << 20)))
    form = rng.choices(["tensor", "tuple", "dict", "penalty"], [6, 2, 2, 1 if domain != "sequence" else 0])[0]
    plain = ["mse", "sum", "huber", "classes", "logits", "divergence", "masked"]
    is_single = rng.random() < 0.15
    first = rng.choice([8, 9, 12])
    return Member(
        seed,
        domain,
        parts,
        form=form,
        loss=rng.choice(plain if rng.random() < 0.5 else list(LOSSES)),
        loss_seed=rng.randrange(60),
        optimizer=rng.randrange(2 if is_single else 4),
        sizes=(first, first, rng.choice([5, 6, 7, 10])),
        inputs=rng.choice(["tensor", "tensor", "tuple", "dict"]),
        is_single=is_single,
    )


def _part(rng: random.Random, domain: str, depth: int) -> Part:
    weights = {"layer": 5, "write": 5, "wrapper": 6 if depth < 2 else 0, "draw": 2, "state": 1.2}
    weights |= {"position": 0.8, "dropout": 0.5} if depth == 0 else {"dropout": 0.3}
    kind = rng.choices(list(weights), list(weights.values()))[0]
    names = {
        "layer": list(LAYERS[domain]), "write": list(WRITES), "wrapper": list(Wrapper.KINDS),
        "draw": [*DRAWS, "seed_of_steps_fixed", "seed_of_steps"], "state": list(State.KINDS),
        "position": list(POSITIONS), "dropout": list(DROPOUTS),
    }  # fmt: skip
    name, seed = rng.choice(names[kind]), rng.randrange(1 << 20)
    if kind != "wrapper":
        return Part(kind, name, seed)
    inner = [Part("layer", rng.choice(list(LAYERS[domain])), rng.randrange(1 << 20))]
    if rng.random() < 0.5:
        inner.insert(rng.randrange(2), _part(rng, domain, depth + 1))
    return Part(kind, name, seed, tuple(inner))


def _has_parameters(part: Part) -> bool:
    return part.kind in ("layer", "wrapper")


def _is_valid(member: Member) -> bool:
    """Whether plain PyTorch trains it, with values that are finite and depend on no draw but those of a dropout."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        eager = Eager(member)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses = [eager.step(step) for step in range(NUM_STEPS)]
        except Exception:  # whatever a random model raises
            return False
        runs.append({"loss": torch.stack(losses)} | eager.state())
    values = [value for run in runs for value in run.values() if value.is_floating_point()]
    if any(not bool(value.isfinite().all()) or float(value.abs().max()) > 1e4 for value in values if value.numel()):
        return False
    return member.is_drawn or not differences(runs[0], runs[1], tolerance(member))


# --- plain PyTorch


"""Of the number of a step: while active, plain PyTorch draws the random numbers of that placed step."""


class Eager:
    """Plain PyTorch: the model of a member, trained."""

    def __init__(self, member: Member) -> None:
        self.member, self.model, self.loss_fn = member, member.make(), member.loss_fn()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch_optimizer(OPTIMIZERS[member.optimizer], self.parameters)

    def step(self, number: int, graph: OpGraph | None = None, draws: SeededDraws | None = None) -> Tensor:
        """The loss of a step, with its gradients and its update; in the micro-batches that `graph` says, if it does not
        make the step of the whole batch."""
        self.optimizer.zero_grad()
        inputs, t = self.member.batch(number)
        begin = int if draws is None else draws.begin
        with nullcontext() if draws is None else draws.of_step(number):
            loss = self._backward(inputs, t, graph, begin)
        self.gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = {name: gradient.clone() for name, gradient in self.gradients.items()}
        self.optimizer.step()
        return loss.detach()

    def _backward(self, inputs: Any, t: Tensor, graph: OpGraph | None, begin: Callable[[int], object]) -> Tensor:
        micro = None if graph is None else require_program(graph).origin.micro
        if micro is None or (micro.equals_whole and not self.member.is_drawn):
            loss = loss_of(self.loss_fn(called(self.model, inputs), t))
            loss.backward()
            return loss
        sizes = even_sizes(len(t), micro.slicing.num_micro_batches)
        cut = [list(each.split(list(sizes))) for each in pytree.tree_leaves((inputs, t))]
        spec = pytree.tree_structure((inputs, t))
        slices = [pytree.tree_unflatten(list(leaves), spec) for leaves in zip(*cut, strict=True)]
        if micro.verdict.kind == "joined":
            outputs = [(begin(index), called(self.model, each))[1] for index, (each, _) in enumerate(slices)]
            begin(-1)
            loss = loss_of(self.loss_fn(joined(outputs), t))
            loss.backward()
            return loss
        total = torch.zeros((), dtype=self.member.dtype)
        for index, ((each, own), size) in enumerate(zip(slices, sizes, strict=True)):
            begin(index)
            weight = size / len(t) if micro.verdict.weights == "mean" else 1.0
            loss = loss_of(self.loss_fn(called(self.model, each), own)) * weight
            loss.backward()
            total = total + loss.detach()
        return total

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def called(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def joined(outputs: Sequence[Any]) -> Any:
    leaves = zip(*map(pytree.tree_leaves, outputs), strict=True)
    whole = [torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in leaves]
    return pytree.tree_unflatten(whole, pytree.tree_structure(outputs[0]))


def tolerance(member: Member) -> float:
    return 2e-4 if member.is_single else 1e-8


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], most: float) -> list[str]:
    """What differs, in words."""
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} is one too many" for name in found.keys() - expected.keys()]
    scale = max((float(each.double().abs().max()) for each in expected.values() if each.numel()), default=0.0)
    for name in sorted(expected.keys() & found.keys()):
        one, other = found[name].detach().double(), expected[name].detach().double()
        if one.shape != other.shape:
            wrong.append(f"{name}: {tuple(one.shape)} for {tuple(other.shape)}")
        elif one.numel() and not float((one - other).abs().max()) <= most * (float(other.abs().max()) + 1e-2 * scale):
            wrong.append(f"{name} is off by {float((one - other).abs().max()):.3g} of {float(other.abs().max()):.3g}")
    return wrong


# --- placed steps


def placed_step(member: Member, num_micro_batches: int) -> tuple[nn.Module, OpGraph, Placement]:
    """The model of a member, its graph, and a random placement."""
    model = member.make()
    inputs, t = member.batch(0)
    graph = rlplace.capture(
        model,
        inputs,
        member.loss_fn(),
        OPTIMIZERS[member.optimizer],
        targets=t,
        micro_batches=num_micro_batches,
    )
    devices = random_devices(graph, 2, np.random.default_rng(member.seed))
    names = tuple(device.name for device in HOST.devices)
    return model, graph, Placement(naive_plan(graph, devices), graph.fingerprint, HOST.fingerprint, names)


def wrong_step(member: Member, num_micro_batches: int, *, has_own_update: bool = True) -> list[str]:
    """What differs in the steps of `to_step`, or in its gradients where another optimizer updates."""
    model, graph, placement = placed_step(member, num_micro_batches)
    eager, wrong = Eager(member), list[str]()
    draws = SeededDraws(graph) if member.is_drawn else None
    with rlplace.export.to_step(model, graph, placement, host=HOST) as step:
        optimizer = torch_optimizer(OPTIMIZERS[member.optimizer], [p for p in step.parameters() if p.requires_grad])
        for number in range(NUM_STEPS):
            args, kwargs, t = _arguments(member, number)
            if has_own_update:
                loss = step(*args, **kwargs, targets=t)
            else:
                optimizer.zero_grad()
                loss = step.backward(*args, **kwargs, targets=t)
            expected = eager.step(number, graph, draws)
            wrong += _with(f"step {number}", differences({"loss": loss}, {"loss": expected}, tolerance(member)))
            if not has_own_update:
                found = {name: p.grad for name, p in step.named_parameters() if p.grad is not None}
                wrong += _with(f"gradients {number}", differences(found, eager.gradients, tolerance(member)))
                optimizer.step()
            wrong += _with(f"state {number}", differences(step.state_dict(), eager.state(), tolerance(member)))
    return wrong


def wrong_gradients(member: Member, num_micro_batches: int) -> list[str]:
    """What differs in the gradients of `step.backward`."""
    return wrong_step(member, num_micro_batches, has_own_update=False)


def wrong_module(member: Member, num_micro_batches: int) -> list[str]:
    """What differs in the steps of `to_module`."""
    model, graph, placement = placed_step(member, num_micro_batches)
    eager, loss_fn, wrong = Eager(member), member.loss_fn(), list[str]()
    module = rlplace.export.to_module(model, graph, placement, host=HOST)
    try:
        optimizer = torch_optimizer(OPTIMIZERS[member.optimizer], [p for p in module.parameters() if p.requires_grad])
        for number in range(NUM_STEPS):
            inputs, t = member.batch(number)
            optimizer.zero_grad()
            loss = loss_of(loss_fn(called(module, inputs), t))
            loss.backward()
            expected = eager.step(number)
            found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            wrong += _with(f"step {number}", differences({"loss": loss}, {"loss": expected}, tolerance(member)))
            wrong += _with(f"gradients {number}", differences(found, eager.gradients, tolerance(member)))
            optimizer.step()
            state = {name: value.detach() for name, value in module.state_dict().items()}
            wrong += _with(f"state {number}", differences(state, eager.state(), tolerance(member)))
    finally:
        module.close()
    return wrong


def _arguments(member: Member, step: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    inputs, t = member.batch(step)
    if isinstance(inputs, dict):
        return (), inputs, t
    return inputs if isinstance(inputs, tuple) else (inputs,), {}, t


def _with(place: str, found: list[str]) -> list[str]:
    return [f"{place}: {each}" for each in found]


Ways = dict[str, tuple[Callable[[Member, int], list[str]], int]]


def ways(member: Member) -> Ways:
    """How a member is tried: what compares it, and in how many micro-batches."""
    found: Ways = {}
    for count in MICRO_BATCHES:
        found[f"step K={count}"] = (wrong_step, count)
        found[f"gradients K={count}"] = (wrong_gradients, count)
    found["module"] = (wrong_module, 1)
    # the draws of a module are not those of a step; and its outputs do not know that one was computed from another
    has_module = not member.is_drawn and member.form != "penalty"
    return {name: way for name, way in found.items() if has_module or name != "module"}


@dataclass(frozen=True)
class Outcome:
    """What became of one way: `right`, `refused`, `WRONG` or `CRASH`, and why."""

    word: str
    why: str = ""


def tried(member: Member, way: str) -> Outcome:
    """The outcome of one way of a member."""
    compare, count = ways(member)[way]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            wrong = compare(member, count)
    except UserError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1][:4]
        at = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
        return Outcome("CRASH", f"{type(error).__name__}: {error} @ {at}")
    return Outcome("WRONG", "; ".join(wrong[:4])) if wrong else Outcome("right")


def outcomes(member: Member) -> dict[str, Outcome]:
    """The outcome of every way of a member."""
    return {way: tried(member, way) for way in ways(member)}


# --- smaller members that fail alike


def shrunk(member: Member, way: str) -> Member:
    """The smallest member that a few removals lead to, with the same word as its outcome."""
    word = tried(member, way).word
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(member):
            if way in ways(candidate) and _is_valid(candidate) and tried(candidate, way).word == word:
                member, smaller = candidate, True
                break
    return member


def _smaller(member: Member) -> Iterator[Member]:
    for parts in _fewer(member.parts):
        yield dataclasses.replace(member, parts=parts)
    plainer = {
        "loss": "mse", "form": "tensor", "inputs": "tensor", "optimizer": 0, "is_single": False,
        "sizes": (member.sizes[0],) * NUM_STEPS,
    }  # fmt: skip
    for name, value in plainer.items():
        if getattr(member, name) != value:
            yield dataclasses.replace(member, **{name: value})


def _fewer(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """One part left out, replaced by what it wraps, or made smaller."""
    for position, part in enumerate(parts):
        before, after = parts[:position], parts[position + 1 :]
        yield (*before, *after)
        if part.inner:
            yield (*before, *part.inner, *after)
        for inner in _fewer(part.inner):
            yield (*before, dataclasses.replace(part, inner=inner), *after)


# --- a table


def _reason(why: str) -> str:
    """The kind of a refusal: its words without names and numbers."""
    short = re.sub(r"'[^']*'|`[^`]*`|\"[^\"]*\"|\([^)]*\)|\d+", "…", why)
    return short[:110]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:50", help="a seed, or first:end")
    parser.add_argument("--ways", default="", help="only those whose name contains this, e.g. K=1")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest member that fails alike")
    parser.add_argument("--refused", action="store_true", help="print refusals in full, too")
    options = parser.parse_args()
    logging.getLogger("rlplace").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    first, _, end = options.seeds.partition(":")
    words: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    members, reasons = collections.Counter[str](), collections.Counter[str]()
    for seed in range(int(first), int(end or int(first) + 1)):
        member, start = member_of(seed), time.process_time()
        found = {way: tried(member, way) for way in ways(member) if options.ways in way}
        by_word = [outcome.word for outcome in found.values()]
        worst = next((word for word in ("WRONG", "CRASH") if word in by_word), "")
        worst = worst or ("right" if all(found[way].word == "right" for way in found if "K=1" in way) else "refused")
        members[worst] += 1
        print(f"{seed} {worst} ({time.process_time() - start:.1f} s) {member}", flush=True)
        for way, outcome in found.items():
            words[way][outcome.word] += 1
            if outcome.word == "refused":
                reasons[f"{way.rpartition(' ')[2]}: {_reason(outcome.why)}"] += 1
            if outcome.word in ("WRONG", "CRASH") or (options.refused and outcome.word == "refused"):
                print(f"    {way}: {outcome.word} {outcome.why[:700]}", flush=True)
                if options.shrink and outcome.word != "refused":
                    print(f"        smallest: {shrunk(member, way)!r}", flush=True)
    print(
        "\nmembers (a right one is right at K=1 in every form, and neither wrong nor crashed at any K):", dict(members)
    )
    for way, counts in words.items():
        print(f"  {way:15}", dict(counts))
    for reason, count in reasons.most_common():
        print(f"  {count:4} refused {reason}")
    sys.exit(1 if members["WRONG"] or members["CRASH"] else 0)


if __name__ == "__main__":
    main()
