"""What placed steps compute when every op runs as late as streams, events and waiting hosts allow, in hostile orders.

Memory holds NaN until it is written and once its stream may give it to another; results must be those of one CPU core.
"""

from __future__ import annotations

import pytest
from fake_gpus.gpu_plans import gpu_host, random_setting, setting_of
from fake_gpus.late_queues import POLICIES, Policy
from fake_gpus.plan_runs import judged, trained
from fake_gpus.scenarios import failed_and_run_again, inference, placed_model, timed_out_and_run_again

AT_ONCE = 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", range(300, 325, AT_ONCE))
def test_random_plans(first: int, policy: Policy) -> None:
    for seed in range(first, first + AT_ONCE):
        setting = random_setting(seed)
        verdict = judged(trained(setting, is_traced=seed % 4 == 0), policy, seed)
        assert not verdict.caught_by, f"{setting.name}: {verdict}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["batch_norm_train", "dropout", "gru"])
def test_models_whose_state_is_read_and_set_between_steps(model: str, policy: Policy) -> None:
    host = gpu_host(("cuda:0", "cuda:1", "cpu"))
    for reads in ((), ("state_dict", "copy_to", "load_state_dict")):
        verdict = judged(placed_model(setting_of(model, "adam", host, 1), reads), policy)
        assert not verdict.caught_by, str(verdict)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_fails_or_is_stuck_leaves_nothing_behind(policy: Policy) -> None:
    setting = setting_of("buffers", "adam", gpu_host(("cuda:0/0", "cuda:0/1", "cuda:1")), 2)
    for body in (failed_and_run_again(setting, 9), timed_out_and_run_again(setting), inference):
        verdict = judged(body, policy)
        assert not verdict.caught_by, str(verdict)
