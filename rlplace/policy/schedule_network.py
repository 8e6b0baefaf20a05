"""`ScheduleNetwork`: the weights of the policy `schedule`, none of which depends on a problem's groups or devices.

`Components`: groupings and weights of the list scheduler, each a guess at any problem. `group_features`: features of
each group besides the partial schedule. `problem_summary`: a problem in 22 numbers, for any size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from rlplace.env import graph_features
from rlplace.env.problem_features import path_lengths
from rlplace.env.sequential import DECISION_FEATURES, ESTIMATES, FEATURES, FIRST_WEIGHTS, GROUPINGS, Pair
from rlplace.errors import FileProblem, refuse_if
from rlplace.graphs import BACKWARD, UPDATE
from rlplace.measure import Problem
from rlplace.policy.base import SCHEMA, check_tensors, load_checkpoint, save_checkpoint, seeded_weights, set_all
from rlplace.policy.options import ScheduleConfig, Width
from rlplace.records import Whole, read_record, record

ALLOWED = DECISION_FEATURES.index("allowed")
RELATED = len(ESTIMATES)
"""Estimates of a placement as the ranker sees them, see `related`."""

GAIN = 10.0
"""The factor on the correction: the smaller the weights for an effect, the faster they learn it."""
TAIL = 2.0
"""Exponent of the tail of the first distribution: devices that the weights think little of stay possible."""
MARKS = 4
"""Numbers that tell equal devices apart."""


class ScheduleNetwork(nn.Module):
    """Four small networks over features that all problems have.

    - `gate`: which components (a grouping and weights of the list scheduler) suit a problem: from its summary the log
      of the step time that each leads to, up to a constant.
    - `ranker`: the simulated step time of a placement whose list schedule is known, as the log of the step time
      over the schedule's end: queues on links, launches and memory make the difference.
    - `scorer`: the value of a device for the group that is decided: the weights of a component, moved by `hyper` as the
      problem's summary suggests, times the features of the partial schedule, and a correction that is no linear one
      (which tells equal devices apart by random marks: Sato et al. 2021, arXiv:2002.03155).
    - `priority`: how much earlier than by the list order a group is decided; no learner here moves it from 0.

    All but the components are 0 at first: a new network is the list scheduler with known weights.

    Attributes:
        grouping, weights: (C,) int64 and (C, 9) float64, the components.
        scenarios: (S, C) float32, how the log step times of components missed the ranker's guess on S problems: which
            of them fail together. Empty where nothing is known.

    Args:
        components: C guesses.
        hidden: width of the networks.
        seed: of the first weights.
        num_scenarios: S.
    """

    grouping: Tensor
    weights: Tensor
    scenarios: Tensor
    summary_mean: Tensor
    summary_scale: Tensor

    def __init__(self, components: Components, hidden: int = 32, *, seed: int = 0, num_scenarios: int = 0) -> None:
        super().__init__()
        num_summary, num_components = len(SUMMARY), len(components)
        self.hidden = hidden
        with seeded_weights(seed):
            self.gate = _mlp(num_summary, hidden, num_components)
            self.ranker = _mlp(RELATED + num_summary, hidden, 1)
            self.hyper = _zero(nn.Linear(num_summary, len(FEATURES)))
            self.correction = _mlp(len(DECISION_FEATURES) + MARKS + len(GROUP_FEATURES) + num_summary, hidden, 1)
            self.priority = _mlp(len(GROUP_FEATURES) + num_summary, hidden, 1)
        self.register_buffer("grouping", torch.from_numpy(components.grouping.copy()))
        self.register_buffer("weights", torch.from_numpy(components.weights.copy()))
        self.register_buffer("scenarios", torch.zeros(num_scenarios, num_components))
        self.register_buffer("summary_mean", torch.zeros(num_summary))
        self.register_buffer("summary_scale", torch.ones(num_summary))

    @property
    def components(self) -> Components:
        """The C guesses."""
        return Components(self.grouping.numpy(), self.weights.numpy())

    def normalised(self, summary: Tensor) -> Tensor:
        """(..., P) summaries of problems, moved and scaled as those that the network was trained on."""
        return ((summary - self.summary_mean) / self.summary_scale).clamp(-4.0, 4.0)

    def component_scores(self, summary: Tensor) -> Tensor:
        """(..., C) expected log step times of the components for summaries (..., P), up to a constant."""
        scores: Tensor = self.gate(self.normalised(summary))
        return scores

    def log_times(self, estimates: Tensor, summary: Tensor) -> Tensor:
        """(...,) expected log step times of placements with `ESTIMATES` (..., 6), on problems of summaries (..., P)."""
        correction = self.ranker(torch.cat((related(estimates), self.normalised(summary)), dim=-1))
        return torch.squeeze(correction, -1) + estimates[..., 0].clamp(min=1e-12).log().float()

    def device_scores(
        self, features: Tensor, marks: Tensor, groups: Tensor, summary: Tensor, component: int, scale: Tensor
    ) -> Tensor:
        """(..., D) logits of devices; the same network for every device.

        Args:
            features: (..., D, F) of the partial schedule.
            marks: (D, 4) of the devices.
            groups: (..., 16) `GROUP_FEATURES` of the group that is decided.
            summary: (P,) of the problem.
            component: whose weights are the first guess.
            scale: the divisor of the weighted sum of features.
        """
        seen = self.normalised(summary)
        linear = heavy_tailed(self.margins(features, summary, component) / scale)
        context = torch.cat((groups, seen.expand(*groups.shape[:-1], -1)), dim=-1)
        context = context[..., None, :].expand(*features.shape[:-1], -1)
        squeezed = features.sign() * features.abs().log1p()
        marks = marks.expand(*features.shape[:-1], -1)
        return linear + GAIN * torch.squeeze(self.correction(torch.cat((squeezed, marks, context), dim=-1)), -1)

    def margins(self, features: Tensor, summary: Tensor, component: int) -> Tensor:
        """(..., D) by how much a component's weights, moved by `hyper`, think less of devices than of the best one.

        Args:
            features: (..., D, F) of the partial schedule.
            summary: (P,) of the problem.
            component: whose weights.
        """
        weights = self.weights[component].float() + self.hyper(self.normalised(summary))
        costs: Tensor = (features[..., : len(FEATURES)] * weights).sum(dim=-1)
        least = costs.masked_fill(features[..., ALLOWED] == 0, torch.inf).amin(dim=-1, keepdim=True)
        return (costs - least).clamp(min=0.0)

    def priorities(self, groups: Tensor, summary: Tensor) -> Tensor:
        """(G,) how much earlier than by the list order groups of features (G, 16) are decided, in shares of all."""
        seen = self.normalised(summary).expand(len(groups), -1)
        return torch.squeeze(self.priority(torch.cat((groups, seen), dim=-1)), -1)


def heavy_tailed(margins: Tensor) -> Tensor:
    """(...,) logits of margins (...,) in units of the scale: the best has 0, and far ones fall as a power."""
    return -TAIL * (margins / TAIL).log1p()


def related(estimates: Tensor) -> Tensor:
    """(..., 6) float32: `ESTIMATES` (..., 6), without units: over the end of the list schedule where they are seconds.

    Each but the number of copies is cut where more would make no difference.
    """
    shares = estimates[..., 1:4] / estimates[..., :1].clamp(min=1e-12)
    memory = estimates[..., 5:]
    parts = (
        shares[..., :1].clamp(max=4.0),
        shares[..., 1:2].clamp(max=4.0),
        (shares[..., 2:3] + 1e-3).log().clamp(max=4.0),
        estimates[..., 4:5].log1p() / 5.0,
        memory.clamp(max=3.0),
        (8.0 * (memory - 0.9)).sigmoid(),
    )
    return torch.cat(parts, dim=-1).float()


def _mlp(num_in: int, hidden: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, hidden), nn.Tanh(), _zero(nn.Linear(hidden, num_out)))


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True, eq=False)
class Components:
    """C groupings with weights.

    Attributes:
        grouping: (C,) int64 places in `GROUPINGS`.
        weights: (C, 9) float64, in the order of `FEATURES`.
    """

    grouping: NDArray[np.int64]
    weights: NDArray[np.float64]

    def __post_init__(self) -> None:
        refuse_if(
            self.weights.shape != (len(self.grouping), len(FEATURES)) or not len(self.grouping),
            "components",
            self.weights.shape,
            f"one at least, each a grouping and {len(FEATURES)} weights",
            where="policy schedule",
        )

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Components:
        """Those of names of groupings with weights."""
        return cls(
            np.array([GROUPINGS.index(name) for name, _ in pairs], dtype=np.int64),
            np.array([weights for _, weights in pairs], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.grouping)

    def pair(self, component: int) -> Pair:
        """The grouping's name and the weights of one."""
        return GROUPINGS[int(self.grouping[component])], tuple(self.weights[component].tolist())


STATIC = (
    "log_ops",
    "log_parameter_bytes",
    "log_output_bytes",
    "log_in_bytes",
    "log_out_bytes",
    "log_in_edges",
    "log_out_edges",
    "mean_position",
    "first_position",
    "path_before",
    "path_after",
    "criticality",
    "is_forward",
    "is_backward",
    "is_update",
)
"""Those of `graph_features` that are the same whichever way devices are numbered, and however many there are."""
GROUP_FEATURES = ("log_cost", *STATIC)
"""Names of the features; `log_cost` is of the mean cost over devices, in mean costs of a group."""


def group_features(problem: Problem) -> NDArray[np.float32]:
    """(G, 16) float32 `GROUP_FEATURES`; all but `log_cost` have mean 0 and variance 1 over the groups."""
    features = graph_features(problem)
    places = [features.names.index(name) for name in STATIC]
    log_cost = np.log1p(features.group_cost.mean(axis=1, keepdims=True))
    return np.concatenate((log_cost, features.node_features[:, places]), axis=1).astype(np.float32)


SUMMARY = (
    "log_devices",
    "device_speed_spread",
    "link_rate_spread",
    "shared_links",
    "blocking",
    "log_transfer_share",
    "log_latency_share",
    "log_launch_share",
    "log_memory_use",
    "log_parameter_share",
    "critical_path_share",
    "largest_op_share",
    "log_ops",
    "log_groups",
    "log_modules",
    "largest_module_share",
    "repetition",
    "unrolling",
    "fan_out",
    "backward_share",
    "update_share",
    "log_micro_batches",
)
"""Names of the numbers; all are without a unit, and the same whichever way devices are numbered."""
_LEAST = 1e-6


def problem_summary(problem: Problem) -> NDArray[np.float32]:
    """(22,) float32 `SUMMARY` of a problem."""
    graph, host = problem.graph, problem.host
    num_devices, num_ops = host.num_devices, max(graph.num_ops, 1)
    time_s = problem.costs.op_time_s.mean(axis=1)
    total_s = max(float(time_s.sum()), 1e-30)
    device_s = np.maximum(problem.costs.op_time_s.sum(axis=0), 1e-30)
    sent = np.unique(graph.input_tensors)
    sent = sent[~graph.is_source[graph.tensor_op[sent]]]
    away = ~np.eye(num_devices, dtype=np.bool_)
    rates, delays = problem.transfer_s_per_byte[away], problem.transfer_latency_s[away]
    rate, delay = (float(table.mean()) if table.size else 0.0 for table in (rates, delays))
    copied = rates[rates > 0.0]
    kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
    room = sum(max(device.memory_bytes - device.context_bytes, 1) for device in host.devices)
    whole_bytes = float(kept.sum() + graph.tensor_bytes[sent].sum())
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1]
    targets = np.unique(np.array(graph.targets), return_inverse=True)[1]
    module_s = np.bincount(modules, weights=time_s)
    label = modules * 3 + graph.phases
    resumed = 1 + int(np.count_nonzero(np.diff(label)))  # how often ops of another module or phase follow
    kinds = np.unique(np.stack((modules, graph.phases, targets, graph.output_bytes)), axis=1).shape[1]
    routes = [route for route in host.routes if route.links]
    uses = np.unique([link for route in routes for link in route.links], return_counts=True)[1]
    values = {
        "log_devices": np.log(num_devices),
        "device_speed_spread": float(np.log(device_s.max() / device_s.min())),
        "link_rate_spread": float(np.log(copied.max() / copied.min())) if copied.size else 0.0,
        "shared_links": float(uses.max() / len(routes)) if uses.size else 0.0,
        "blocking": float(np.mean([route.blocks_destination for route in routes])) if routes else 0.0,
        "log_transfer_share": _log(float(graph.tensor_bytes[sent].sum()) * rate / total_s),
        "log_latency_share": _log(len(sent) * delay / total_s),
        "log_launch_share": _log(num_ops * host.dispatch_s / total_s),
        "log_memory_use": _log(whole_bytes / room),
        "log_parameter_share": _log(float(kept.sum()) / max(whole_bytes, 1.0)),
        "critical_path_share": float(path_lengths(graph, time_s)[1].max(initial=0.0)) / total_s,
        "largest_op_share": float(time_s.max(initial=0.0)) / total_s,
        "log_ops": np.log(num_ops),
        "log_groups": np.log(max(problem.grouping.num_groups, 1)),
        "log_modules": np.log(max(len(module_s), 1)),
        "largest_module_share": float(module_s.max(initial=0.0)) / total_s,
        "repetition": 1.0 - kinds / num_ops,
        "unrolling": float(np.log(resumed / max(len(np.unique(label)), 1))),
        "fan_out": np.log(max(graph.num_edges, 1) / max(len(sent), 1)),
        "backward_share": float(time_s[graph.phases == BACKWARD].sum()) / total_s,
        "update_share": float(time_s[graph.phases == UPDATE].sum()) / total_s,
        "log_micro_batches": np.log(graph.num_micro_batches),
    }
    return np.array([values[name] for name in SUMMARY], dtype=np.float32)


def _log(value: float) -> float:
    return float(np.log(max(value, _LEAST)))


KIND: Literal["schedule"] = "schedule"
"""The kind of network that its checkpoints name."""


@record(frozen=True)
class ScheduleFile:
    """`policy.json`, the description of the weights beside it."""

    schema: int
    kind: Literal["schedule"]
    hidden: Width
    num_components: Annotated[Whole, Field(ge=1, le=1 << 20)]
    num_scenarios: Annotated[Whole, Field(ge=0, le=1 << 20)]
    groupings: tuple[str, ...] = GROUPINGS
    """Names of groupings, ..."""
    features: tuple[str, ...] = DECISION_FEATURES
    """... of the features of a device, ..."""
    group_features: tuple[str, ...] = GROUP_FEATURES
    """... of a group, ..."""
    summary: tuple[str, ...] = SUMMARY
    """... of a problem ..."""
    estimates: tuple[str, ...] = ESTIMATES
    """... and of a placement."""
    about: str = ""
    """How it was trained."""


def new_network(config: ScheduleConfig | None = None, *, seed: int = 0) -> ScheduleNetwork:
    """A network that knows nothing but the weights that searches begin with."""
    config = config or ScheduleConfig()
    return ScheduleNetwork(Components.of(FIRST_WEIGHTS), config.hidden, seed=seed)


def save_network(network: ScheduleNetwork, path: str | os.PathLike[str], about: str = "") -> None:
    """Writes a network to `path` (`.safetensors`), and its description beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    sizes = (network.hidden, len(network.grouping), len(network.scenarios))
    save_checkpoint(path, asdict(ScheduleFile(SCHEMA, KIND, *sizes, about=about)), network.state_dict())


def load_network(path: str | os.PathLike[str]) -> ScheduleNetwork:
    """The network that `save_network`, or a policy's `save`, wrote to `path`.

    Raises:
        FileProblem: a file is missing, malformed, or of a version with other features.
        InvalidValue, UnknownName: a field of the description is missing or wrong.
    """
    path = Path(path)
    about, tensors = load_checkpoint(path, KIND)
    described = read_record(ScheduleFile, about, str(path.with_suffix(".json")))
    ours = ScheduleFile(SCHEMA, KIND, 1, 1, 0)
    for name in ("groupings", "features", "group_features", "summary", "estimates"):
        if getattr(described, name) != getattr(ours, name):
            raise FileProblem(path, f"its {name} are not those of this version: train it again.")
    hidden, count = described.hidden, described.num_components
    expected = {
        "grouping": (torch.int64, (count,)),
        "gate.0.weight": (torch.float32, (hidden, len(SUMMARY))),
        "gate.2.weight": (torch.float32, (count, hidden)),
        "scenarios": (torch.float32, (described.num_scenarios, count)),
    }
    every = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_tensors(tensors, every | expected, path, "weights of another network than its .json says")
    grouping = tensors["grouping"]
    if not bool(((grouping >= 0) & (grouping < len(GROUPINGS))).all()):
        raise FileProblem(path, f"grouping holds numbers outside 0..{len(GROUPINGS) - 1}.")
    components = Components(np.zeros(count, dtype=np.int64), np.zeros((count, len(FEATURES))))
    network = ScheduleNetwork(components, hidden, num_scenarios=described.num_scenarios)
    set_all(network, tensors, path)
    return network
