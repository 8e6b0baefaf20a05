"""Every workload but one in micro-batches, which takes as many placed steps as plain PyTorch to the same parameters."""

from __future__ import annotations

import numpy as np
import pytest
from core_hosts import core_host
from naive_plan import naive_plan, random_devices

from rlplace.errors import InvalidValue
from rlplace.export.formats import check_export
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.workloads import CATALOG, build, parse_workload, without_memory

HOST = core_host(2)
TINY = {
    "bert": "layers=1,width=16,heads=2,batch=3,tokens=6,vocab=19",
    "clip": "layers=1,width=12,heads=2,text_width=8,text_heads=2,shared_width=6,image_size=32,patch_size=16,"
    "batch=3,tokens=5,vocab=19",
    "dlrm": "tables=3,max_rows=11,width=4,dense=5,lookups=2,hidden=16,batch=5",
    "gpt2": "layers=1,width=16,heads=2,batch=3,tokens=6,vocab=19",
    "inception_v3": "batch=4,image_size=75,classes=3",
    "llama": "layers=1,width=16,heads=4,kv_heads=2,mlp=24,batch=3,tokens=6,vocab=19",
    "mixtral": "layers=1,width=16,heads=4,kv_heads=2,mlp=12,experts=4,batch=3,tokens=6,vocab=19",
    "nmt": "layers=2,units=8,vocab=11,steps=3,batch=3",
    "resnet50": "batch=4,image_size=64,width=8,classes=3",
    "rnnlm": "layers=1,units=8,vocab=11,steps=3,batch=3",
    "t5": "layers=1,width=16,heads=2,batch=3,tokens=6,target_tokens=5,vocab=19",
    "vit": "layers=1,width=12,heads=2,batch=3,image_size=32,patch_size=16,classes=3",
    "whisper": "layers=1,width=16,heads=2,batch=3,mels=5,frames=12,tokens=6,vocab=19",
}
NORMS = ("inception_v3", "resnet50")
SLOW = (*NORMS, "llama", "t5", "whisper", "bert")


def captured(name: str, count: int) -> OpGraph:
    work = build(parse_workload(f"{name}@{TINY[name]}"))
    return capture(
        work.model,
        work.inputs,
        work.loss_fn,
        work.optimizer,
        targets=work.targets,
        micro_batches=count,
        batch_dims=work.batch_dims,
        loss=work.loss,
    )


def trains_as_eager_does(name: str) -> None:
    graph = captured(name, 2)
    micro = require_program(graph).origin.micro
    assert micro is not None
    assert micro.equals_whole == (name not in (*NORMS, "mixtral"))
    generator = np.random.default_rng(0)
    plan = naive_plan(graph, random_devices(graph, 2, generator), generator)
    assert check_export(graph, HOST, plan, num_steps=2).ok


def test_every_name_is_tested_here() -> None:
    assert TINY.keys() == CATALOG.keys() - {"evoformer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if name not in SLOW])
def test_in_micro_batches_it_trains_as_eager_does(name: str) -> None:
    trains_as_eager_does(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_others_train_as_eager_does_too(name: str) -> None:
    trains_as_eager_does(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "dlrm"])
def test_tables_have_one_gradient_a_lookup_of_all_micro_batches(name: str) -> None:
    target = "aten.embedding_dense_backward.default"
    numbers = [sum(each == target for each in captured(name, count).targets) for count in (1, 2, 3)]
    assert numbers[0] == numbers[1] == numbers[2] > 0


def test_a_model_without_a_batch_is_not_cut() -> None:
    work = build(parse_workload("evoformer@blocks=1,sequences=3,residues=4,msa_width=8,pair_width=6,heads=2"))
    with pytest.raises(InvalidValue, match="batch"):
        capture(work.model, work.inputs, work.loss_fn, work.optimizer, micro_batches=2, batch_dims=work.batch_dims)


@pytest.mark.slow
def test_models_without_memory_are_cut_too() -> None:
    """The same graph: a joined loss is captured of outputs that nobody computed."""
    with without_memory():
        work = build(parse_workload(f"clip@{TINY['clip']}"))
    graph = capture(
        work.model, work.inputs, work.loss_fn, work.optimizer, targets=work.targets, micro_batches=2, loss="joined"
    )
    assert graph.fingerprint == captured("clip", 2).fingerprint
