"""`rlplace pretrain`: weights of a policy that suit any problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from rlplace.cli.arguments import print_json
from rlplace.say import say
from rlplace.training.pretrain.config import PretrainConfig


def pretrain(
    out: tyro.conf.Positional[Path],
    config: Annotated[PretrainConfig, tyro.conf.arg(name="")],
    resume: bool = False,
    cluster: str = "off",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Train weights of the policy `schedule` on many simulated problems; `--init FILE` takes them.

    Args:
        out: a folder for the weights, and for what was simulated on the way
        config: how much
        resume: go on where a run with the same options was stopped
        cluster: whose workers simulate: off, auto (the Ray cluster that runs here, else one that is started here), or
            the ADDRESS of one
        json: print one JSON object on stdout
        quiet: no progress
    """
    from rlplace.cluster import reach
    from rlplace.training.pretrain.run import pretrain as train

    tell = (lambda text: None) if quiet else say
    with reach(cluster, say=tell) as workers:
        result = train(config, out, resume=resume, say=tell, cluster=workers)
    if json:
        print_json(result)
