import torch

from rlplace.policy import GraphEncoder

CHAIN = (torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 4]))


def encoder(num_layers):
    torch.manual_seed(0)
    return GraphEncoder(num_node_features=3, num_edge_features=2, hidden=8, num_layers=num_layers)


def test_every_round_reaches_one_edge_further_both_ways():
    nodes_GF, edges_KF = torch.zeros(5, 3), torch.zeros(4, 2)
    changed_GF = nodes_GF.clone()
    changed_GF[2] = 1.0
    for num_layers, reached in ((0, {2}), (1, {1, 2, 3}), (2, {0, 1, 2, 3, 4})):
        encode = encoder(num_layers)
        difference_G = (encode(changed_GF, edges_KF, *CHAIN) - encode(nodes_GF, edges_KF, *CHAIN)).abs().amax(dim=1)
        assert set(difference_G.nonzero().flatten().tolist()) == reached


def test_edge_features_matter_to_both_ends():
    nodes_GF, edges_KF = torch.zeros(5, 3), torch.zeros(4, 2)
    changed_KF = edges_KF.clone()
    changed_KF[1] = 3.0  # the edge from 1 to 2
    encode = encoder(1)
    difference_G = (encode(nodes_GF, changed_KF, *CHAIN) - encode(nodes_GF, edges_KF, *CHAIN)).abs().amax(dim=1)
    assert set(difference_G.nonzero().flatten().tolist()) == {1, 2}


def test_renumbering_groups_renumbers_encodings():
    generator = torch.Generator().manual_seed(1)
    nodes_GF, edges_KF = torch.randn(5, 3, generator=generator), torch.randn(4, 2, generator=generator)
    order = torch.tensor([3, 0, 4, 1, 2])
    place = torch.argsort(order)
    encode = encoder(3)
    straight = encode(nodes_GF, edges_KF, *CHAIN)
    renumbered = encode(nodes_GF[order], edges_KF, place[CHAIN[0]], place[CHAIN[1]])
    assert torch.allclose(renumbered, straight[order], atol=1e-6)


def test_a_graph_without_edges_is_encoded():
    none = torch.zeros(0, dtype=torch.int64)
    assert encoder(2)(torch.zeros(3, 3), torch.zeros(0, 2), none, none).shape == (3, 8)
