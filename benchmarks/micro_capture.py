"""How fast steps in micro-batches are captured and put together: python benchmarks/micro_capture.py [OUT.json].

Needs the extra `zoo`. Times are of the process, as in benchmarks/capture.py: capturing each size of a slice, and all
the rest, which makes K micro-batches of them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from record import record

from rlplace.files import write_json_atomic
from rlplace.graphs import capture
from rlplace.graphs.micro_batching import cut_step
from rlplace.workloads import build, parse_workload, without_memory

STEPS = (
    ("bert@paper", 4),
    ("bert@paper", 16),
    ("bert@paper,batch=64", 64),
    ("gpt2@paper", 8),
    ("inception_v3@paper", 16),
    ("clip@paper", 8),
)


class TimedParts(cut_step.Parts):
    """Parts that say how long their captures took."""

    spent_s = 0.0

    def capture(self, *args: Any, **kwargs: Any) -> None:
        begin_s = time.process_time()
        super().capture(*args, **kwargs)
        TimedParts.spent_s += time.process_time() - begin_s


def main(out: str) -> None:
    cut_step.Parts = TimedParts  # type: ignore[misc]
    rows = []
    for name, count in (STEPS[0], *STEPS):  # what PyTorch imports on first use is not timed
        with without_memory():
            work = build(parse_workload(name))
        TimedParts.spent_s, begin_s = 0.0, time.process_time()
        graph = capture(
            work.model,
            work.inputs,
            work.loss_fn,
            work.optimizer,
            targets=work.targets,
            micro_batches=count,
            batch_dims=work.batch_dims,
            loss=work.loss,
        )
        cpu_s = time.process_time() - begin_s
        rows.append(
            {
                "step": name,
                "micro_batches": count,
                "ops": graph.num_ops,
                "edges": graph.num_edges,
                "capture_cpu_s": round(TimedParts.spent_s, 2),
                "rest_cpu_s": round(cpu_s - TimedParts.spent_s, 2),
            }
        )
        print(rows[-1], flush=True)
    write_json_atomic(out, {"schema": 1, **record("transformers"), "rows": rows[1:]})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/micro_capture.json")
