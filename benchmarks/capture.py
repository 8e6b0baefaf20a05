"""How fast a training step is captured: python benchmarks/capture.py [OUT.json] (needs the extra `zoo`).

Times are of the process (`time.process_time`), so that neighbours on the machine count less, with wall times beside.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from record import record
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.files import write_json_atomic
from rlplace.graphs import capture
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.capturing.trace import trace_step
from rlplace.workloads import build, parse_workload

Step = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]


def workload(name: str) -> Step:
    built = build(parse_workload(name))
    return built.model, built.inputs, built.loss_fn


def on_tokens(model: type[nn.Module], config: object, *shape: int) -> Step:
    """A language model on so many sequences of so many tokens."""
    tokens = torch.zeros(shape, dtype=torch.int64)
    return model(config), {"input_ids": tokens, "labels": tokens}, lambda output: output.loss


GPT2_MEDIUM = transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16)
T5_BASE = transformers.T5Config(
    d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0, use_cache=False
)


STEPS: dict[str, Callable[[], Step]] = {
    "nmt, 4+4 layers, 50 steps": partial(workload, "nmt@layers=4,steps=50,units=1024,batch=64"),
    "gpt2-medium": partial(on_tokens, transformers.GPT2LMHeadModel, GPT2_MEDIUM, 4, 512),
    "llama-7b": partial(on_tokens, transformers.LlamaForCausalLM, transformers.LlamaConfig(), 1, 512),
    "t5-base": partial(on_tokens, transformers.T5ForConditionalGeneration, T5_BASE, 4, 128),
    "inception_v3, batch 32": partial(workload, "inception_v3@batch=32"),
}


def main(out: str) -> None:
    capture(nn.Linear(2, 1), torch.ones(3, 2), torch.sum, "adam")  # what PyTorch imports on first use is not timed
    rows = []
    for name, make in STEPS.items():
        with FakeTensorMode():
            model, inputs, loss_fn = make()
        args, kwargs = as_call(inputs)
        traced = trace_step(model, args, kwargs, loss_fn, is_training=True)
        num_calls = sum(node.op == "call_function" for node in traced.module.graph.nodes)
        del traced
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        graph = capture(model, inputs, loss_fn, "adam")
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        runs = [module for module, is_source in zip(graph.modules, graph.is_source, strict=True) if not is_source]
        rows.append(
            {
                "step": name,
                "aten_calls": num_calls,
                "ops": graph.num_ops,
                "parameter_bytes": int(graph.parameter_bytes.sum()),
                "cpu_s": round(cpu_s, 2),
                "wall_s": round(wall_s, 2),
                "aten_calls_per_cpu_s": round(num_calls / cpu_s),
                "share_of_ops_below_root": round(sum(map(bool, runs)) / len(runs), 4),
            }
        )
        print(rows[-1], flush=True)
    write_json_atomic(
        out,
        {
            "schema": 1,
            **record("transformers"),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/capture.json")
