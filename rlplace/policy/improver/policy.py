"""`ImproverPolicy`: proposes placements by passing over a known one and moving a group here and there."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.env.problem_features import problem_features
from rlplace.measure.problem import Problem
from rlplace.policy.checkpoint import kept
from rlplace.policy.improver.config import ImproverConfig
from rlplace.policy.improver.network import ImproverNetwork
from rlplace.policy.improver.state import PassArrays, PassState, replay
from rlplace.policy.module import PolicyModule, seeded_weights
from rlplace.policy.network_file import load_network, save_network
from rlplace.policy.placer.distribution import GroupCategorical
from rlplace.policy.problem_tensors import ProblemTensors

MOST_KEEP = 30.0
"""Largest log-odds by which a group may be kept where it is, or pushed away."""
MOST_MOVED = 0.25
"""Share of the groups that have a choice which a pass moves at most, so that the likeliest is to stay."""
BISECTIONS = 30


class ImproverPolicy(PolicyModule):
    """One group after the other, each given the start placement and what was moved before it.

    After Placeto (Addanki et al. 2019, arXiv:1906.08879): an episode is a pass over the groups; a step decides one
    group's device, and the network sees the whole placement as it is just then. The start is a state of the policy, the
    best placement that its learner knows (`start_from`), so a pass is a proposal around the incumbent; given the start,
    a placement has one log-probability.

    What differs: Placeto's network passes messages anew in every step, ours encodes the graph once and sees of the
    placement what a group's neighbours and devices add up to (`STATE_FEATURES`); rewards come at the end of a pass, not
    after each step; and a bias towards staying, `keep`, sets how many groups a pass moves (`set_flips`): a policy that
    moves every group a little at random never gets below where it started.

    Permuting the devices of the problem and of the start permutes the answer.

    Attributes:
        kind: what its files say they are of.
        network: the weights, which several policies may share.
        problem: the features of what is placed.
        start: (G,) int64, the placement that a pass begins with.
        moves: how many groups a pass moves, about.
        keep: log-odds by which every group is kept where it is, beside what the network says.
        generator: draws the samples.
    """

    kind: Literal["improver"] = "improver"
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
        """A policy for `problem` that starts with all groups on the device that is fastest for them together.

        Args:
            problem: what is placed.
            config: the size of the network, and how many groups a pass moves at first.
            seed: of its weights and of the samples.
            network: to be shared with another policy of the same options; a new one by default.
        """
        super().__init__(problem.group_allowed, seed)
        self.config = config or ImproverConfig()
        features = problem_features(problem)
        self.problem, self._arrays = ProblemTensors.of(features), PassArrays.of(features.arrays)
        if network is None:
            with seeded_weights(seed):
                network = ImproverNetwork(self.config)
        self.network = network
        fastest = int(features.arrays.cost_s.sum(axis=0).argmin())
        start_G = problem.nearest_groups(np.full(features.num_groups, fastest))
        self.register_buffer("start", torch.from_numpy(start_G.astype(np.int64)))
        self.register_buffer("keep", torch.zeros(()))
        self.register_buffer("moves", torch.zeros(()))
        self.set_flips(self.config.moves)

    def start_from(self, group_devices: NDArray[np.integer]) -> None:
        """Passes begin from the placement (G,) from now on, and move as many groups as before."""
        self.start.copy_(torch.from_numpy(np.asarray(group_devices, dtype=np.int64)))
        self.set_flips(float(self.moves))

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, all drawn in one pass; by `rng` or by the policy's own generator."""
        generator = self.drawing(rng)
        shape = (self.num_groups, num_samples, self.num_devices)
        uniform_GBD = torch.rand(shape, generator=generator)
        # Gumbel-max: the likeliest device after this noise is one drawn from the softmax
        return self._pass(-(-uniform_GBD.log()).log())

    def mode(self) -> NDArray[np.int32]:
        """(G,) the placement that passes begin with: the best that is known."""
        return self.start.numpy().astype(np.int32)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of devices (B, G), each given those decided before it, and entropies (B, G)."""
        devices_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        log_probs_BGD = self._log_probs(self._scores(group_devices), slice(None))
        distribution = GroupCategorical().proba_distribution(log_probs_BGD)
        return distribution.group_log_prob(devices_BG), distribution.group_entropy()

    def set_flips(self, flips: float) -> None:
        """Sets `keep` so that a pass moves about `flips` groups, now and whenever it starts elsewhere.

        It counts what is moved of a placement that stays as it is until then, so that one look at it will do.
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the network and the start to `path` (`policy.safetensors`), its options beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        save_network(path, self.kind, self.config, self)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes over the network that a policy of this or of another problem saved, and its start where it fits.

        Raises:
            FileProblem: a file is missing, malformed, or of another policy.
            InvalidValue: the options there are not those of this policy.
        """
        tensors = load_network(path, self.kind, self.config, self)
        for name in ("keep", "moves"):
            getattr(self, name).copy_(kept(tensors, name, getattr(self, name), path))
        if "start" not in tensors or tensors["start"].shape != self.start.shape:
            return
        start = kept(tensors, "start", self.start, path)
        fits = bool(((start >= 0) & (start < self.num_devices)).all())
        if fits and bool(self.problem.allowed.gather(1, start[:, None]).all()):
            self.start.copy_(start)

    def _scores(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B, G, D) what the network says in each step of the passes that end at placements (B, G)."""
        state_BGDS = torch.from_numpy(replay(self._arrays, self.start.numpy(), group_devices))
        scores_BGD: Tensor = self.network(self.network.encode(self.problem), state_BGDS)
        return scores_BGD

    def _log_probs(self, scores_BGD: Tensor, groups: int | slice) -> Tensor:
        """(..., D) log-probabilities of some groups, given what the network says; minus infinity where barred."""
        allowed_GD, stays_GD = self.problem.allowed[groups], self._stays()[groups]
        logits_BGD = (scores_BGD + self.keep * stays_GD).masked_fill(~allowed_GD, -torch.inf)
        chance_G1, num_allowed_G1 = self._chances()[groups][..., None], allowed_GD.sum(dim=-1, keepdim=True)
        random_GD = torch.where(stays_GD > 0, 1 - chance_G1, chance_G1 / (num_allowed_G1 - 1).clamp(min=1))
        explore = self.config.explore
        chosen_BGD = torch.softmax(logits_BGD, dim=-1)
        mixed_BGD = (1 - explore) * chosen_BGD + explore * random_GD
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
