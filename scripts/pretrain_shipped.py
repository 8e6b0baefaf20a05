"""Trains the weights that come with the package: python scripts/pretrain_shipped.py FOLDER [--resume].

`pretrain.py` with its defaults, on the recurrent networks of `unrolled_networks.py` besides: no workload of the
package but those that are judged on is unrolled over steps. What it leaves as `schedule.safetensors` and `.json` in
FOLDER is what `rlplace/policy/weights/` holds.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from pretrain import PretrainConfig, pretrain
from unrolled_networks import UNROLLED, unrolled_graph_of

from rlplace.graphs import save_graph


def main(folder: Path, resume: bool) -> None:
    paths = []
    for number, name in enumerate(UNROLLED):
        paths.append(folder.parent / f"{folder.name}-graphs" / f"unrolled-{number}.json")
        if not paths[-1].exists():
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            save_graph(dataclasses.replace(unrolled_graph_of(name), program=None), paths[-1])
    pretrain(PretrainConfig(graphs=tuple(paths)), folder, resume=resume, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--resume" in sys.argv[2:])
