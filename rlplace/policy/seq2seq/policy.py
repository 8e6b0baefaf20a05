"""`Seq2SeqPolicy`: the policy of Mirhoseini et al. 2017, trained for one problem."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.decode import decode_record
from rlplace.errors import FileProblem
from rlplace.policy.checkpoint import SCHEMA, load_checkpoint, save_checkpoint, set_parameters
from rlplace.policy.module import PolicyModule, seeded_weights
from rlplace.policy.placer.distribution import GroupCategorical
from rlplace.policy.seq2seq.config import Seq2SeqConfig
from rlplace.policy.seq2seq.inputs import Seq2SeqInputs
from rlplace.policy.seq2seq.network import Encoded, LstmState, Seq2SeqNetwork


@dataclass(frozen=True)
class Seq2SeqFile:
    """What `policy.json` says of the weights beside it."""

    schema: int
    kind: Literal["seq2seq"]
    num_groups: int
    num_devices: int
    types: tuple[str, ...]
    """Op types, in the order of their embeddings."""
    config: Seq2SeqConfig


class Seq2SeqPolicy(PolicyModule):
    """Devices for G groups, each drawn given the groups before it.

    The policy of Mirhoseini et al. 2017 (arXiv:1706.04972, section 3). Groups are read in their order, that of their
    first ops, by a bidirectional LSTM: a group is the embedding of its op types, the shapes of its outputs, and which
    groups it reads and is read by. A second LSTM with attention over what was read writes one device a step and is fed
    the last one. The softmax is over the D named devices, so the weights serve one problem.

    What differs from the paper:

    - the paper embeds an op; a group has many, so its type is the mean over its ops, and its outputs are those that
      leave it, shapes as logarithms;
    - attention does not enter the recurrence, so that all steps of known placements are one call of the LSTM, as in the
      program that the authors released later (TensorFlow's `hierarchical_controller.py`);
    - each step is also fed the encoding of the group that it places: an attention alone would first have to learn to
      count to G;
    - the encoder is bidirectional, as in that program;
    - a new policy finds every device as likely, whatever the seed.

    Attributes:
        kind: what its checkpoints say they are of.
        generator: draws the samples.
        logit_noise: spread of the noise on the logits that samples are drawn with, over the root mean square of a
            step's logits; log-probabilities know nothing of it. A learner may set it.
    """

    kind: Literal["seq2seq"] = "seq2seq"
    type_shares: Tensor
    output_shapes: Tensor
    adjacency: Tensor
    allowed: Tensor

    def __init__(self, inputs: Seq2SeqInputs, config: Seq2SeqConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(inputs.allowed, seed)
        self.config, self.types = config or Seq2SeqConfig(), inputs.types
        for name in ("type_shares", "output_shapes", "adjacency", "allowed"):
            self.register_buffer(name, torch.from_numpy(np.array(getattr(inputs, name))))
        with seeded_weights(seed):
            self.network = Seq2SeqNetwork(len(inputs.types), self.num_groups, self.num_devices, self.config)
        self.logit_noise = 0.0

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn step by step, all samples at once.

        Args:
            num_samples: placements to draw, B.
            rng: draws them; by default the policy's own generator, which goes on.
        """
        generator = self.drawing(rng)
        shape = (num_samples, self.num_groups, self.num_devices)
        uniform_BGD = torch.rand(shape, generator=generator, dtype=torch.float64)
        noise_BGD = None
        if self.logit_noise:
            noise_BGD = self.logit_noise * torch.randn(shape, generator=generator)
        # Gumbel-max: the likeliest device after this noise is one drawn from the softmax
        return self._write(num_samples, -(-uniform_BGD.log()).log(), noise_BGD)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest device of each group given those before it; the lower index where two are equal."""
        mode_1G = self._write(1, torch.zeros(1, self.num_groups, self.num_devices))
        return mode_1G.reshape(-1)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G), each given those before it, and entropies (B, G) in nats."""
        devices_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        encoded, state = self._begin(len(devices_BG))
        before_BG = torch.cat((torch.full_like(devices_BG[:, :1], self.network.begin), devices_BG[:, :-1]), dim=1)
        logits_BGD, _ = self.network.decode(encoded, before_BG, 0, state)
        distribution = GroupCategorical().proba_distribution(logits_BGD.masked_fill(~self.allowed, -torch.inf))
        return distribution.group_log_prob(devices_BG), distribution.group_entropy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the weights to `path` (`policy.safetensors`), what they belong to beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        about = Seq2SeqFile(SCHEMA, self.kind, self.num_groups, self.num_devices, self.types, self.config)
        save_checkpoint(path, dataclasses.asdict(about), dict(self.named_parameters()))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes the weights that `save` wrote for a problem of the same groups, devices and op types.

        Raises:
            FileProblem: a file is missing, malformed, of another kind, or of another problem.
            InvalidValue, UnknownName: a field of the description is missing or wrong.
        """
        about, tensors = load_checkpoint(path, self.kind)
        about_path = Path(path).with_suffix(".json")
        if decode_record(Seq2SeqFile, about, str(about_path)).types != self.types:
            raise FileProblem(about_path, "weights for a graph of other op types; those of seq2seq serve one problem.")
        set_parameters(self, tensors, path)

    def _begin(self, batch_size: int) -> tuple[Encoded, LstmState]:
        encoded = self.network.encode(self.type_shares, self.output_shapes, self.adjacency)
        return encoded, self.network.first_state(encoded, batch_size)

    @torch.no_grad()
    def _write(self, batch_size: int, gumbel_BGD: Tensor, noise_BGD: Tensor | None = None) -> NDArray[np.int32]:
        """(B, G) devices, step by step the one with the largest sum of logit and noise."""
        encoded, state = self._begin(batch_size)
        written = torch.empty(batch_size, self.num_groups, dtype=torch.int64)
        before_B1 = torch.full((batch_size, 1), self.network.begin)
        for group in range(self.num_groups):
            logits_B1D, state = self.network.decode(encoded, before_B1, group, state)
            logits_BD = logits_B1D[:, 0]
            if noise_BGD is not None:
                logits_BD = logits_BD + noise_BGD[:, group] * logits_BD.square().mean(dim=-1, keepdim=True).sqrt()
            logits_BD = logits_BD.masked_fill(~self.allowed[group], -torch.inf)
            written[:, group] = (logits_BD + gumbel_BGD[:, group]).argmax(dim=-1)
            before_B1 = written[:, group : group + 1]
        return written.numpy().astype(np.int32)
