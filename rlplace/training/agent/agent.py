"""`Agent`: proposes plans under draws of the host model, and fits the model to their step times.

`solve`, the method `learned`, runs it on a task whose host runs plans, `learn_host` on anything that measures.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import refuse_if
from rlplace.measure import Measurement, Plan, Problem, Simulator
from rlplace.measure.host_model import (
    HostKnowledge,
    HostModel,
    Posterior,
    Prior,
    Scales,
    TracedPrior,
    describe,
    prior_of,
    save_posterior,
)
from rlplace.measure.measurement import PlanMeasurer
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy import LearnConfig
from rlplace.search import METHODS, Budget, Task
from rlplace.search.task import BestSoFar, Guide, TimedHost
from rlplace.session.calibrate import Known, reference_s
from rlplace.training.agent.proposals import AverageTimer, Proposer, choose_batch, expected_gain, log_step_times
from rlplace.training.config import AgentConfig

if TYPE_CHECKING:
    from rlplace.policy.learn.learners import LearnerFile

FREE = 10.0
"""By how much deviations grow where the prior is not to count."""
PATIENCE = 2
"""Batches in a row that must be expected to gain too little before measuring ends: one search may have had bad luck."""
LAST = 2
"""Plans of the last search that are measured, at most."""
TRIES = 2
"""Searches at most for each plan that is wanted: on a small problem many of them end where others have ended."""


class Agent:
    """Proposes plans to be measured, and learns from their step times.

    Attributes:
        num_measured: plans that were measured.
        history: the best measured step time wherever it improved.

    Args:
        problem: as profiled or estimated.
        seed: of every draw.
        config: how it explores.
        prior: how far the host may be from the problem's figures.
        guide: suggests starts and moves to its searches.
        start: (N,) a placement that the first search starts from, besides its own starts.
        knowledge: knowledge of this host from other workloads; without effect where no prior is to count.
        is_traced: whether measurements come with timelines.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        config: AgentConfig | None = None,
        prior: Prior | None = None,
        guide: Guide | None = None,
        start: NDArray[np.int32] | None = None,
        knowledge: HostKnowledge | None = None,
        is_traced: bool = False,
    ) -> None:
        self.num_measured = 0
        self.history: list[BestSoFar] = []
        config = config or AgentConfig()
        self._config = config = config.traced() if is_traced else config
        prior = prior or prior_of(problem)
        if not config.is_prior:  # one that hardly counts
            names = ("op_type", "device", "bandwidth", "latency", "overhead")
            prior, knowledge = dataclasses.replace(prior, **{name: FREE * getattr(prior, name) for name in names}), None
        scales = Scales(problem, prior, knowledge, TracedPrior() if is_traced else None)
        self._generator = np.random.default_rng(seed)
        self._model, self._proposer = HostModel(scales), Proposer(problem, self._generator, config, guide, start)
        self._prior = self._posterior = Posterior.prior(scales)
        self._measured: dict[str, tuple[Plan, list[float]]] = {}
        self._expected: dict[str, Plan] = {}
        self._missed, self._is_better, self._last_error = np.zeros(2), True, math.nan
        self._begin = time.monotonic()
        self._is_begun, self._is_known, self._is_traced = False, knowledge is not None, is_traced
        self._gains: list[float] = []
        self._has_choice = bool((problem.group_allowed.sum(axis=1) > 1).any())

    def __repr__(self) -> str:
        best = f"{self.history[-1].best_s * 1e3:.4g} ms a step, " if self.history else ""
        return f"Agent({best}{self.evaluations:,} placements simulated)"

    @property
    def evaluations(self) -> int:
        """Placements simulated so far."""
        return self._proposer.evaluations

    @property
    def plan(self) -> Plan | None:
        """The measured plan with the least median step time; None where none ran.

        With timelines, that with the least step time that is expected (`HostModel.expected_s`): few measurements of
        each are noisier than what the host model, which all of them have taught, says of it.
        """
        step_s = {name: float(np.median(times)) for name, (_, times) in self._measured.items()}
        if self._is_traced and self._is_better:
            step_s |= self._model.expected_s(self._posterior)
        best = min(step_s, key=step_s.__getitem__, default=None)
        return None if best is None or not math.isfinite(step_s[best]) else self._measured[best][0]

    @property
    def _best_s(self) -> float:
        return self.history[-1].best_s if self.history else math.inf

    @property
    def is_done(self) -> bool:
        """Whether measuring has ended, as `PATIENCE` batches in a row were expected to gain too little."""
        return len(self._gains) >= PATIENCE and max(self._gains[-PATIENCE:]) < self._config.least_gain

    def say(self) -> list[str]:
        """Why measuring ended early, if it did, and the learned factors of the host, a line each; the surest first."""
        lines = describe(self.posterior)
        if not self._is_better:  # what tracing cost is said anyway
            lines = ["the fit predicts plans that it has not seen worse than the given figures, and is not used"]
            lines += describe(self._posterior, most=0)
        if self.is_done:
            gain, least = self._gains[-1], self._config.least_gain
            expected = f"more were expected to shorten the step by {gain:.2%}, less than {least:.2%}"
            lines.insert(0, f"measuring ended after {self.num_measured} plans: {expected}")
        return lines

    def save(self, path: Path) -> None:
        """Writes the learned host model, as `load_learned_host` reads it."""
        save_posterior(self.posterior, path, self.say())

    def figures(self) -> dict[str, float]:
        """Figures for a tracker after a batch: how well the last one was predicted, and how much was learned."""
        deviation = self.posterior.deviation / self._prior.deviation
        return {
            "host_model/error": self._last_error,
            "host_model/loss": self._posterior.loss,
            "host_model/expected_gain": self._gains[-1] if self._gains else math.nan,
            "host_model/deviation_left": float(np.exp(np.mean(np.log(deviation)))) if len(deviation) else 1.0,
        }

    @property
    def posterior(self) -> Posterior:
        """The knowledge of the host: the prior, where the fit predicts unseen plans worse."""
        return self._posterior if self._is_better else self._prior

    def survey(self) -> list[Plan]:
        """One plan whose timeline shows most: every type of op on every kind of device, and every link."""
        simulator = Simulator(self.posterior.problem, threads=1)
        return [simulator.plan(devices) for devices in self._proposer.spread(simulator)]

    def propose(self, count: int, each: Budget) -> list[Plan]:
        """At most `count` plans to measure, unlike each other and those measured before if possible.

        Args:
            count: how many are wanted.
            each: evaluations or seconds for each of them.
        """
        config = self._config
        if self.is_done:
            return []
        mean = Simulator(self.posterior.problem, threads=1)
        if not self._is_begun:
            self._is_begun = True
            share = config.known_share if self._is_known else 1.0
            is_measured = self.num_measured or self._is_known
            found = self._proposer.first(mean, count, _scaled(each, count * share), has_probes=not is_measured)
            if not self._is_known or not self._has_choice:
                return [mean.plan(devices) for devices in found]
            each = _scaled(each, 1.0 - share)
        if not self._has_choice and self._measured:  # one device, or pins for every group: once is enough
            return []
        size, hosts = config.num_compared(each.evaluations * count), self._hosts()
        candidates = self._candidates(mean, count, each, size, hosts)
        is_compared = size and len(candidates) > count
        candidates = candidates if is_compared else candidates[:count]
        best = [self.plan] if self._is_traced and self.plan is not None else []
        if not candidates or not (is_compared or best):
            return candidates
        drawn = islice(hosts, max(config.draws, 1))
        log_s = log_step_times([*candidates, *best], drawn, config.compared_share * each.seconds * count)
        self._proposer.evaluations += log_s.size
        chosen = choose_batch(log_s[:, : len(candidates)], math.log(self._best_s), count)
        if best:
            self._gains.append(expected_gain(log_s[:, chosen], log_s[:, -1]))
        return [] if self.is_done else [candidates[place] for place in chosen]

    def last(self, count: int, budget: Budget) -> list[Plan]:
        """At most `count` plans that one more search finds, expected to be faster than the best so far.

        The host is known by then, and one long search on it finds more than the short ones of the batches.

        Args:
            count: how many are wanted.
            budget: evaluations or seconds of the search.
        """
        best = self.plan
        if best is None or not self._has_choice:
            return []
        mean = Simulator(self.posterior.problem, threads=1)
        plans = [best, *map(mean.plan, self._proposer.last(mean, budget, best.devices))]
        times_s = [outcome.step_time_s for outcome in mean.retime_batch(mean.check_plans(plans))]
        taken = self._taken()
        new = {
            plan.fingerprint: plan
            for plan, step_s in zip(plans, times_s, strict=True)
            if step_s < times_s[0] and plan.fingerprint not in taken
        }
        return list(new.values())[:count]

    def _hosts(self) -> Iterator[Simulator]:
        """Draws of the posterior without end; with timelines the same few for all of a batch, as they hardly differ."""
        drawn = iter(self._drawn, None)
        return cycle(list(islice(drawn, max(self._config.draws, 1)))) if self._is_traced else drawn

    def _candidates(
        self, mean: Simulator, count: int, each: Budget, size: int, hosts: Iterator[Simulator]
    ) -> list[Plan]:
        """Plans unlike each other and those measured before: the best of each of `count` searches, then others."""
        config, evaluations, seconds = self._config, each.evaluations, each.seconds
        if size:
            evaluations, seconds = evaluations - size * config.draws / count, seconds * (1.0 - config.compared_share)
        num_mean = max(round(config.mean_share * config.batch), 1) if config.is_thompson else TRIES * count
        taken = self._taken()
        seen = [plan.devices for plan in taken.values()]
        firsts: dict[str, Plan] = {}
        others: dict[str, Plan] = {}
        for place in range(TRIES * count):
            is_mean = place < num_mean
            simulator: Simulator | AverageTimer = mean
            if is_mean and size and config.averaged > 1:
                simulator = AverageTimer(mean.problem, list(islice(hosts, config.averaged)))
            elif not is_mean:
                simulator = next(hosts)
            weight = config.weight(is_mean, num_mean, count) if size else 1.0
            budget = Budget(max(evaluations * weight, 1), seconds * weight)
            found = self._proposer.next(simulator, budget, seen, is_first=place == 0)
            planner = simulator if isinstance(simulator, Simulator) and not size else mean
            plans = {plan.fingerprint: plan for plan in map(planner.plan, found[: max(size // (3 * count), 1)])}
            new = [name for name in plans if name not in firsts and name not in others and name not in taken]
            if place < count and not size:  # another order of a placement is measured where there is nothing else
                new = [name for name in new if not any(np.array_equal(plans[name].devices, one) for one in seen)]
            if new:
                firsts[new[0]] = plans[new[0]]
                seen.append(plans[new[0]].devices)
                others |= {name: plans[name] for name in new[1:]}
            if len(firsts) == count:
                break
        if size and firsts:
            others |= self._more(mean, next(iter(firsts.values())), size, {*firsts, *others, *taken}, seen)
        return [*firsts.values(), *others.values()]

    def _drawn(self) -> Simulator:
        """A host that measurements do not rule out; any that the prior allows, where the fit is not used."""
        return Simulator((self._model if self._is_better else self._prior).draw(self._generator), threads=1)

    def _more(
        self, mean: Simulator, best: Plan, size: int, known: set[str], seen: list[NDArray[np.int32]]
    ) -> dict[str, Plan]:
        """Plans of placements that were found before, and of relabelled ones, so that there are about `size`."""
        left = max(size - len(known) + len(self._taken()), 0)
        found = self._proposer.known(mean, left // 2 if self._config.is_permuted else left, seen)
        if self._config.is_permuted:
            found += self._proposer.relabelled(mean, best.devices, left - len(found))
        plans = {plan.fingerprint: plan for plan in map(mean.plan, found)}
        return {fingerprint: plan for fingerprint, plan in plans.items() if fingerprint not in known}

    def expect(self, plans: Sequence[Plan]) -> None:
        """Takes note that plans are being measured: they are proposed no more."""
        self._expected |= {plan.fingerprint: plan for plan in plans}

    def _taken(self) -> dict[str, Plan]:
        """Plans that were measured, or are being measured, by fingerprint."""
        return {name: plan for name, (plan, _) in self._measured.items()} | self._expected

    def learn(self, plans: Sequence[Plan], outcomes: Sequence[Measurement]) -> None:
        """Fits the host model to these measurements too.

        Args:
            plans: the measured plans.
            outcomes: of each.
        """
        times_s = [outcome.step_time_s for outcome in outcomes]
        self._judge(plans, times_s)
        self.num_measured += len(plans)
        for plan, step_s in zip(plans, times_s, strict=True):
            self._expected.pop(plan.fingerprint, None)
            self._measured.setdefault(plan.fingerprint, (plan, []))[1].append(step_s)
            if step_s < self._best_s:
                seconds = time.monotonic() - self._begin
                self.history.append(BestSoFar(self.evaluations, self.num_measured, seconds, step_s))
        self._proposer.remember(plan.devices for plan in plans)
        self._model.learn(plans, outcomes)
        self._posterior = self._model.fit()
        self._is_known = self._is_known or any(outcome.timeline is not None for outcome in outcomes)
        self._is_better = True
        if self._missed[1] > self._missed[0]:  # plans are chosen for what the fit says of them: that is held against it
            of_prior, of_fits = self._model.held_out_errors()
            self._is_better = of_fits <= of_prior

    def _judge(self, plans: Sequence[Plan], times_s: Sequence[float]) -> None:
        """Adds to the errors of the prior and of the posterior on plans that neither has seen."""
        ran = [(plan, step_s) for plan, step_s in zip(plans, times_s, strict=True) if math.isfinite(step_s)]
        if not self.num_measured or not ran:
            return
        target, missed = np.log([step_s for _, step_s in ran]), np.zeros((2, len(ran)))
        for place, known in enumerate((self._prior, self._posterior)):
            simulator = Simulator(known.problem, threads=1)
            batch = simulator.check_plans([plan for plan, _ in ran])
            said = np.array([outcome.step_time_s for outcome in simulator.retime_batch(batch)])
            missed[place] = np.abs(np.log(said) - target)
        both = missed[:, np.isfinite(missed).all(axis=0)]  # the others are taken to be beyond memory
        self._missed += both.sum(axis=1)
        if both.size:
            self._last_error = float(np.median(both[1]))


LEAST_SEARCHED = 100
"""Placements simulated for a plan with fewer of which a search finds nothing new."""


def _scaled(budget: Budget, share: float) -> Budget:
    """So much of it, at least one placement simulated."""
    part = budget.evaluations * share
    # whole: a rounding error must not change a search
    return Budget(max(round(part), 1) if math.isfinite(part) else part, budget.seconds * share)


def learn_host(
    problem: Problem,
    measurer: PlanMeasurer,
    budget: Budget,
    *,
    seed: int,
    config: AgentConfig | None = None,
    prior: Prior | None = None,
    guide: Guide | None = None,
    knowledge: HostKnowledge | None = None,
    is_traced: bool = False,
) -> Agent:
    """Measures plans within the budget, and returns the agent, whose `plan` is the best of them.

    As the method `learned` (`solve`), on anything that measures.

    Args:
        problem: a profiled or estimated problem.
        measurer: measures plans.
        budget: `measurements` is the number of plans to measure, at least 1; simulated placements and seconds are for
            all of them together.
        seed: of all random draws.
        config: the options.
        prior: distribution of the factors before measurements.
        guide: suggests starts and moves to its searches.
        knowledge: results of other workloads on this host (`knowledge_of`); none by default.
        is_traced: whether the measurer gives timelines.

    Raises:
        InvalidValue: the budget allows no measurement, or the measurer returned a wrong number of measurements.
    """
    refuse_if(
        not budget.measurements,
        "measurements",
        0,
        "at least 1 plan to measure",
        where="budget of learn_host",
        hint="For example: Budget(measurements=16).",
    )
    config = (config or AgentConfig()).on(is_known=knowledge is not None)
    if math.isinf(budget.evaluations) and math.isinf(budget.seconds):
        budget = dataclasses.replace(budget, evaluations=config.whole_evaluations(budget.measurements))
    agent = Agent(problem, seed=seed, config=config, prior=prior, guide=guide, knowledge=knowledge, is_traced=is_traced)
    simulator = Simulator(problem, threads=1)
    host = TimedHost(simulator, partial(_measured, measurer), budget.seconds)
    _explore(agent, Task(problem, simulator, budget, seed=seed, host=host), config, is_traced=is_traced)
    return agent


def _measured(measurer: PlanMeasurer, plans: Sequence[Plan]) -> list[Measurement]:
    """What a measurer says of plans."""
    outcomes = measurer.measure_plans(plans)
    refuse_if(
        len(outcomes) != len(plans),
        "number of measurements",
        len(outcomes),
        f"{len(plans)}, one for each plan",
        where=type(measurer).__name__,
    )
    return outcomes


WITHOUT_HOST = "portfolio"
"""The method for hosts where nothing can be measured: then there is nothing to learn about the host."""
MOST_IDLE = 3
"""Batches without a new plan after which there are taken to be no more."""


@one_thread_here()
def solve(
    task: Task,
    config: AgentConfig | None = None,
    known: Known | None = None,
    prior: Prior | None = None,
    guide: LearnConfig | None = None,
    start: NDArray[np.int32] | None = None,
    knowledge: HostKnowledge | None = None,
    learner_file: LearnerFile | None = None,
    is_traced: bool = False,
) -> Agent | None:
    """Learns the host from its measured steps; returns the agent.

    Each batch of plans is chosen with a host model that is fitted to the earlier measurements.

    Model-based reinforcement learning with posterior sampling (Strens 2000, ICML; Osband et al. 2013, arXiv:1306.0940):
    searches find a batch of plans with the most probable factors of the host model and with draws of their posterior.
    Then the batch is measured, and the model is fitted to all measurements.

    A share of the task's evaluations or seconds goes to each plan that may be measured, and measuring goes on for as
    long as the host is open. Where a host measures some plans later than others, it learns from the results that have
    come. Without a host it is `portfolio`.

    If steps are traced, the first of several plans is one that shows every device and link, unless traced steps are
    known; the first search gets `config.traced_share` of the budget; of four plans and more, the last one or two are
    those of one long search with what is left.

    Args:
        task: scores, measures and counts.
        config: how the agent explores.
        known: steps that were measured before, and the problem as it was profiled; the task's by default.
        prior: how far the host may be from the problem's figures.
        guide: the policy that suggests starts and moves to its searches; none by default.
        start: (N,) a placement that its first search starts from, besides its own starts.
        knowledge: knowledge of this host from other workloads; nothing by default.
        learner_file: stores the state of the guide's learner and loads it again; none by default.
        is_traced: whether the host gives timelines.
    """
    if task.host is None or not task.budget.measurements:
        METHODS[WITHOUT_HOST].run(task, start=start)
        return None
    config = (config or AgentConfig()).on(is_known=knowledge is not None)
    seed, problem = int(task.generator.integers(2**31)), task.problem if known is None else known.problem
    guided: Guide | None = None
    if guide is not None:
        from rlplace.training.policy_methods import PolicyGuide

        guided = PolicyGuide(problem, guide, seed=seed, learner_file=learner_file)
    agent = Agent(
        problem,
        seed=seed,
        config=config,
        prior=prior,
        guide=guided,
        start=start,
        knowledge=knowledge,
        is_traced=is_traced,
    )
    if known is not None:
        agent.learn(known.plans, known.outcomes)
    is_surveyed = known is not None and known.is_traced
    _explore(agent, task, config, is_traced=is_traced, is_surveyed=is_surveyed)
    return agent


def _explore(agent: Agent, task: Task, config: AgentConfig, *, is_traced: bool, is_surveyed: bool = False) -> None:
    """The loop of the agent: batches are proposed, measured and learned from, until the task's budget is spent."""
    budget, scale_s = task.budget, math.nan

    def learn(came: Sequence[tuple[Plan, Measurement]]) -> None:
        nonlocal scale_s  # step times are those beside the first reference, so that a drift of the machine cancels
        scale_s = reference_s(outcome for _, outcome in came[: config.batch]) if math.isnan(scale_s) else scale_s
        agent.learn([plan for plan, _ in came], [outcome.beside(scale_s) for _, outcome in came])

    def measure(plans: Sequence[Plan], *, is_all: bool = False) -> bool:
        """Whether any result has come."""
        agent.expect(plans)
        if came := task.measure_some(plans, is_all=is_all):
            learn(came)
            task.tell(agent.figures())
        return bool(came)

    if task.raced:  # by an interrupted search: it need not be measured again to be known
        learn([pair for plans, outcomes in task.raced for pair in zip(plans, outcomes, strict=True)])
    # a last search takes a second or more
    kept = min(LAST, budget.measurements // 4) if is_traced and config.last_share * budget.seconds >= 1 else 0
    last_share = config.last_share if kept else 0.0
    last_s = last_share * budget.seconds if math.isfinite(budget.seconds) else 0.0
    is_surveyed, has_searched = is_surveyed or not is_traced or bool(task.raced), bool(task.raced)
    granted, idle, kept_s = 0.0, 0, 0.0
    while (
        (left := task.measurements_left - kept) > 0
        and task.measuring_s_left > last_s + kept_s
        and idle < MOST_IDLE
        and not agent.is_done
    ):
        count, share = min(config.batch, left), config.share(task.measurements, budget.measurements)
        if is_traced:  # the first ones tell most: every batch is as large as all before it, up to the usual size
            count = min(count, max(agent.num_measured, 1))
            share = (1.0 - config.traced_share) * share if has_searched else config.traced_share / count
            share *= 1.0 - last_share
        spent = agent.evaluations
        plans, is_surveyed = agent.survey() if not is_surveyed and left > 1 else [], True
        if not plans:  # or no drawn placement fits into memory
            each, granted = _scaled(budget, share), granted + count * budget.evaluations * share
            # what earlier batches simulated beyond their shares is taken from this one
            most = max((granted - agent.evaluations) / count, LEAST_SEARCHED)
            each = Budget(min(each.evaluations, _scaled(Budget(most), 1.0).evaluations), each.seconds)
            plans, has_searched = agent.propose(count, each), True
        task.count(agent.evaluations - spent)
        idle = 0 if plans else idle + 1
        begin = time.monotonic()
        if plans and not measure(plans):
            break
        kept_s = kept * (time.monotonic() - begin) / max(len(plans), 1)
    measure([], is_all=True)
    kept = min(kept, task.measurements_left)
    rest = task.evaluations_left, min(task.measuring_s_left - kept_s, last_s or math.inf)
    if kept and min(rest) >= 1:
        spent, plans = agent.evaluations, agent.last(kept, Budget(*rest))
        task.count(agent.evaluations - spent)
        measure(plans, is_all=True)
