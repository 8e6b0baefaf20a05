"""Placed steps on made-up GPUs, over many random plans: python benchmarks/cuda_order.py [SETTINGS].

What `tests/cuda` does with a hundred: every access to memory must be in order whatever the timing, and every result
that of one CPU core to the bit, also when all ops run as late as they may. Then every call that keeps an order is
taken out in turn, and some run must fail.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from record import as_markdown, record, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fake_gpus.gpu_plans import random_setting
from fake_gpus.late_queues import POLICIES
from fake_gpus.mutant_runs import catches, runs
from fake_gpus.mutants import find_mutants
from fake_gpus.plan_runs import judged, trained

FIRST_SEED = 1_000
"""Those below are the tests'."""


def check_plans(count: int) -> dict[str, Any]:
    """How many random settings of two plans each are in order, and equal when run late."""
    failed: list[str] = []
    models: Counter[str] = Counter()
    num_transfers = 0
    begin_s = time.monotonic()
    for done, seed in enumerate(range(FIRST_SEED, FIRST_SEED + count), 1):
        setting = random_setting(seed)
        models[setting.model] += 1
        num_transfers += sum(plan.num_transfers for plan in setting.plans)
        for policy in ("now", POLICIES[seed % len(POLICIES)]):
            verdict = judged(trained(setting, is_traced=seed % 4 == 0), policy, seed)
            if verdict.caught_by:
                failed.append(f"{setting.name}, {policy}: {verdict}")
        if done % 25 == 0 or done == count:
            print(f"\r{done}/{count} settings, {len(failed)} failed, {time.monotonic() - begin_s:.0f} s", end="")
    print()
    return {
        "first_seed": FIRST_SEED,
        "settings": count,
        "plans": 2 * count,
        "transfers": num_transfers,
        "models": dict(models),
        "failed": failed,
        "seconds": time.monotonic() - begin_s,
    }


def check_mutants() -> list[dict[str, Any]]:
    """How many runs of the small set catch each mutant, and by what."""
    rows = []
    for mutant in find_mutants():
        found = Counter(word for each in catches(mutant) for word in each.rpartition(": ")[2].split())
        rows.append({"mutant": str(mutant), **{by: found[by] for by in ("order", "values", "error")}})
        print(rows[-1])
    return rows


def markdown(plans: dict[str, Any], mutants: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    num_caught = sum(any(row[by] for by in ("order", "values", "error")) for row in mutants)
    text = [
        "# Order and memory of placed steps on made-up GPUs\n",
        as_markdown(facts),
        f"\n{plans['settings']:,} random settings (a model, an optimizer, a host of 1 to 8 devices with or without the "
        f"CPU) of two plans each, {plans['transfers']:,} transfers a step in all; three training steps with the plans "
        "in turn, once with every op at its launch and once as late as it may run. "
        f"**{len(plans['failed'])} failed**: accesses in no order, memory given away in use, or results that are not "
        f"those of one CPU core to the bit. It took {plans['seconds']:.0f} s.\n\n",
        *(f"- {each}\n" for each in plans["failed"]),
        "No GPU was used: streams, events and the allocator are those of `tests/fake_gpus`.\n\n",
        f"**{num_caught} of {len(mutants)} mutants are caught.** Each is one call taken out; the figures say in how "
        f"many of {len(runs()) * len(POLICIES)} runs it is caught by the proof of order, by other values, by an "
        "error.\n\n",
        "| call | order | values | error |\n|---|---|---|---|\n",
        *(f"| `{row['mutant']}` | {row['order']} | {row['values']} | {row['error']} |\n" for row in mutants),
    ]
    return "".join(text)


def main() -> None:
    torch.set_num_threads(1)
    facts = record()
    plans, mutants = check_plans(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000), check_mutants()
    save(
        "cuda_order",
        {"schema": 1, **facts, "plans": plans, "mutants": mutants},
        markdown(plans, mutants, facts),
        indent=1,
    )


if __name__ == "__main__":
    main()
