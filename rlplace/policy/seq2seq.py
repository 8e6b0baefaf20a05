"""`Seq2SeqPolicy`: the policy of Mirhoseini et al. 2017, a sequence-to-sequence network with attention.

`seq2seq_inputs`: the features of a problem that it reads, group by group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.measure import Problem
from rlplace.policy.base import PolicyModule, chosen_and_entropy, gumbel, seeded_weights
from rlplace.policy.options import Seq2SeqConfig


class Seq2SeqPolicy(PolicyModule):
    """Places G groups, each conditional on the groups before it.

    The policy of Mirhoseini et al. 2017 (arXiv:1706.04972, section 3). A bidirectional LSTM reads the groups in the
    order of their first ops. The input for a group is the embedding of its op types, the shapes of its outputs, and its
    adjacency. A second LSTM with attention over the encoded groups outputs one device per step, and gets the last
    device as input. The softmax is over the D named devices, so the weights are for one problem.

    Differences from the paper:

    - the paper embeds an op. A group has many ops, so its type is the mean over its ops. Its outputs are those that
      other groups read, with shapes as logarithms;
    - attention is not an input of the recurrence, so that all steps of known placements are one call of the LSTM, as in
      the program that the authors released later (TensorFlow's `hierarchical_controller.py`);
    - each step also gets the encoding of the group that it places: with attention alone, the network would first have
      to learn to count to G;
    - the encoder is bidirectional, as in that program;
    - without training, every device is equally likely, for any seed.

    Attributes:
        kind: of its checkpoints.
        generator: draws the samples.
        groups: the three parts of `Seq2SeqInputs` that the network reads.
        allowed: (G, D) bool, devices where each group may be.
        logit_noise: standard deviation of the noise on the logits of samples, divided by the root mean square of a
            step's logits; log-probabilities ignore it. A learner may set it.
    """

    kind = "seq2seq"
    config: Seq2SeqConfig

    def __init__(self, inputs: Seq2SeqInputs, config: Seq2SeqConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(inputs.allowed, seed)
        self.config, self.suits = config or Seq2SeqConfig(), {"types": inputs.types}
        self.groups = tuple(map(torch.from_numpy, (inputs.type_shares, inputs.output_shapes, inputs.adjacency)))
        self.allowed = torch.from_numpy(np.array(inputs.allowed))
        with seeded_weights(seed):
            self.network = Seq2SeqNetwork(len(inputs.types), self.num_groups, self.num_devices, self.config)
        self.logit_noise = 0.0

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, sampled step by step, all samples in parallel.

        Args:
            num_samples: placements to draw, B.
            rng: the random generator; by default the policy's own.
        """
        generator, shape = self.drawing(rng), (num_samples, self.num_groups, self.num_devices)
        gumbel_BGD = gumbel(shape, generator)
        noise_BGD = self.logit_noise * torch.randn(shape, generator=generator) if self.logit_noise else None
        return self._write(num_samples, gumbel_BGD, noise_BGD)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest device of each group, given the groups before it; the lower index for ties."""
        return self._write(1, torch.zeros(1, self.num_groups, self.num_devices)).reshape(-1)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G), each conditional on the groups before it, and entropies (B,
        G) in nats."""
        devices_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        encoded, state = self.network.encode(len(devices_BG), *self.groups)
        before_BG = torch.cat((torch.full_like(devices_BG[:, :1], self.network.begin), devices_BG[:, :-1]), dim=1)
        logits_BGD = self.network.decode(encoded, before_BG, 0, state)[0]
        return chosen_and_entropy(logits_BGD.masked_fill(~self.allowed, -torch.inf), group_devices)

    @torch.no_grad()
    def _write(self, batch_size: int, gumbel_BGD: Tensor, noise_BGD: Tensor | None = None) -> NDArray[np.int32]:
        """(B, G) devices, step by step the one with the largest sum of logit and noise."""
        encoded, state = self.network.encode(batch_size, *self.groups)
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


LstmState = tuple[Tensor, Tensor]
"""Hidden and cell state, each (1, B, H)."""


@dataclass(frozen=True)
class Encoded:
    """A graph as the decoder sees it.

    Attributes:
        states: (G, H) encodings of groups, both directions of the encoder.
        keys: (G, A) the same, ready for attention.
    """

    states: Tensor
    keys: Tensor


class Seq2SeqNetwork(nn.Module):
    """Logits of devices for G groups, one after the other, each given the device of the one before.

    Its weights belong to the number of groups and devices and to the op types of one graph.

    Args:
        num_types: op types, V.
        num_groups: groups, G.
        num_devices: devices, D.
        config: sizes.
    """

    def __init__(self, num_types: int, num_groups: int, num_devices: int, config: Seq2SeqConfig) -> None:
        super().__init__()
        hidden, self.config = config.hidden, config
        self.type_embedding = nn.Linear(num_types, config.type_embedding, bias=False)
        width = config.type_embedding + SHAPE_WIDTH + 2 * num_groups
        self.encoder = nn.LSTM(width, hidden // 2, bidirectional=True, batch_first=True)
        self.begin = num_devices
        """The word that the decoder is fed before the first device."""
        self.device_embedding = nn.Embedding(num_devices + 1, config.device_embedding)
        self.decoder = nn.LSTM(config.device_embedding + hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, config.attention, bias=False)
        self.key = nn.Linear(hidden, config.attention)
        self.score = nn.Linear(config.attention, 1, bias=False)
        self.device_net = nn.Linear(2 * hidden, num_devices)
        nn.init.zeros_(self.device_net.weight)
        nn.init.zeros_(self.device_net.bias)

    def encode(
        self, batch_size: int, type_shares_GV: Tensor, output_shapes_GS: Tensor, adjacency_GA: Tensor
    ) -> tuple[Encoded, LstmState]:
        """The graph, encoded once for all placements of a batch, and the state in which the decoder begins."""
        embedded_GE = torch.cat((self.type_embedding(type_shares_GV), output_shapes_GS, adjacency_GA), dim=-1)
        states_1GH, last = self.encoder(embedded_GE[None])
        # both directions, side by side
        hidden, cell = (state.reshape(1, 1, -1).expand(1, batch_size, -1).contiguous() for state in last)
        return Encoded(states_1GH[0], self.key(states_1GH[0])), (hidden, cell)

    def decode(self, encoded: Encoded, before_BL: Tensor, first: int, state: LstmState) -> tuple[Tensor, LstmState]:
        """Logits (B, L, D) of the L groups from `first` on, and the state after them.

        Args:
            encoded: the graph.
            before_BL: (B, L) int64, device of the group before each of them; `begin` before the first group of all.
            first: index of the first of these groups.
            state: the decoder's, after the groups before.
        """
        batch_size, length = before_BL.shape
        aligned_BLH = encoded.states[first : first + length].expand(batch_size, -1, -1)
        read_BLI = torch.cat((self.device_embedding(before_BL), aligned_BLH), dim=-1)
        states_BLH, state = self.decoder(read_BLI, state)
        # additive attention (Bahdanau et al. 2015, appendix A.1.2)
        scores_BLG = self.score(torch.tanh(self.query(states_BLH)[:, :, None] + encoded.keys))[..., 0]
        context_BLH = torch.softmax(scores_BLG, dim=-1) @ encoded.states
        u_BLD = self.device_net(torch.cat((states_BLH, context_BLH), dim=-1))
        # bounded logits (Bello et al. 2016, section 4 and appendix A.2)
        return self.config.tanh_constant * torch.tanh(u_BLD / self.config.temperature), state


MOST_OUTPUTS, MOST_DIMS = 5, 5
"""Outputs of a group, and sizes of each, that are read."""
SHAPE_WIDTH = MOST_OUTPUTS * MOST_DIMS


@dataclass(frozen=True, eq=False)
class Seq2SeqInputs:
    """The three parts of a group's embedding in Mirhoseini et al. 2017 (section 3.2), before the learned part.

    Attributes:
        type_shares: (G, V) float32, share of each op type among the group's ops; a row sums to 1.
        output_shapes: (G, 25) float32, shapes of up to 5 outputs, each of up to 5 sizes, padded with zeros: as
            logarithms, the largest of the graph at 1. An output is a tensor that another group reads or that the step
            returns; those of most bytes come first.
        adjacency: (G, 2G) float32, 1 for each group whose tensors it reads, then for each that reads its tensors.
        allowed: (G, D) bool, devices where each group may be.
        types: V op types, in the order of the alphabet.
    """

    type_shares: NDArray[np.float32]
    output_shapes: NDArray[np.float32]
    adjacency: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    types: tuple[str, ...]


def seq2seq_inputs(problem: Problem) -> Seq2SeqInputs:
    """The policy's features of `problem`; nothing here depends on a placement."""
    graph, num_groups = problem.graph, problem.grouping.num_groups
    op_group = problem.grouping.op_group.astype(np.int64)
    types, op_type = np.unique(graph.targets, return_inverse=True)
    counts_GV = np.zeros((num_groups, len(types)))
    np.add.at(counts_GV, (op_group, op_type), 1)
    producer_E, reader_E = op_group[graph.tensor_op[graph.input_tensors]], op_group[graph.edge_op]
    crosses_E = producer_E != reader_E
    reads_GG = np.zeros((num_groups, num_groups), dtype=np.float32)
    reads_GG[reader_E[crosses_E], producer_E[crosses_E]] = 1
    leaving = np.unique(np.concatenate((graph.input_tensors[crosses_E], graph.output_tensors)))
    return Seq2SeqInputs(
        type_shares=(counts_GV / counts_GV.sum(axis=1, keepdims=True)).astype(np.float32),
        output_shapes=_output_shapes(problem, leaving),
        adjacency=np.concatenate((reads_GG, reads_GG.T), axis=1),
        allowed=problem.group_allowed,
        types=tuple(types.tolist()),
    )


def _output_shapes(problem: Problem, leaving: NDArray[np.integer]) -> NDArray[np.float32]:
    """(G, 25) float32 of the tensors `leaving`, ascending."""
    graph, op_group = problem.graph, problem.grouping.op_group
    shapes = np.zeros((problem.grouping.num_groups, MOST_OUTPUTS, MOST_DIMS))
    num_outputs = np.zeros(len(shapes), dtype=np.int64)
    for tensor in leaving[np.argsort(-graph.tensor_bytes[leaving], kind="stable")].tolist():
        group, sizes = op_group[graph.tensor_op[tensor]], graph.tensor_shapes[tensor][:MOST_DIMS]
        if num_outputs[group] < MOST_OUTPUTS:
            shapes[group, num_outputs[group], : len(sizes)] = np.log1p(sizes)
            num_outputs[group] += 1
    largest = float(shapes.max(initial=0.0)) or 1.0
    return (shapes / largest).reshape(len(shapes), SHAPE_WIDTH).astype(np.float32)
