"""`ImproverPolicy`: proposes placements by passing over a known one and moving some of its groups.

`ImproverNetwork`: logits of a group on every device, from the graph and the placement so far. `PassState`: a batch of
placements in the middle of a pass, with the features that the network sees, computed by kernels.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.env.problem_features import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    SUMMARY,
    GroupArrays,
    problem_features,
)
from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel
from rlplace.measure import Problem
from rlplace.policy.base import (
    PolicyModule,
    ProblemTensors,
    check_tensors,
    chosen_and_entropy,
    gumbel,
    seeded_weights,
    set_tensors,
)
from rlplace.policy.gnn import GraphEncoder
from rlplace.policy.options import ImproverConfig

MOST_KEEP = 30.0
"""Largest log-odds by which a group may be kept where it is, or pushed away."""
MOST_MOVED = 0.25
"""Share of the groups that have a choice which a pass moves at most, so that the likeliest is to stay."""
BISECTIONS = 30


class ImproverPolicy(PolicyModule):
    """Places one group after the other, each conditional on the start placement and the earlier moves.

    After Placeto (Addanki et al. 2019, arXiv:1906.08879): an episode is a pass over the groups; a step decides one
    group's device, and the network sees the whole current placement. The start is a state of the policy: the best
    placement that its learner knows (`start_from`). So a pass proposes a change of this placement. Given the start, a
    placement has one log-probability.

    Differences: Placeto's network passes messages again in every step. Ours encodes the graph once, and its inputs from
        the placement are sums over a group's neighbours and devices (`STATE_FEATURES`). Rewards come at the end of a
        pass, not after each step. A bias towards the current device, `keep`, sets how many groups a pass moves
        (`set_flips`). Without it, a policy that moves many groups at random would not improve on its start.

    A permutation of the devices of the problem and of the start permutes the answer.

    Attributes:
        network: the weights, which several policies may share.
        problem: the features of the problem to place.
        start: (G,) int64, the placement that a pass begins with.
        moves: approximate number of groups that a pass moves.
        keep: log-odds for the current device of every group, added to the network's logits.
    """

    kind = "improver"
    config: ImproverConfig
    start: Tensor
    keep: Tensor
    moves: Tensor

    def __init__(
        self,
        problem: Problem,
        config: ImproverConfig | None = None,
        *,
        seed: int = 0,
        network: ImproverNetwork | None = None,
    ) -> None:
        """A policy for `problem` that starts with all groups on the best single device.

        Args:
            problem: the problem to place.
            config: the size of the network, and the initial number of groups that a pass moves.
            seed: of its weights and of the samples.
            network: shared with another policy of the same options; a new network by default.
        """
        super().__init__(problem.group_allowed, seed)
        self.config = config or ImproverConfig()
        features = problem_features(problem)
        self.problem, self._arrays = ProblemTensors.of(features), PassArrays.of(features.arrays)
        with seeded_weights(seed):
            self.network = network or ImproverNetwork(self.config)
        start_G = problem.nearest_groups(np.full(self.num_groups, features.arrays.cost_s.sum(axis=0).argmin()))
        self.register_buffer("start", torch.from_numpy(start_G.astype(np.int64)))
        self.register_buffer("keep", torch.zeros(()))
        self.register_buffer("moves", torch.zeros(()))
        self.set_flips(self.config.moves)

    def start_from(self, group_devices: NDArray[np.integer]) -> None:
        """Sets the start of later passes to the placement (G,); they move as many groups as before."""
        self.start.copy_(torch.from_numpy(np.asarray(group_devices, dtype=np.int64)))
        self.set_flips(float(self.moves))

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, all drawn in one pass; by `rng` or by the policy's own generator."""
        return self._pass(gumbel((self.num_groups, num_samples, self.num_devices), self.drawing(rng), torch.float32))

    def mode(self) -> NDArray[np.int32]:
        """(G,) the start of passes: the best known placement."""
        return self.start.numpy().astype(np.int32)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of devices (B, G), each given those decided before it, and entropies (B, G)."""
        return chosen_and_entropy(self._log_probs(self._scores(group_devices), slice(None)), group_devices)

    def set_flips(self, flips: float) -> None:
        """Sets `keep` so that a pass moves about `flips` groups, for this start and later ones.

        It counts moves as if the placement did not change during a pass, so that one evaluation is enough.
        """
        self.moves.fill_(flips)
        with torch.no_grad():
            scores_GD = self._scores(self.start.numpy()[None])[0].double()
            scores_GD = scores_GD.masked_fill(~self.problem.allowed, -torch.inf)
            stays_GD, moves = self._stays().double(), float(self._chances().sum())
            low, high = -MOST_KEEP, MOST_KEEP
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                stay_G = (torch.softmax(scores_GD + middle * stays_GD, dim=-1) * stays_GD).sum(dim=-1)
                low, high = (middle, high) if (1 - stay_G).sum() > moves else (low, middle)
            self.keep.fill_(high)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads the network of a saved policy of this or another problem, and its start if it fits.

        Raises:
            FileProblem: a file is missing, malformed, or of another policy.
            InvalidValue: the saved options differ from those of this policy.
        """
        tensors = self.load_weights(path)
        set_tensors({"keep": self.keep, "moves": self.moves}, tensors, path)
        start = tensors.get("start")
        if start is None or start.shape != self.start.shape:
            return
        check_tensors(tensors, {"start": (torch.int64, self.start.shape)}, path)
        if bool(((start >= 0) & (start < self.num_devices)).all()) and bool(
            self.problem.allowed.gather(1, start[:, None]).all()
        ):
            self.start.copy_(start)

    def _scores(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B, G, D) the network's logits in each step of the passes that end at placements (B, G)."""
        state_BGDS = torch.from_numpy(replay(self._arrays, self.start.numpy(), group_devices))
        scores_BGD: Tensor = self.network(self.network.encode(self.problem), state_BGDS)
        return scores_BGD

    def _log_probs(self, scores_BGD: Tensor, groups: int | slice) -> Tensor:
        """(..., D) log-probabilities of some groups, given the network's logits; minus infinity where barred."""
        allowed_GD, stays_GD = self.problem.allowed[groups], self._stays()[groups]
        logits_BGD = (scores_BGD + self.keep * stays_GD).masked_fill(~allowed_GD, -torch.inf)
        chance_G1, num_allowed_G1 = self._chances()[groups][..., None], allowed_GD.sum(dim=-1, keepdim=True)
        random_GD = torch.where(stays_GD > 0, 1 - chance_G1, chance_G1 / (num_allowed_G1 - 1).clamp(min=1))
        explore = self.config.explore
        mixed_BGD = (1 - explore) * torch.softmax(logits_BGD, dim=-1) + explore * random_GD
        # the logarithm of 0 would make gradients NaN, masked or not
        return mixed_BGD.masked_fill(~allowed_GD, 1.0).log().masked_fill(~allowed_GD, -torch.inf)

    def _chances(self) -> Tensor:
        """(G,) float32, how likely each group is to be moved at random."""
        has_choice_G = (self.problem.allowed.sum(dim=1) > 1).float()
        return has_choice_G * (self.moves / has_choice_G.sum().clamp(min=1)).clamp(max=MOST_MOVED)

    def _stays(self) -> Tensor:
        """(G, D) float32, 1 where a group is at the start of a pass."""
        return torch.nn.functional.one_hot(self.start, self.num_devices).float()

    @torch.no_grad()
    def _pass(self, noise_GBD: Tensor) -> NDArray[np.int32]:
        """(B, G) where passes end that take the device of the largest logit with its noise (G, B, D)."""
        state = PassState(self._arrays, self.start.numpy(), noise_GBD.shape[1])
        pairs_GDH = self.network.encode(self.problem)
        for group in self._arrays.order.tolist():
            scores_BD = self.network(pairs_GDH[group], torch.from_numpy(state.look(group)))
            devices_B = (self._log_probs(scores_BD, group) + noise_GBD[group]).argmax(dim=-1)
            state.move(group, devices_B.numpy())
        return state.placed_BG


class ImproverNetwork(nn.Module):
    """A score of a group on a device; its weights know nothing of how many there are of either.

    The graph is encoded once: `encode` gives the part that depends on the problem alone. A step of a pass then adds
    features of the placement so far, `STATE_FEATURES`, and takes one hidden layer to a score: small enough for a step
    of each of 256 groups.
    """

    def __init__(self, config: ImproverConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.groups = GraphEncoder(len(NODE_FEATURES), len(EDGE_FEATURES), hidden, config.num_layers)
        self.of_group = nn.Linear(hidden, hidden)
        self.of_device = nn.Linear(len(DEVICE_FEATURES) + len(SUMMARY), hidden, bias=False)
        self.of_pair = nn.Linear(len(PAIR_FEATURES), hidden, bias=False)
        self.of_state = nn.Linear(len(STATE_FEATURES), hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def encode(self, problem: ProblemTensors) -> Tensor:
        """(G, D, H): features of a group and a device that do not depend on the placement."""
        h_GH = self.groups(problem.nodes, problem.edges, problem.edge_source, problem.edge_target)
        pairs_GDH: Tensor = self.of_group(h_GH)[:, None] + self.of_device(problem.devices) + self.of_pair(problem.pairs)
        return pairs_GDH

    def forward(self, pairs_GDH: Tensor, state_GDS: Tensor) -> Tensor:
        """(..., D) scores, of `encode` for some groups (..., D, H) and their state features (..., D, S)."""
        return torch.squeeze(self.score(torch.relu(pairs_GDH + self.of_state(state_GDS))), -1)


STATE_FEATURES = ("stays", "load", "load_above", "cut", "cut_in", "cut_out", "reads", "readers", "fullness", "follows")
"""Features of moving a group to a device, with all others where they are at that time:

- `stays`: 1 where the group is now;
- `load`: time of all that would be there, over an even share of the step;
- `load_above`: that time above the least of any device;
- `cut`, `cut_in`, `cut_out`: seconds that tensors would take between it and its neighbours, in all, from those that it
  reads, and to those that read it, above the least of any device;
- `reads`, `readers`: the shares of the bytes that it reads, and that are read of it, that are there;
- `fullness`: bytes that would be held over room;
- `follows`: 1 where the group decided just before is.

Seconds are in mean costs of a group, as log(1 + x).
"""
Features = NDArray[np.float32]


class PassArrays(NamedTuple):
    """A problem as the kernels take it; times in mean costs of a group."""

    order: Longs
    cost: Floats
    share: float
    held: Floats
    latency: Floats
    per_byte: Floats
    occupies: Bools
    allowed: Bools
    offsets: Ints
    joined: Ints
    joined_bytes: Floats
    is_in: Bools

    @classmethod
    def of(cls, arrays: GroupArrays) -> PassArrays:
        """Those of the groups in `arrays`."""
        offsets, joined, joined_bytes, is_in = arrays.joined()
        return cls(
            order=arrays.order,
            cost=arrays.cost_s / arrays.unit_s,
            share=arrays.share_s / arrays.unit_s,
            held=arrays.held_bytes[:, None] / arrays.room_bytes[None, :],
            latency=arrays.latency_s / arrays.unit_s,
            per_byte=arrays.s_per_byte / arrays.unit_s,
            occupies=np.ascontiguousarray(arrays.occupies),
            allowed=np.array(arrays.allowed),
            offsets=offsets,
            joined=joined,
            joined_bytes=joined_bytes,
            is_in=is_in,
        )


class PassState:
    """B placements in the middle of a pass: groups before the pointer are decided, the others are where they were."""

    def __init__(self, arrays: PassArrays, start_G: NDArray[np.integer], batch_size: int) -> None:
        num_devices = arrays.cost.shape[1]
        self._arrays = arrays
        self.placed_BG = np.repeat(np.asarray(start_G, dtype=np.int32)[None], batch_size, axis=0)
        load_BD, used_BD = np.zeros((2, batch_size, num_devices))
        self._state = self.placed_BG, load_BD, used_BD, np.full(batch_size, -1, dtype=np.int64)
        self._features_BDS = np.zeros((batch_size, num_devices, len(STATE_FEATURES)), dtype=np.float32)
        _fill(arrays, self.placed_BG, load_BD, used_BD)

    def look(self, group: int) -> Features:
        """(B, D, S) float32 `STATE_FEATURES` of a group on every device; it is the pass's own array."""
        _look(self._arrays, group, self._features_BDS, *self._state)
        return self._features_BDS

    def move(self, group: int, devices_B: NDArray[np.integer]) -> None:
        """Puts the group on a device in each placement."""
        _move_all(self._arrays, group, np.ascontiguousarray(devices_B, dtype=np.int32), *self._state)


def replay(arrays: PassArrays, start_G: NDArray[np.integer], placed_BG: NDArray[np.integer]) -> Features:
    """(B, G, D, S) float32: the features of each group in a pass from `start_G` that ends at `placed_BG`."""
    state = PassState(arrays, start_G, len(placed_BG))
    features_BGDS = np.zeros((len(placed_BG), *arrays.cost.shape, len(STATE_FEATURES)), dtype=np.float32)
    for group in arrays.order.tolist():
        features_BGDS[:, group] = state.look(group)
        state.move(group, placed_BG[:, group])
    return features_BGDS


@kernel
def _fill(a: PassArrays, placed_BG: Ints, load_BD: Floats, used_BD: Floats) -> None:
    for row in range(placed_BG.shape[0]):
        for group in range(placed_BG.shape[1]):
            _add(a, 1.0, group, placed_BG[row, group], load_BD[row], used_BD[row])


@kernel
def _move_all(
    a: PassArrays, group: int, devices_B: Ints, placed_BG: Ints, load_BD: Floats, used_BD: Floats, latest_B: Longs
) -> None:
    for row in range(len(devices_B)):
        _add(a, -1.0, group, placed_BG[row, group], load_BD[row], used_BD[row])
        _add(a, 1.0, group, devices_B[row], load_BD[row], used_BD[row])
        placed_BG[row, group] = devices_B[row]
        latest_B[row] = devices_B[row]


@inlined
def _add(a: PassArrays, sign: float, group: int, device: int, load: Floats, used: Floats) -> None:
    used[device] += sign * a.held[group, device]
    for other in range(len(load)):
        if a.occupies[device, other]:
            load[other] += sign * a.cost[group, device]


@kernel
def _look(
    a: PassArrays,
    group: int,
    features_BDS: Features,
    placed_BG: Ints,
    load_BD: Floats,
    used_BD: Floats,
    latest_B: Longs,
) -> None:
    scratch = np.empty((5, a.cost.shape[1]))
    cut_in, cut_out, reads, readers, busy = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    for row in range(len(placed_BG)):
        features_DS, placed, latest = features_BDS[row], placed_BG[row], latest_B[row]
        load, used = load_BD[row], used_BD[row]
        # what the group reads from, and is read by, on each device; seconds of its transfers if it were on each
        num_devices, here = len(load), placed[group]
        scratch[:] = 0.0
        in_bytes, out_bytes = 0.0, 0.0
        for edge in range(a.offsets[group], a.offsets[group + 1]):
            home, size = placed[a.joined[edge]], a.joined_bytes[edge]
            if a.is_in[edge]:
                reads[home] += size
                in_bytes += size
            else:
                readers[home] += size
                out_bytes += size
            for d in range(num_devices):
                if d != home and a.is_in[edge]:
                    cut_in[d] += a.latency[home, d] + size * a.per_byte[home, d]
                elif d != home:
                    cut_out[d] += a.latency[d, home] + size * a.per_byte[d, home]
        # how busy each device would be, and the least over those where the group may be
        least_load, least_in, least_out, least_cut = np.inf, np.inf, np.inf, np.inf
        for d in range(num_devices):
            there = 0.0
            for other in range(num_devices):
                if a.occupies[d, other]:
                    without = load[other] - a.cost[group, here] if a.occupies[here, other] else load[other]
                    there = max(there, without)
            busy[d] = there + a.cost[group, d]
            if a.allowed[group, d]:
                least_load = min(least_load, busy[d])
                least_in, least_out = min(least_in, cut_in[d]), min(least_out, cut_out[d])
                least_cut = min(least_cut, cut_in[d] + cut_out[d])
        for d in range(num_devices):
            features_DS[d, 0] = 1.0 if d == here else 0.0
            features_DS[d, 1] = busy[d] / a.share
            features_DS[d, 2] = math.log1p(busy[d] - least_load if a.allowed[group, d] else 0.0)
            features_DS[d, 3] = math.log1p(max(cut_in[d] + cut_out[d] - least_cut, 0.0))
            features_DS[d, 4] = math.log1p(max(cut_in[d] - least_in, 0.0))
            features_DS[d, 5] = math.log1p(max(cut_out[d] - least_out, 0.0))
            features_DS[d, 6] = reads[d] / in_bytes if in_bytes > 0.0 else 0.0
            features_DS[d, 7] = readers[d] / out_bytes if out_bytes > 0.0 else 0.0
            features_DS[d, 8] = used[d] + (a.held[group, d] if d != here else 0.0)
            features_DS[d, 9] = 1.0 if d == latest else 0.0
