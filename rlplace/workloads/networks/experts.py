"""`Experts`: the experts of a mixture, each a module of its own with room for a fixed number of tokens.

`transformers` keeps all experts of a layer in one tensor, which lives in one place, and sends each the tokens that
chose it, whose number depends on the data. Here every expert can be placed on its own, and takes as many tokens as it
has room for, those that value it most, as in GShard (Lepikhin et al. 2020, arXiv:2006.16668) and Switch (Fedus et al.
2021, arXiv:2101.03961, section 2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class Experts(nn.Module):
    """Experts of one layer; tokens beyond an expert's room skip it."""

    def __init__(self, width: int, mlp: int, experts: int, capacity: int, std: float) -> None:
        """`capacity` in percent of an even share of the tokens; weights are drawn with deviation `std`."""
        super().__init__()
        self.capacity = capacity
        self.experts = nn.ModuleList(Expert(width, mlp) for _ in range(experts))
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def room(self, tokens: int, chosen: int) -> int:
        """Tokens that each expert takes, where each of `tokens` chooses `chosen` experts."""
        return min(tokens, -(-tokens * chosen * self.capacity // (100 * len(self.experts))))

    def forward(self, tokens_TW: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, W): for every token the weighted sum of its chosen experts.

        Args:
            tokens_TW: (T, W).
            chosen_TK: (T, K) int64 experts of every token.
            weights_TK: (T, K) their weights.
        """
        num_tokens, chosen = chosen_TK.shape
        weights_TE = weights_TK.new_zeros(num_tokens, len(self.experts)).scatter(1, chosen_TK, weights_TK)
        room = self.room(num_tokens, chosen)
        out_TW = torch.zeros_like(tokens_TW)
        for expert, weights_T in zip(self.experts, weights_TE.unbind(1)):
            weights_R, rows_R = weights_T.topk(room)
            out_RW = expert(tokens_TW.index_select(0, rows_R)) * weights_R[:, None]
            out_TW = out_TW.index_add(0, rows_R, out_RW)
        return out_TW


class Expert(nn.Module):
    """A gated feed-forward layer (SwiGLU)."""

    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp, bias=False)
        self.up = nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(R, W) to the same."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out
