"""docs/step-time-model.md in plain Python: slow, and as close to the page as code can be.

An item is `("op", i)` or `("send", tensor, destination)`; devices and tensors are indices, links are names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlplace.graphs.opgraph import SOURCE_TARGETS
from rlplace.measure.problem import Problem

Item = tuple[str, int] | tuple[str, int, int]


@dataclass
class Job:
    """A running job: `work_s` is left at `anchor_s`, when it was last slowed down or sped up."""

    end_s: float
    work_s: float
    anchor_s: float
    factor: float = 1.0


class Reference:
    """One placement: plan it, follow a sequence, and read off times, memory and loads."""

    def __init__(self, problem: Problem, devices: list[int], priorities: list[float]) -> None:
        self.graph, self.host, self.costs = problem.graph, problem.host, problem.costs
        self.workspace_bytes = problem.workspace_bytes
        self.devices = [int(device) for device in devices]
        order = sorted(range(self.graph.num_ops), key=lambda op: (-priorities[op], op))
        self.rank = {op: place for place, op in enumerate(order)}
        self.routes = {
            (self.host.device_index[r.source], self.host.device_index[r.destination]): r for r in self.host.routes
        }
        self.links = {link.name: link for link in self.host.links}
        self.sources = [i for i, target in enumerate(self.graph.targets) if target in SOURCE_TARGETS]
        offsets = self.graph.input_offsets.tolist()
        tensors = self.graph.input_tensors.tolist()
        self.inputs = [tensors[offsets[i] : offsets[i + 1]] for i in range(self.graph.num_ops)]
        self.producer = self.graph.tensor_op.tolist()
        self.outputs = [[t for t, op in enumerate(self.producer) if op == i] for i in range(self.graph.num_ops)]
        self.readers = [
            [i for i in range(self.graph.num_ops) if t in self.inputs[i]] for t in range(self.graph.num_tensors)
        ]
        self.updates = sorted(
            set(zip(self.graph.mutation_op.tolist(), self.graph.mutation_tensor.tolist(), strict=True))
        )
        self.start_s: dict[Item, float] = {}
        self.end_s: dict[Item, float] = {}
        self.slower: dict[Item, float] = {}
        machines = [device.machine for device in self.host.devices]
        relays = self.host.processes and len(set(machines)) > 1 and all(route.links for route in self.host.routes)
        self.machine = machines if relays else [""] * len(machines)
        self.via: dict[Item, int] = {}

    def relay(self, sends: list[Item]) -> None:
        """Find where transfers in this order start: the first to another machine is the only one from there."""
        first: dict[tuple[int, str], int] = {}
        for send in sends:
            home, machine = self.home(send[1]), self.machine[send[2]]
            is_near = machine == self.machine[home]
            self.via[send] = home if is_near else first.get((send[1], machine), home)
            first.setdefault((send[1], machine), send[2])

    # what an item is

    def source(self, send: Item) -> int:
        return self.via[send]

    def home(self, tensor: int) -> int:
        return self.devices[self.producer[tensor]]

    def kind(self, item: Item) -> str:
        if item[0] == "op":
            return "source" if item[1] in self.sources else "job"
        route = self.routes[self.source(item), item[2]]
        return "handover" if not route.links else "job" if route.blocks_destination else "queued"

    def device(self, item: Item) -> int:
        return self.devices[item[1]] if item[0] == "op" else item[2]

    def singles(self, device: int) -> set[int]:
        members = self.host.devices[device].members
        if not members:
            return {device}
        return set().union(*(self.singles(self.host.device_index[member]) for member in members))

    def holds(self, item: Item) -> set[int | str]:
        kind = self.kind(item)
        held: set[int | str] = set()
        if kind == "job":
            held |= self.singles(self.device(item))
        if item[0] == "send" and kind != "handover":
            route = self.routes[self.source(item), item[2]]
            held |= set(route.links)
            if route.blocks_source:
                held |= self.singles(self.source(item))
        return held

    def asks(self, item: Item) -> set[int | str]:
        """What it holds, and a relay, which sends it on between what it does."""
        is_relayed = item[0] == "send" and self.source(item) != self.home(item[1])
        return self.holds(item) | (self.singles(self.source(item)) if is_relayed else set())

    def duration(self, item: Item) -> float:
        if item[0] == "op":
            seconds = float(self.costs.op_time_s[item[1], self.devices[item[1]]])
            if self.costs.moved_factor is not None and self.inputs[item[1]]:
                largest = max(self.inputs[item[1]], key=lambda t: self.graph.tensor_bytes[t])  # the first of equal ones
                if self.home(largest) != self.devices[item[1]]:
                    seconds *= float(self.costs.moved_factor[item[1]])
            return seconds
        links = [self.links[name] for name in self.routes[self.source(item), item[2]].links]
        latency = max(link.latency_s for link in links)
        s_per_byte = 1.0 / min(link.bandwidth_bytes_per_s for link in links)
        return (latency + float(self.graph.tensor_bytes[item[1]]) * s_per_byte) * self.slower.get(item, 1.0)

    def in_place(self, tensor: int, device: int) -> bool:
        """Whether ops on the device read the tensor where it is."""
        return device == self.home(tensor) or not self.routes[self.home(tensor), device].links

    def destinations(self, tensor: int) -> list[int]:
        return sorted({self.devices[reader] for reader in self.readers[tensor]} - {self.home(tensor)})

    def needs(self, item: Item) -> list[Item]:
        """The items that must have ended before this one starts, whatever the order of the rest."""
        if item[0] == "send":
            source = self.source(item)
            return [("op", self.producer[item[1]]) if source == self.home(item[1]) else ("send", item[1], source)]
        op, needed = item[1], []
        for t in self.inputs[op]:
            needed.append(("op", self.producer[t]))
            if self.devices[op] != self.home(t):
                needed.append(("send", t, self.devices[op]))
        for t in [t for updater, t in self.updates if updater == op]:
            updaters = [updater for updater, updated in self.updates if updated == t]
            needed += [("op", u) for u in updaters if u < op]
            needed += [("op", r) for r in self.readers[t] if r not in updaters and self.in_place(t, self.devices[r])]
            needed += [("send", t, e) for e in self.destinations(t) if not self.in_place(t, e)]
        return needed

    # planning

    def plan(self) -> list[Item]:
        self.relay([("send", t, e) for t in range(self.graph.num_tensors) for e in self.destinations(t)])
        sequence: list[Item] = [("op", i) for i in self.sources]
        ended: set[Item] = set(sequence)
        running: dict[Item, Job] = {}
        queued: list[Item] = []
        copies: list[Item] = []
        requests: list[Item] = []
        needs = {("op", i): self.needs(("op", i)) for i in range(self.graph.num_ops)}
        for item in sequence:
            self.start_s[item] = self.end_s[item] = 0.0
        now = 0.0
        ending: list[Item] = list(sequence)

        def start(item: Item) -> None:
            work = self.duration(item)
            running[item] = Job(now + work, work, now)
            self.start_s[item] = now
            sequence.append(item)

        while True:
            started_at = len(sequence)
            for op in sorted(ending):
                ended.add(op)
                for t in self.outputs[op[1]]:
                    for e in self.destinations(t):
                        send: Item = ("send", t, e)
                        if self.source(send) != self.home(t):
                            continue
                        if self.kind(send) == "handover":
                            self.start_s[send] = self.end_s[send] = now
                            ended.add(send)
                            sequence.append(send)
                        else:
                            (queued if self.kind(send) == "queued" else copies).append(send)
                        requests.append(send)
            while True:
                arrived = [item for item, job in running.items() if item[0] == "send" and job.end_s == now]
                for item in sorted(arrived, key=self._place):
                    self.end_s[item] = running.pop(item).end_s
                    ended.add(item)
                    for e in self.destinations(item[1]):
                        if self.via[(send := ("send", item[1], e))] == item[2]:
                            (queued if self.kind(send) == "queued" else copies).append(send)
                            requests.append(send)
                for item in list(queued):
                    earlier = queued[: queued.index(item)]
                    held = set().union(*map(self.holds, running))
                    links = {link for other in earlier for link in self.holds(other) if isinstance(link, str)}
                    if not self.asks(item) & (held | links):
                        queued.remove(item)
                        start(item)
                if not any(item[0] == "send" and job.end_s == now for item, job in running.items()):
                    break
            sequence[started_at:] = sorted(sequence[started_at:], key=requests.index)
            self._start_jobs(now, ended, running, copies, needs, start)
            soonest = min((job.end_s for job in running.values()), default=math.inf)
            if soonest > now:
                self._slow_down(running, now)
                soonest = min((job.end_s for job in running.values()), default=math.inf)
            if soonest == math.inf:
                return sequence
            now = soonest
            ending = [item for item, job in running.items() if item[0] == "op" and job.end_s == now]
            for item in ending:
                self.end_s[item] = running.pop(item).end_s

    def _place(self, send: Item) -> tuple[bool, int]:
        """Of transfers that end at one instant: jobs by device, then others by their first link."""
        link = self.routes[self.source(send), send[2]].links[0]
        return (False, send[2]) if self.kind(send) == "job" else (True, list(self.links).index(link))

    def _start_jobs(self, now, ended, running, copies, needs, start) -> None:
        ready = [
            op
            for op in needs
            if self.kind(op) == "job" and op not in self.start_s and all(needed in ended for needed in needs[op])
        ]
        waiting = [((self.rank[op[1]], 1, op[1]), op) for op in ready]
        for copy in copies:
            best = min(self.rank[reader] for reader in self.readers[copy[1]] if self.devices[reader] == copy[2])
            waiting.append(((best, 0, copy[1]), copy))
        reserved: dict[int | str, int] = {}
        has_started: set[int] = set()
        for _, item in sorted(waiting):
            device = self.device(item)
            if device in has_started:
                continue
            held = set().union(*map(self.holds, running))
            held_back = {single for single, gang in reserved.items() if gang != device}
            if not self.asks(item) & (held | held_back):
                if item in copies:
                    copies.remove(item)
                start(item)
                has_started.add(device)
            elif self.host.devices[device].members:
                for single in self.singles(device) - held - held_back:
                    reserved[single] = device

    def _slow_down(self, running: dict[Item, Job], now: float) -> None:
        """Find the factor of every running job anew."""
        if not self.host.corun_slowdown:
            return
        jobs = {self.device(item): job for item, job in running.items() if self.kind(item) == "job"}
        for d, job in jobs.items():
            factor = 1.0
            for e in sorted(jobs):
                if e != d:
                    factor += self.host.corun_slowdown[d][e]
            if factor != job.factor:
                job.work_s = max(0.0, job.work_s - (now - job.anchor_s) / job.factor)
                job.anchor_s = now
                job.factor = factor
                job.end_s = now + job.work_s * factor

    # following a plan

    def follow(self, sequence: list[Item]) -> None:
        self.sequence = sequence
        self.relay([item for item in sequence if item[0] == "send"])
        self.start_s, self.end_s = {}, {}
        holds = {item: self.holds(item) for item in sequence}
        needs = {item: self.needs(item) for item in sequence}
        for at, item in enumerate(sequence):
            needs[item] += [earlier for earlier in sequence[:at] if holds[earlier] & self.asks(item)]
        data = {item: self.needs(item) for item in sequence}
        for at, item in enumerate(sequence):
            relay = self.asks(item) - holds[item]
            data[item] += [earlier for earlier in sequence[:at] if holds[earlier] & relay]
        launching: dict[str, tuple[float, Item]] = {}
        asked: dict[Item, float] = {}
        launched: set[Item] = set()
        running: dict[Item, Job] = {}
        now = 0.0
        for i in self.sources:
            self.start_s["op", i] = self.end_s["op", i] = 0.0
        while True:
            for item in [item for item, job in running.items() if job.end_s == now]:
                self.end_s[item] = running.pop(item).end_s
            for dispatcher in [name for name, (end, _) in launching.items() if end == now]:
                launched.add(launching.pop(dispatcher)[1])
            for item in sequence:
                if self.kind(item) == "handover" and item not in self.end_s and needs[item][0] in self.end_s:
                    self.start_s[item] = self.end_s[item] = now
            self._launch(now, sequence, holds, data, launching, launched, asked)
            for item in sequence:
                if item in self.start_s or not all(needed in self.end_s for needed in needs[item]):
                    continue
                if self.kind(item) == "handover" or (self._dispatcher(item) and item not in launched):
                    continue
                work = self.duration(item)
                running[item] = Job(now + work, work, now)
                self.start_s[item] = now
            ends = [job.end_s for job in running.values()] + [end for end, _ in launching.values()]
            if min(ends, default=math.inf) > now:
                self._slow_down(running, now)
                ends = [job.end_s for job in running.values()] + [end for end, _ in launching.values()]
            if not ends:
                assert len(self.end_s) == len(sequence)
                return
            now = min(ends)

    def _dispatcher(self, item: Item) -> str:
        costs = self.host.dispatch_s > 0 or self.host.copy_dispatch_s > 0
        launched = costs and self.kind(item) in ("job", "queued")
        return self.host.devices[self.device(item)].dispatcher if launched else ""

    def _bounded(self, item: Item, sequence: list[Item], holds: dict[Item, set[int | str]]) -> bool:
        """Whether the item `run_ahead` places before this one has not ended on some single device of its device."""
        if self.kind(item) != "job":
            return False
        for single in self.singles(self.device(item)):
            lane = [other for other in sequence if single in holds[other]]
            at = lane.index(item) - self.host.run_ahead
            if at >= 0 and lane[at] not in self.end_s:
                return True
        return False

    def _launch(self, now, sequence, holds, data, launching, launched, asked) -> None:
        by_request = self.host.dispatch_order == "request"
        under_way = {item for _, item in launching.values()}
        for d in range(self.host.num_devices) if by_request else ():
            items = [item for item in sequence if self._dispatcher(item) and self.device(item) == d]
            item = next((item for item in items if item not in launched), None)
            if item is None or item in asked or item in under_way or self._bounded(item, sequence, holds):
                continue
            waits_for_data = self.host.run_ahead == 1 and self.kind(item) == "job"
            if not waits_for_data or all(needed in self.end_s for needed in data[item]):
                asked[item] = now
        for dispatcher in {device.dispatcher for device in self.host.devices} - {""} - set(launching):
            if by_request:
                waiting = [item for item in asked if self._dispatcher(item) == dispatcher and item not in launched]
                item = min(waiting, key=lambda item: (asked[item], self.device(item)), default=None)
            else:
                items = [item for item in sequence if self._dispatcher(item) == dispatcher]
                item = next((item for item in items if item not in launched), None)
                if item is not None and self._bounded(item, sequence, holds):
                    item = None
            if item is not None:
                cost = self.host.dispatch_s if item[0] == "op" else self.host.copy_dispatch_s
                launching[dispatcher] = (now + cost, item)

    # what comes out

    def step_s(self) -> float:
        return max((end for item, end in self.end_s.items() if item[0] == "op"), default=0.0)

    def busiest_s(self) -> float:
        loads: dict[int | str, float] = {}
        for item in self.end_s:
            for place in self.holds(item):
                loads[place] = loads.get(place, 0.0) + self.duration(item)
        return max(loads.values(), default=0.0)

    def allocations(self) -> list[tuple[int, float, float, int]]:
        """(account, start, end, bytes) of everything allocated during the step."""
        found = []
        for op in range(self.graph.num_ops):
            d, item = self.devices[op], ("op", op)
            if op in self.sources:
                continue
            found.append((d, self.start_s[item], self.end_s[item], int(self.workspace_bytes[op, d])))
            for t in self.outputs[op]:
                users = [self.end_s["op", r] for r in self.readers[t] if self.in_place(t, self.devices[r])]
                sends = [("send", t, e) for e in self.destinations(t) if not self.in_place(t, e)]
                users += [self.end_s[send] for send in sends if self.source(send) == d]
                end = math.inf if t in self.graph.output_tensors else max(users, default=self.end_s[item])
                found.append((d, self.start_s[item], end, int(self.graph.tensor_bytes[t])))
        for item in self.end_s:
            if item[0] == "send" and self.kind(item) != "handover":
                users = [self.end_s["op", r] for r in self.readers[item[1]] if self.devices[r] == item[2]]
                sends = [("send", item[1], e) for e in self.destinations(item[1])]
                end = max(users + [self.end_s[send] for send in sends if self.source(send) == item[2]])
                found.append((item[2], self.taken_s(item), end, int(self.graph.tensor_bytes[item[1]])))
        return [(d, start, end, self.rounded(d, size)) for d, start, end, size in found]

    def taken_s(self, copy: Item) -> float:
        """When the destination takes the memory of a copy: a process that makes no copy itself is ready earlier."""
        if not self.host.processes or any(isinstance(held, int) for held in self.holds(copy)):
            return self.start_s[copy]
        before = self.sequence[: self.sequence.index(copy)]
        ready_s = max((self.end_s[item] for item in before if copy[2] in self.holds(item)), default=0.0)
        return min(ready_s, self.start_s[copy])

    def rounded(self, device: int, size: int) -> int:
        granularity = self.host.devices[device].memory_granularity_bytes
        return math.ceil(size / granularity) * granularity

    def peak(self, accounts: list[int]) -> int:
        """Most bytes that the devices hold together at any time."""
        held = sum(self.host.devices[d].context_bytes for d in accounts)
        for op in range(self.graph.num_ops):
            if self.devices[op] in accounts:
                held += self.rounded(self.devices[op], int(self.graph.state_bytes[op]))
                if op in self.sources:
                    sizes = [int(self.graph.tensor_bytes[t]) for t in self.outputs[op]]
                    held += sum(self.rounded(self.devices[op], size) for size in sizes)
        mine = [allocation for allocation in self.allocations() if allocation[0] in accounts]
        return held + max((sum(b for _, s, e, b in mine if s <= at < e) for _, at, _, _ in mine), default=0)

    def is_oom(self) -> bool:
        pools: dict[str, list[int]] = {}
        for d, device in enumerate(self.host.devices):
            pools.setdefault(device.memory_pool or f"only {d}", []).append(d)
        return any(self.peak(ds) > min(self.host.devices[d].memory_bytes for d in ds) for ds in pools.values())
