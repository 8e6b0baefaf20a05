"""`Grouping`: sets of ops that move together, and the rules that make them.

`GroupingRule`: the word that says how ops are grouped, checked and taken apart.

METIS (Karypis & Kumar 1998) in a process of its own: balanced parts with few bytes cut, where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, MissingExtra, RunnerError, check_known, refuse_if
from rlplace.graphs.grouping.coarsen import Coarsening
from rlplace.graphs.grouping.constraints import modules_matching
from rlplace.graphs.grouping.merging import mirrored_twins
from rlplace.graphs.grouping.module_classes import tied_as_modules
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph, read_only
from rlplace.say import counted

CAP_SLACK = 1.5
"""A group may cost this many times an even share before the cap has to be relaxed."""
CAP_GROWTH = 1.25
"""Factor by which the cap is relaxed when nothing more can be merged under it."""
INSEPARABLE = 2.0
"""Two groups are merged at once where sending the tensors between them takes this many times the cheaper one's cost."""
LARGEST_SHARE = 0.125
"""Part of the whole cost that a group may reach by merges of that kind."""
SHARED_PART = 0.25
"""Part of the groups that the co-location classes of a step cut into micro-batches are left with."""
LATENCY_S, S_PER_BYTE = 20e-6, 1 / 12e9
"""A transfer between two GPUs over PCIe 3.0, where the caller does not give the time of a transfer."""


@dataclass(frozen=True)
class Grouping:
    """Maps N ops to G groups; every group has at least one op.

    Attributes:
        op_group: (N,) int32, group of each op, in 0..G-1.
        rule: the rule that made it, e.g. `heavy-edge:256`.
        dropped: rules that were not applied everywhere, because the graph of groups would have become cyclic.
    """

    op_group: NDArray[np.int32]
    rule: str = ""
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "op_group", read_only(self.op_group, np.int32))
        numbers = np.unique(self.op_group)
        refuse_if(
            not np.array_equal(numbers, np.arange(len(numbers))),
            "op_group",
            "gaps or negative groups",
            "groups numbered 0..G-1 without gaps",
            where="grouping",
        )

    @cached_property
    def num_groups(self) -> int:
        return int(self.op_group.max()) + 1 if len(self.op_group) else 0

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        by = self.rule and f", {self.rule}"
        return f"Grouping({counted(len(self.op_group), 'op')} in {counted(self.num_groups, 'group')}{by})"

    def expand(self, group_devices: NDArray[np.int32]) -> NDArray[np.int32]:
        """The devices of ops (..., N) for devices of groups (..., G)."""
        return np.ascontiguousarray(np.asarray(group_devices, dtype=np.int32)[..., self.op_group])


def group_ops(
    graph: OpGraph,
    cost_s: NDArray[np.float64],
    num_groups: int = 256,
    rule: str = "heavy-edge",
    *,
    allowed: NDArray[np.bool_] | None = None,
    acyclic: bool = False,
    latency_s: float = LATENCY_S,
    s_per_byte: float = S_PER_BYTE,
    cap_bytes: float = np.inf,
) -> Grouping:
    """Divides the ops into at most `num_groups` groups, numbered by their first op; the result is deterministic.

    Under every rule, the ops of one co-location class are in one group, and the ops of a group have at least one
    allowed device in common. A source (parameter, input, constant) without a class joins its first reader. The rest
    depends on the rule (see `GroupingRule` for the options):

    - `heavy-edge`: two groups are merged if sending the tensors between them takes twice the time of the cheaper group.
      A merged group has at most an eighth of the whole cost.
    - `colocation` (Mirhoseini et al. 2017, section 3.3): a backward op joins the forward op whose gradient it computes.
      A group whose outputs are read by only one other group joins that group, repeatedly. Cells come first, if given.
    - `module`: the ops of a module are one group.
    - `device-map`: the ops that a Hugging Face device map cannot separate are one co-location class; see
      `module_classes`.
    - `metis`: `num_groups` parts of equal cost and bytes, with the least transfer time between them.
    - `none`: no further merges; `num_groups` is ignored.

    If more than `num_groups` are left, the heaviest edges are merged first (heavy-edge coarsening, Karypis & Kumar
    1998, over all edges in order of weight instead of a matching). The cost of a merged group is at most 1.5 even
    shares; if no merge is possible, this cap grows by a quarter. If no edge is left, the two cheapest groups are
    merged. More than `num_groups` remain only if allowed devices or `cap_bytes` forbid merges.

    If the batch is cut, a group never contains ops of two micro-batches, or of one micro-batch and shared ops, except
    if a class requires it. So more than `num_groups` remain if there are more micro-batches. Classes, mostly of
    parameters, are first merged with the classes that are read just before and after.

    Args:
        graph: N ops.
        cost_s: (N,) float64, seconds of each op (for example the mean over devices).
        num_groups: most groups to return, >= 1.
        rule: the word of a `GroupingRule`.
        allowed: (N, D) bool, devices where each op may be; None allows all.
        acyclic: keep the graph of groups without cycles; `Grouping.dropped` then lists rules that were not applied
            everywhere. Classes are always kept: the ops between the ops of a class join it. An edge from a parameter or
            buffer with a class does not count, because the tensor exists before the step begins.
        latency_s: seconds of a transfer of any size ...
        s_per_byte: ... and for each byte.
        cap_bytes: limit for merged groups, in bytes of parameters, gradients, optimizer state and forward outputs; a
            single class may exceed it.

    Raises:
        InvalidValue: an argument of the wrong shape or range, or ops that must be together and have no common device.
        UnknownName: no such rule.
        MissingExtra: the rule is `metis`, and pymetis is not installed.
    """
    parsed = GroupingRule.parse(rule)
    graph = tied_as_modules(graph) if parsed.name == DEVICE_MAP else graph
    cost_s, allowed = _checked(graph, cost_s, num_groups, allowed)
    groups = Coarsening(
        graph, cost_s, allowed, latency_s=latency_s, s_per_byte=s_per_byte, cap_bytes=cap_bytes, is_acyclic=acyclic
    )
    groups.join_classes()
    dropped: list[str] = []
    if parsed.name != "none":
        groups.join_sources()
        if graph.num_micro_batches > 1:
            groups.join_alike(_shared_runs(graph, max(int(SHARED_PART * num_groups), 1)))
        dropped = _follow(groups, parsed, cost_s, num_groups)
        _reach(groups, num_groups)
    word = rule if parsed.name == "none" else f"{rule}:{num_groups}"
    return Grouping(groups.op_group(), rule=word, dropped=tuple(dropped))


def _follow(groups: Coarsening, rule: GroupingRule, cost_s: NDArray[np.float64], num_groups: int) -> list[str]:
    """Merges by the rule; returns the parts of it that had to be dropped."""
    followed: dict[str, bool] = {}
    if rule.name == "heavy-edge":
        groups.merge_inseparable(INSEPARABLE, LARGEST_SHARE * groups.total_s)
    elif rule.name == "module":
        followed["module"] = groups.join_alike(_modules(groups.graph, rule.depth, is_apart=rule.is_apart))
    elif rule.name == "colocation":
        for pattern in rule.cells:
            followed[f"cell {pattern}"] = groups.join_alike(modules_matching(groups.graph, pattern))
        followed["gradient"] = groups.merge(_twins(groups.graph), is_rule=True)
        followed["single consumer"] = groups.join_single_consumers()
    elif rule.name == "metis":
        followed["metis"] = groups.join_alike(_parts(groups, num_groups))
    return [name for name, is_followed in followed.items() if not is_followed]


def _reach(groups: Coarsening, num_groups: int) -> None:
    """Merges heavy edges, then anything, until `num_groups` are left."""
    cap_s = CAP_SLACK * groups.total_s / num_groups
    while groups.num_groups > num_groups:
        if groups.merge_heavy_edges(cap_s, num_groups):
            continue
        if cap_s >= groups.total_s:
            groups.merge_leftovers(num_groups)
            return
        cap_s = max(cap_s * CAP_GROWTH, groups.lightest_pair_s())


def _modules(graph: OpGraph, depth: int, *, is_apart: bool) -> NDArray[np.int64]:
    """(N,) int64: a number for each module path cut at `depth` names, and for each phase of it with `is_apart`."""
    number: dict[str, int] = {}
    cut = {path: ".".join(path.split(".")[: depth or None]) for path in set(graph.modules)}
    labels = np.array([number.setdefault(cut[path], len(number)) for path in graph.modules], dtype=np.int64)
    labels = labels * 3 + graph.phases if is_apart else labels
    return np.where(graph.is_source & (graph.colocation < 0), -1, labels).astype(np.int64)


def _twins(graph: OpGraph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a forward op and a backward op that computes its gradient."""
    runs = ~graph.is_source
    parts = (np.maximum(graph.micro_batch, 0), graph.shard + 1)
    sizes = (graph.num_micro_batches, graph.num_shards + 1)
    module = _modules(graph, 0, is_apart=False) * sizes[0] * sizes[1] + np.ravel_multi_index(parts, sizes)
    offsets, readers = graph.readers
    twin = mirrored_twins(
        module,
        runs & (graph.phases == FORWARD),
        runs & (graph.phases == BACKWARD),
        graph.is_source,
        graph.tensor_op,
        graph.input_offsets,
        graph.input_tensors,
        offsets,
        readers,
        int(module.max(initial=-1)) + 1,
    )
    backward = np.flatnonzero(twin >= 0)
    return twin[backward], backward


def _parts(groups: Coarsening, num_groups: int) -> NDArray[np.int64]:
    """(N,) int64: METIS's part of each op."""
    roots = np.unique(groups.roots())
    source, target, weight_s = groups.edges()
    numbers = np.searchsorted(roots, np.concatenate((source, target)))
    return metis_parts(
        len(roots), numbers[: len(source)], numbers[len(source) :], weight_s, groups.shares()[roots], num_groups
    )[groups.op_group()]


def _shared_runs(graph: OpGraph, count: int) -> NDArray[np.int64]:
    """(N,) int64: co-location classes in order of their first reader, in `count` runs of equal bytes; -1 for others."""
    members = np.flatnonzero(graph.colocation >= 0)
    classes = graph.colocation[members]
    num_classes = int(classes.max(initial=-1)) + 1
    held = (graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes)[members]
    size = np.bincount(classes, weights=held, minlength=num_classes)
    first = np.full(num_classes, graph.num_ops)
    home = graph.colocation[graph.tensor_op[graph.input_tensors]]
    outside = (home >= 0) & (graph.colocation[graph.edge_op] != home)
    np.minimum.at(first, home[outside], graph.edge_op[outside])
    order = np.argsort(first, kind="stable")
    before = np.cumsum(size[order]) - size[order]
    run = np.empty(num_classes, dtype=np.int64)
    run[order] = np.minimum(before * count / max(float(size.sum()), 1.0), count - 1)
    labels = np.full(graph.num_ops, -1, dtype=np.int64)
    labels[members] = run[classes]
    return labels


def _checked(
    graph: OpGraph, cost_s: NDArray[np.float64], num_groups: int, allowed: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    cost_s = np.asarray(cost_s, dtype=np.float64)
    refuse_if(cost_s.shape != (graph.num_ops,), "cost_s", cost_s.shape, f"shape {(graph.num_ops,)}", where="group_ops")
    refuse_if(
        not np.all(np.isfinite(cost_s)) or np.any(cost_s < 0),
        "cost_s",
        "a negative or non-finite entry",
        "finite seconds >= 0",
        where="group_ops",
    )
    refuse_if(num_groups < 1, "num_groups", num_groups, "at least 1", where="group_ops")
    if allowed is None:
        return cost_s, np.ones((graph.num_ops, 1), dtype=np.bool_)
    allowed = np.ascontiguousarray(allowed, dtype=np.bool_)
    refuse_if(
        allowed.ndim != 2 or len(allowed) != graph.num_ops or not allowed.shape[1],
        "allowed",
        allowed.shape,
        f"shape ({graph.num_ops}, D)",
        where="group_ops",
    )
    if not np.all(allowed.any(axis=1)):
        name = graph.names[int(np.argmin(allowed.any(axis=1)))]
        raise InvalidValue("allowed", f"no device for op {name!r}", "at least one for every op", where="group_ops")
    return cost_s, allowed


RULES = ("heavy-edge", "colocation", "module", "device-map", "metis", "none")
DEVICE_MAP = "device-map"


@dataclass(frozen=True)
class GroupingRule:
    """A rule with its options.

    | word | groups |
    |---|---|
    | `heavy-edge` | merged where sending costs more than it gains, heaviest edges first |
    | `colocation` | the 2017 paper's: an op with its gradient, an op with its only consumer |
    | `colocation:PATTERN,...` | the same, and each module that a pattern matches is one group |
    | `module` | the ops of a module |
    | `module:DEPTH` | the ops of a module and all below it, DEPTH names deep |
    | `module:DEPTH:apart` | the same, with forward, backward and update apart |
    | `device-map` | modules that a Hugging Face device map cannot split; a constraint, not only a start |
    | `metis` | a balanced partition with few bytes cut |
    | `none` | every op by itself |

    Attributes:
        name: one of `RULES`.
        depth: names of a module path that count; 0 for all of them.
        is_apart: whether the phases of a module are groups of their own.
        cells: patterns of modules that are one group each.
    """

    name: str
    depth: int = 0
    is_apart: bool = False
    cells: tuple[str, ...] = ()

    @classmethod
    def parse(cls, word: str) -> GroupingRule:
        """The rule that `word` names.

        Raises:
            UnknownName: no such rule.
            InvalidValue: an option that the rule does not have.

        Example:
            >>> GroupingRule.parse("module:2")
            GroupingRule(name='module', depth=2, is_apart=False, cells=())
        """
        name, *options = word.split(":")
        check_known("grouping rule", name, RULES)
        if name == "colocation" and len(options) == 1 and all(options[0].split(",")):
            return cls(name, cells=tuple(options[0].split(",")))
        has_depth = name == "module" and bool(options) and options[0].isdecimal() and int(options[0]) > 0
        if has_depth and options[1:] in ([], ["apart"]):
            return cls(name, depth=int(options[0]), is_apart=bool(options[1:]))
        if not options:
            return cls(name)
        raise InvalidValue(
            "grouping rule",
            word,
            "heavy-edge, colocation, colocation:PATTERN,..., module, module:DEPTH, module:DEPTH:apart, device-map, "
            "metis or none",
        )


SHARES = 1 << 20
"""Weights become whole numbers: the heaviest edge, and all nodes together, are about this much."""
PROGRAM = """
import json, sys
import pymetis
ask = json.load(sys.stdin)
graph = pymetis.CSRAdjacency(ask.pop("xadj"), ask.pop("adjncy"))
parts = pymetis.part_graph(ask.pop("nparts"), graph, options=pymetis.Options(seed=0), **ask)[1]
sys.stdout.write("\\n" + json.dumps([int(part) for part in parts]) + "\\n")
"""
"""Run by a Python of its own: METIS writes warnings to the standard output, and crashes on some graphs."""
TIMEOUT_S = 300.0


def check_installed() -> None:
    """Checks that pymetis is installed.

    Raises:
        MissingExtra: pymetis is not installed.
    """
    if importlib.util.find_spec("pymetis") is None:
        raise MissingExtra("pymetis", "metis")


def run_metis(
    num_parts: int,
    offsets: NDArray[np.int64],
    neighbours: NDArray[np.int64],
    node_weights: list[int],
    edge_weights: list[int],
    shares: NDArray[np.float64] | None = None,
    *,
    program: str = PROGRAM,
) -> NDArray[np.int64]:
    """(V,) int64: the part of each node; some parts may be empty. Always the same for the same graph.

    Args:
        num_parts: how many parts.
        offsets, neighbours: CSR of an undirected graph, every edge from both ends.
        node_weights: (V,) weights by which the parts are balanced.
        edge_weights: (2 E,) the cost of cutting an edge, >= 1.
        shares: (num_parts,) of all weight that each part aims at, summing to 1; even ones by default.
        program: Python that reads the question as JSON and writes the parts as its last line.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS crashed, or did not finish.
    """
    check_installed()
    question: dict[str, Any] = {
        "nparts": num_parts,
        "xadj": offsets.tolist(),
        "adjncy": neighbours.tolist(),
        "vweights": node_weights,
        "eweights": edge_weights,
    }
    if shares is not None:
        question |= {"tpwgts": shares.tolist(), "recursive": False}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunnerError(f"metis: it could not finish: {error}") from error
    if done.returncode != 0:
        raise RunnerError(f"metis: it ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return np.array(json.loads(done.stdout.splitlines()[-1]), dtype=np.int64)


def metis_parts(
    num_nodes: int,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    edge_weight: NDArray[np.float64],
    node_weight: NDArray[np.float64],
    num_parts: int,
) -> NDArray[np.int64]:
    """(num_nodes,) int64: the part of each node of an undirected graph; some parts may be empty.

    Args:
        num_nodes: in all.
        source, target: (K,) ends of each edge, in any direction, never the same.
        edge_weight: (K,) the cost of cutting it; parallel edges add up.
        node_weight: (num_nodes,) weights by which the parts are balanced.
        num_parts: how many parts.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS failed.
    """
    check_installed()
    if num_parts >= num_nodes:
        return np.arange(num_nodes, dtype=np.int64)
    keys = np.concatenate((source * num_nodes + target, target * num_nodes + source))
    pairs, inverse = np.unique(keys, return_inverse=True)
    weight = np.bincount(inverse, weights=np.concatenate((edge_weight, edge_weight)), minlength=len(pairs))
    edge_shares = np.ceil(weight / max(float(weight.max(initial=0.0)), 1e-300) * SHARES).astype(np.int64)
    even = max(float(node_weight.sum()), 1e-300) / num_parts
    # a node beyond an even share fills a part: METIS fails, aloud, where it would have to leave others empty
    node_shares = 1 + np.round(np.minimum(node_weight / even, 1.0) * (SHARES // num_parts)).astype(np.int64)
    offsets = np.searchsorted(pairs // num_nodes, np.arange(num_nodes + 1))
    return run_metis(num_parts, offsets, pairs % num_nodes, node_shares.tolist(), np.maximum(edge_shares, 1).tolist())
