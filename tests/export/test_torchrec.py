"""The sharding plan of hand-made placements, as torchrec's own classes would take it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from run_folders import placed_run
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.export.device_map import Table, plan_of, tables_of, updated_in_parts
from rlplace.graphs import SplitPlan, capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure import resolve_host
from rlplace.session.setup import CutOptions
from rlplace.workloads import build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exports.md"
DLRM = "dlrm@tables=3,max_rows=11,width=4,dense=5,lookups=2,hidden=16,batch=6"


@dataclass
class ParameterSharding:
    """The fields of torchrec 1.x that a plan may have (`torchrec/distributed/types.py`)."""

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None
    cache_params: object = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: object = None
    output_dtype: object = None
    key_value_params: object = None


def dlrm(count: int = 1) -> OpGraph:
    work = build(DLRM)
    cut: dict[str, Any] = {"micro_batches": count, "batch_dims": work.batch_dims, "loss": "separate"}
    return capture(work.model, work.inputs, work.loss_fn, work.optimizer, **(cut if count > 1 else {}))


def placed(graph: OpGraph, of_table: dict[str, int], lookups: dict[str, int] | None = None) -> np.ndarray:
    """Tables with all that lives with them on a device each, their lookups too or on that of `lookups`, else on 0."""
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    for path, device in of_table.items():
        inside = np.array([module == path for module in graph.modules])
        devices[inside] = (lookups or of_table)[path]
        owned = np.unique(graph.colocation[inside & graph.is_resident])
        devices[np.isin(graph.colocation, owned[owned >= 0])] = device
    return devices


def test_a_table_is_where_its_parameter_is() -> None:
    graph = dlrm()
    tables = tables_of(graph, placed(graph, {"tables.0": 1, "tables.1": 0, "tables.2": 1}))
    assert [table.path for table in tables] == ["tables.0", "tables.1", "tables.2"]
    assert [table.device for table in tables] == [1, 0, 1]
    assert [table.lookup_devices for table in tables] == [(1,), (0,), (1,)]
    assert {table.sharding for table in tables} == {"table_wise"}
    assert [table.shape for table in tables] == [(11, 4)] * 3
    assert not any(table.is_tied for table in tables)


def test_a_lookup_elsewhere_leaves_the_table_where_it_is() -> None:
    graph = dlrm()
    own = {"tables.0": 1, "tables.1": 1, "tables.2": 1}
    table = tables_of(graph, placed(graph, own, {"tables.0": 0, "tables.1": 1, "tables.2": 1}))[0]
    assert (table.device, table.lookup_devices, table.sharding) == (1, (0,), "table_wise")


def test_lookups_dealt_out_by_micro_batch_make_a_table_data_parallel() -> None:
    graph = dlrm(2)
    devices = placed(graph, {"tables.0": 1, "tables.1": 0, "tables.2": 1})
    first = np.array([module == "tables.0" for module in graph.modules])
    devices[first & (graph.micro_batch == 0)] = 0
    tables = tables_of(graph, devices)
    assert [table.sharding for table in tables] == ["data_parallel", "table_wise", "table_wise"]
    assert tables[0].device == 1
    assert tables[0].lookup_devices == (0, 1)


def test_the_plan_is_in_torchrecs_terms() -> None:
    tables = [
        Table("sparse.user", (100, 8), "table_wise", 1, (1,)),
        Table("sparse.item", (50, 8), "data_parallel", 0, (0, 1)),
        Table("word", (9, 2), "table_wise", 0, (0,)),
    ]
    plan = plan_of(tables, core_host(2, has_gang=True))
    assert list(plan) == ["sparse", ""]
    user = ParameterSharding(**plan["sparse"]["user"])
    spec = EnumerableShardingSpec([ShardMetadata(**shard) for shard in user.sharding_spec["shards"]])  # type: ignore[index]
    assert (user.sharding_type, user.compute_kernel, user.ranks) == ("table_wise", "fused", [1])
    assert (spec.shards[0].shard_offsets, spec.shards[0].shard_sizes) == ([0, 0], [100, 8])
    assert spec.shards[0].placement.rank() == 1
    item = ParameterSharding(**plan["sparse"]["item"])
    assert (item.sharding_type, item.compute_kernel, item.ranks) == ("data_parallel", "dense", [0, 1])
    assert item.sharding_spec is None
    assert plan[""]["word"]["sharding_spec"]["shards"][0]["placement"] == "rank:0/cpu"


def test_gpus_are_counted_on_their_own_machine() -> None:
    host = resolve_host("2x8xV100-25gbe")
    table = Table("tables.0", (10, 4), "table_wise", host.device_index["node1/cuda:3"], ())
    (shard,) = plan_of([table], host)["tables"]["0"]["sharding_spec"]["shards"]
    assert shard["placement"] == "rank:11/cuda:3"


def test_a_table_on_what_is_no_rank_is_refused() -> None:
    gang = core_host(2, has_gang=True)
    with pytest.raises(InvalidValue, match=r"table is 'tables\.0 on cpu:all', expected on a device with a process"):
        plan_of([Table("tables.0", (10, 4), "table_wise", 2, ())], gang)


def test_a_run_becomes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dlrm()
    devices = placed(graph, {"tables.0": 1, "tables.1": 0, "tables.2": 1})
    run = placed_run(tmp_path / "run", DLRM, graph, core_host(2), devices)
    assert main(["export", str(run.root), "--format", "torchrec", "--json"]) == 0
    said = capsys.readouterr()
    written = json.loads(run.path("torchrec.json").read_text())
    assert written["world_size"] == 2
    assert {name: one["ranks"] for name, one in written["plan"]["tables"].items()} == {"0": [1], "1": [0], "2": [1]}
    answer = json.loads(said.out)
    assert answer["plan"] == written["plan"]
    assert (answer["schema"], answer["format"], answer["num_tables"]) == (1, "torchrec", 3)
    assert "cpu:1: 2 tables, 88 numbers" in said.err


def test_a_model_without_tables_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a_plain_model.py").write_text(
        "import torch\ndef work():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), 'sgd'\n"
    )
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), "sgd")
    run = placed_run(folder / "run", "a_plain_model:work", graph, core_host(2), np.zeros(graph.num_ops, dtype=np.int32))
    command = ["export", str(run.root), "--format", "torchrec", "--workload", "a_plain_model:work"]
    assert main(command) == 2
    assert "expected a model that looks up embedding tables" in capsys.readouterr().err
    assert not run.path("torchrec.json").exists()


def test_a_table_that_is_updated_in_parts_is_refused_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a_bag_model.py").write_text(
        "import torch\ndef work():\n    torch.manual_seed(0)\n    bag = torch.nn.EmbeddingBag(64, 8)\n"
        "    model = torch.nn.Sequential(bag, torch.nn.Linear(8, 2))\n"
        "    return model, torch.zeros(6, 3, dtype=torch.long), lambda y: y.sum(), 'sgd'\n"
    )
    model, rows = nn.Sequential(nn.EmbeddingBag(64, 8), nn.Linear(8, 2)), torch.zeros(6, 3, dtype=torch.long)
    split = SplitPlan(("updates",), 2)
    graph = capture(model, rows, lambda y: y.sum(), "sgd", split=split)
    assert updated_in_parts(graph) == ["0"]
    cut = CutOptions(split="updates", split_parts="2")
    devices = np.maximum(graph.shard, 0).astype(np.int32)
    run = placed_run(folder / "run", "a_bag_model:work", graph, core_host(2), devices, cut=cut)
    assert main(["export", str(run.root), "--format", "torchrec", "--workload", "a_bag_model:work"]) == 2
    assert "updates of 0 in shards" in capsys.readouterr().err


def test_the_page_makes_torchrecs_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fields that torchrec's own classes have: it needs an FBGEMM that is not there for every PyTorch."""
    code = next(
        each
        for each in re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
        if "torchrec" in each
    )
    types = ModuleType("torchrec.distributed.types")
    vars(types).update(ParameterSharding=ParameterSharding, EmbeddingModuleShardingPlan=dict, ShardingPlan=dict)
    for name in ("torchrec", "torchrec.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchrec.distributed.types", types)
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "runs" / "dlrm").mkdir(parents=True)
    (tmp_path / "runs" / "dlrm" / "torchrec.json").write_text(shown)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "exports.md", "exec"), names)
    table = names["plan"]["tables"]["0"]
    assert (table.sharding_type, table.ranks) == ("table_wise", [1])
    assert table.sharding_spec.shards[0].shard_sizes == [1460, 16]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.words(rows) @ self.words.weight.T


def test_a_table_that_others_read_is_said_to_be_tied() -> None:
    graph = capture(Tied(), torch.tensor([1, 2]), lambda y: y.sum(), "sgd")
    (table,) = tables_of(graph, np.zeros(graph.num_ops, dtype=np.int32))
    assert table.is_tied


def test_columns_of_a_split_table_are_shards_of_it() -> None:
    work = build(DLRM)
    split = SplitPlan(("tables",), (3, 1))
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer, split=split)
    devices = np.maximum(graph.shard, 0).astype(np.int32)
    tables = tables_of(graph, devices)
    assert [table.path for table in tables] == ["tables.0", "tables.1", "tables.2"]
    assert tables[0].shards == (((0, 0), (11, 3), 0), ((0, 3), (11, 1), 1))
    assert (tables[0].shape, tables[0].sharding, tables[0].lookup_devices) == ((11, 4), "column_wise", (0, 1))
    table = ParameterSharding(**plan_of(tables, core_host(2))["tables"]["0"])
    assert (table.sharding_type, table.compute_kernel, table.ranks) == ("column_wise", "fused", [0, 1])
    spec = EnumerableShardingSpec([ShardMetadata(**shard) for shard in table.sharding_spec["shards"]])  # type: ignore[index]
    assert [shard.shard_sizes for shard in spec.shards] == [[11, 3], [11, 1]]
    assert [shard.placement.rank() for shard in spec.shards] == [0, 1]


def test_rows_are_refused_unless_they_are_dealt_out_as_torchrec_does() -> None:
    even = (((0, 0), (5, 2), 0), ((5, 0), (5, 2), 1))
    table = Table("words", (10, 2), "row_wise", 0, (0, 1), shards=even)
    assert plan_of([table], core_host(2))[""]["words"]["ranks"] == [0, 1]
    uneven = Table("words", (10, 2), "row_wise", 0, (0, 1), shards=(((0, 0), (7, 2), 0), ((7, 0), (3, 2), 1)))
    for wrong, host in ((uneven, core_host(2)), (table, core_host(3))):
        with pytest.raises(InvalidValue, match=r"table is 'words by rows in 2 shards', expected \d rows on each"):
            plan_of([wrong], host)
