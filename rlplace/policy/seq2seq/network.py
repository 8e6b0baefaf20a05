"""`Seq2SeqNetwork`: a bidirectional LSTM that reads groups, and an LSTM with attention that writes devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlplace.policy.seq2seq.config import Seq2SeqConfig
from rlplace.policy.seq2seq.inputs import SHAPE_WIDTH

LstmState = tuple[Tensor, Tensor]
"""Hidden and cell state, each (1, B, H)."""


@dataclass(frozen=True)
class Encoded:
    """A graph as the decoder sees it.

    Attributes:
        states: (G, H) encodings of groups, both directions of the encoder.
        keys: (G, A) the same, ready for attention.
        last: the decoder's first state: the encoder's last ones, (1, 1, H) each.
    """

    states: Tensor
    keys: Tensor
    last: LstmState


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

    def encode(self, type_shares_GV: Tensor, output_shapes_GS: Tensor, adjacency_GA: Tensor) -> Encoded:
        """The graph, encoded once for all placements of a batch."""
        embedded_GE = torch.cat((self.type_embedding(type_shares_GV), output_shapes_GS, adjacency_GA), dim=-1)
        states_1GH, (hidden, cell) = self.encoder(embedded_GE[None])
        last = tuple(state.reshape(1, 1, -1) for state in (hidden, cell))  # both directions, side by side
        return Encoded(states_1GH[0], self.key(states_1GH[0]), (last[0], last[1]))

    def first_state(self, encoded: Encoded, batch_size: int) -> LstmState:
        """The state in which the decoder begins, for a batch."""
        hidden, cell = (state.expand(1, batch_size, -1).contiguous() for state in encoded.last)
        return hidden, cell

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
