"""`Experts` with room for all tokens are those of `transformers`; with less room, the tokens of least weight skip."""

from __future__ import annotations

import torch

from rlplace.workloads import build, parse_workload
from rlplace.workloads.networks.zoo import Experts, transformers

TINY = "mixtral@layers=1,width=16,heads=4,kv_heads=2,mlp=12,experts=4,chosen=2,batch=2,tokens=6,vocab=19"


def test_with_room_for_all_it_is_the_model_of_transformers() -> None:
    workload = build(parse_workload(f"{TINY},capacity=200"))
    ours = workload.model
    hf = transformers()
    theirs = hf.MixtralForCausalLM(ours.config)
    state = ours.state_dict()
    for index, layer in enumerate(ours.model.layers):
        mixture = layer.mlp.experts.experts
        prefix = f"model.layers.{index}.mlp.experts."
        state[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((e.gate.weight, e.up.weight)) for e in mixture])
        state[f"{prefix}down_proj"] = torch.stack([e.down.weight for e in mixture])
    missing, _ = theirs.load_state_dict(state, strict=False)
    assert not missing
    torch.testing.assert_close(ours(**workload.inputs).loss, theirs(**workload.inputs).loss)


def test_room_is_a_share_of_the_tokens() -> None:
    def room(experts: int, capacity: int, tokens: int, chosen: int) -> int:
        return Experts(2, 2, experts, capacity, std=0.02).room(tokens, chosen)

    assert room(experts=4, capacity=100, tokens=12, chosen=2) == 6
    assert room(experts=4, capacity=125, tokens=12, chosen=2) == 8, "7.5, rounded up"
    assert room(experts=4, capacity=1000, tokens=12, chosen=2) == 12, "no more than there are"
    assert room(experts=8, capacity=1, tokens=1, chosen=1) == 1


def test_those_that_value_an_expert_least_skip_it() -> None:
    torch.manual_seed(0)
    experts = Experts(width=3, mlp=4, experts=2, capacity=100, std=0.5)
    tokens_TW = torch.randn(4, 3)
    chosen_TK = torch.tensor([[0], [0], [0], [1]])
    weights_TK = torch.tensor([[0.9], [0.2], [0.7], [0.6]])
    expected = torch.stack(
        [
            0.9 * experts.experts[0](tokens_TW[0]),
            torch.zeros(3),
            0.7 * experts.experts[0](tokens_TW[2]),
            0.6 * experts.experts[1](tokens_TW[3]),
        ]
    )
    torch.testing.assert_close(experts(tokens_TW, chosen_TK, weights_TK), expected)
