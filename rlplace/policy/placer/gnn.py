"""`GraphEncoder`: message passing over the group graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GraphEncoder(nn.Module):
    """Encodes the G groups of a graph by rounds of messages along its edges, in both directions.

    A round: every edge makes a message of its own features and of the group it comes from; every group takes the mean
    of what comes from the groups it reads, and from those that read it, and adds what a layer makes of the three
    (residual, layer norm; cf. Gilmer et al. 2017, "Neural Message Passing for Quantum Chemistry").
    """

    def __init__(self, num_node_features: int, num_edge_features: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(num_node_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.layers = nn.ModuleList(MessageLayer(num_edge_features, hidden) for _ in range(num_layers))

    def forward(self, nodes_GF: Tensor, edges_KF: Tensor, source_K: Tensor, target_K: Tensor) -> Tensor:
        """(G, H) encodings; computed once per graph, whatever the size of the batch."""
        h_GH: Tensor = self.embed(nodes_GF)
        for layer in self.layers:
            h_GH = layer(h_GH, edges_KF, source_K, target_K)
        return h_GH


class MessageLayer(nn.Module):
    """One round of messages, forward and backward along the edges."""

    def __init__(self, num_edge_features: int, hidden: int) -> None:
        super().__init__()
        self.send = nn.Linear(hidden, 2 * hidden)
        self.edge = nn.Linear(num_edge_features, 2 * hidden, bias=False)
        self.update = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, h_GH: Tensor, edges_KF: Tensor, source_K: Tensor, target_K: Tensor) -> Tensor:
        """(G, H) encodings after the round."""
        down_GH, up_GH = self.send(h_GH).chunk(2, dim=-1)
        down_edge_KH, up_edge_KH = self.edge(edges_KF).chunk(2, dim=-1)
        read_GH = _mean_of(torch.relu(down_GH.index_select(0, source_K) + down_edge_KH), target_K, len(h_GH))
        readers_GH = _mean_of(torch.relu(up_GH.index_select(0, target_K) + up_edge_KH), source_K, len(h_GH))
        updated_GH: Tensor = self.norm(h_GH + self.update(torch.cat([h_GH, read_GH, readers_GH], dim=-1)))
        return updated_GH


def _mean_of(messages_KH: Tensor, ends_K: Tensor, num_groups: int) -> Tensor:
    total_GH = messages_KH.new_zeros(num_groups, messages_KH.shape[1]).index_add(0, ends_K, messages_KH)
    counts_G = torch.bincount(ends_K, minlength=num_groups).clamp(min=1)
    return total_GH / counts_G[:, None]
