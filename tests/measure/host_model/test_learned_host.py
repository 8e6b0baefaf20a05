"""What a run keeps of what it learned about its host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from micrographs import fork_join

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, Link, Problem, Route
from rlplace.measure.host_model import LearnedHost, Posterior, Prior, Scales, load_learned_host, save_posterior

PRIOR = Prior(op_type=0.2, dispatch_s=4e-6, dispatch=1.0, corun=0.1, corun_deviation=0.5)


def posterior(dispatch_s: float = 0.0, corun_slowdown: tuple[tuple[float, ...], ...] = ()) -> Posterior:
    """Links have half the bandwidth given, surely; everything else is as before, half as uncertain."""
    graph = fork_join(2, 2, 100)
    devices = tuple(Device(f"d{k}", "k", "simulated", 1 << 30, memory_pool="ram", dispatcher="lock") for k in range(2))
    routes = (Route("d0", "d1", ("wire",)), Route("d1", "d0", ("wire",)))
    host = Host(
        "two", devices, (Link("wire", 1e9, 1e-5),), routes, dispatch_s=dispatch_s, corun_slowdown=corun_slowdown
    )
    costs = Costs(np.full((graph.num_ops, 2), 1e-3), "profiled")
    scales = Scales(Problem(graph, host, costs, Grouping(np.arange(graph.num_ops))), PRIOR)
    mean, deviation = np.zeros(len(scales)), scales.deviation / 2
    mean[scales.bandwidth_at[0]], deviation[scales.bandwidth_at[0]] = np.log(0.5), 0.05
    return Posterior(scales, mean, np.diag(deviation))


def test_what_is_saved_loads_as_equal_from_a_run_folder_or_the_file(tmp_path: Path) -> None:
    known = posterior()
    save_posterior(known, tmp_path)
    learned = load_learned_host(tmp_path)
    assert learned == load_learned_host(tmp_path / "host_model.json") == LearnedHost.of(known)
    assert (learned.host, learned.host_fingerprint) == ("two", known.scales.problem.host.fingerprint)
    assert (learned.cost_source, learned.prior) == ("profiled", PRIOR)
    assert learned.lines == ("wire has 0.5 of the bandwidth given (0.45 to 0.55)",)
    (wire,) = (factor for factor in learned.factors if factor.kind == "bandwidth")
    assert (wire.name, wire.log_mean, wire.prior_deviation) == ("wire", np.log(0.5), 0.6)
    assert wire.log_deviation == pytest.approx(0.05, rel=1e-15)
    assert [factor.kind for factor in learned.factors] == [item.kind for item in known.scales.items]


def test_it_says_which_figure_of_the_prior_a_factor_is_on() -> None:
    medians = {factor.kind: factor.median for factor in LearnedHost.of(posterior()).factors}
    assert medians.pop("overhead") == 5e-6
    assert medians.pop("dispatch") == 4e-6
    assert medians.pop("co-run") == 0.1
    assert set(medians.values()) == {0.0}


def test_a_factor_on_a_figure_of_the_host_is_on_none_of_the_priors() -> None:
    learned = LearnedHost.of(posterior(1e-6, ((0.0, 0.2), (0.2, 0.0))))
    medians = {factor.kind: factor.median for factor in learned.factors}
    assert (medians["overhead"], medians["dispatch"], medians["co-run"]) == (5e-6, 0.0, 0.0)


def test_the_prior_is_saved_with_nothing_to_say(tmp_path: Path) -> None:
    save_posterior(Posterior.prior(posterior().scales), tmp_path / "host.json")
    learned = load_learned_host(tmp_path / "host.json")
    assert learned.lines == ()
    assert all((factor.log_mean, factor.log_deviation) == (0.0, factor.prior_deviation) for factor in learned.factors)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"schema": 2}, InvalidValue, "schema is 2, expected 1"),
        ({"cost_source": "guessed"}, UnknownName, "unknown cost_source .* 'guessed'"),
        ({"prior": {"device": -0.1}}, InvalidValue, r"prior\.device is -0\.1"),
        ({"factors": {}}, InvalidValue, "factors is a mapping of 0 fields, expected a list"),
        ({"kind": "op types"}, UnknownName, r"unknown factors\[0\]\.kind .* did you mean 'op type'"),
        ({"log_mean": None}, InvalidValue, r"factors\[0\]\.log_mean is empty, expected a number"),
        ({"log_deviation": 0.0}, InvalidValue, r"factors\[0\]\.log_deviation is 0\.0, expected at least"),
        ({"median": -1.0}, InvalidValue, r"factors\[0\]\.median is -1\.0"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_what_it_is(
    change: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    facts = json.loads(json.dumps({**dataclasses.asdict(LearnedHost.of(posterior()))}))
    into = facts if set(change) <= set(facts) else facts["factors"][0]
    into.update(change)
    (tmp_path / "host_model.json").write_text(json.dumps(facts))
    with pytest.raises(error, match=words):
        load_learned_host(tmp_path)


def test_what_is_no_file_of_a_host_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"host_model\.json: no such file\. Name run folders"):
        load_learned_host(tmp_path)
    (tmp_path / "host_model.json").write_text('{"devices": []}')
    with pytest.raises(InvalidValue, match=r"a mapping with `factors`\. Name run folders"):
        load_learned_host(tmp_path)


def test_another_file_of_a_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"schema": 1, "workload": "nmt"}))
    with pytest.raises(InvalidValue, match=r"config\.json: host model .* Name run folders"):
        load_learned_host(tmp_path / "config.json")


def test_equations_are_kept_and_a_mistake_in_them_is_named(tmp_path: Path) -> None:
    scales = posterior().scales
    slopes = np.random.default_rng(0).normal(size=(2, len(scales)))
    save_posterior(Posterior.of(scales, scales.mean, slopes, 0.0, np.array([0.1, 0.2])), tmp_path)
    learned = load_learned_host(tmp_path)
    np.testing.assert_allclose([one.slopes for one in learned.equations], slopes / scales.deviation, rtol=1e-7)
    np.testing.assert_allclose([one.target for one in learned.equations], [-0.1, -0.2], rtol=1e-7)
    facts = dataclasses.asdict(learned)
    for change, words in (
        ({"slopes": [1.0]}, rf"equations\[0\]\.slopes is 1, expected {len(scales)} numbers"),
        ({"slopes": [1e300] * len(scales)}, r"equations\[0\]\.slopes\[0\] is 1e\+300, expected at most"),
        ({"target": "2"}, r"equations\[0\]\.target is '2'"),
    ):
        wrong = json.loads(json.dumps(facts))
        wrong["equations"][0].update(change)
        (tmp_path / "host_model.json").write_text(json.dumps(wrong))
        with pytest.raises(InvalidValue, match=words):
            load_learned_host(tmp_path)
    facts.pop("equations")  # as files were before
    (tmp_path / "host_model.json").write_text(json.dumps(facts))
    assert load_learned_host(tmp_path).equations == ()
