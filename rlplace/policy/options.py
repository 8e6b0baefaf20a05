"""`LearnConfig`: which policy learns, how, and from what; importing it imports no torch.

`GnnConfig`: options of the policy `gnn`; importing it imports no torch.

`ImproverConfig`: options of the policy `improver`; importing it imports no torch.

`ScheduleConfig`: options of the policy `schedule`; importing it imports no torch.

`Seq2SeqConfig`: the size of the policy `seq2seq`; importing it imports no torch.

Largest sizes of networks: their options may come from a file, and weights are made before anything is learned.

`Recipe`: which policy, learner, reward and start go together where the user leaves them open.

`PretrainConfig`: how much weights are trained; importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlplace.decode import check_ranges
from rlplace.errors import InvalidValue, UnknownName
from rlplace.seeds import check_seed


@dataclass(frozen=True)
class GnnConfig:
    """The size of a `GnnPolicy`."""

    hidden: int = 64
    """Width of the network."""
    num_layers: int = 2
    """Rounds of messages between groups before devices are looked at."""
    num_rounds: int = 2
    """Rounds in which groups and devices see where groups are likely to be."""
    marks: int = 8
    """Random numbers that tell devices apart that are equal otherwise."""

    def __post_init__(self) -> None:
        ranges = {"hidden": (1, MOST_WIDTH), "num_layers": (0, MOST_LAYERS), "num_rounds": (1, MOST_LAYERS)}
        check_ranges(self, "gnn", ranges | {"marks": (0, MOST_WIDTH)})
        _check_weights("gnn", self.hidden, self.num_layers + self.num_rounds)


@dataclass(frozen=True)
class ImproverConfig:
    """The size of an `ImproverPolicy`, and how far it goes."""

    hidden: int = 32
    """Width of the network."""
    num_layers: int = 2
    """Rounds of messages between groups."""
    moves: float = 2.0
    """Groups that a pass moves on average before a learner says otherwise."""
    explore: float = 0.5
    """Share of the moves that are drawn at random, however much was learned: without them the same few moves that do
    no harm would be tried for ever."""

    def __post_init__(self) -> None:
        check_ranges(self, "improver", {"hidden": (1, MOST_WIDTH), "num_layers": (0, MOST_LAYERS)})
        _check_weights("improver", self.hidden, self.num_layers)
        if not 0.0 < self.explore <= 1.0:
            raise InvalidValue("explore", self.explore, "more than 0, at most 1", where="improver")
        if not self.moves > 0:
            raise InvalidValue("moves", self.moves, "more than 0", where="improver")


@dataclass(frozen=True)
class ScheduleConfig:
    """The size of the policy `schedule`, and how far its samples leave its best guess."""

    hidden: int = 32
    """Width of its networks; pretrained weights bring their own."""
    flips: float = 2.0
    """Groups in which a first sample differs from the mode, on average."""

    def __post_init__(self) -> None:
        check_ranges(self, "policy schedule", {"hidden": (1, MOST_WIDTH)})
        if not self.flips > 0:
            raise InvalidValue("flips", self.flips, "more than 0", where="policy schedule")


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes of the policy `seq2seq`, and how its logits are bounded."""

    hidden: int = 64
    """Width of the decoder, and of the encoder's two directions together."""
    type_embedding: int = 16
    """Width of the embedding of an op type."""
    device_embedding: int = 16
    """Width of the embedding of a device."""
    attention: int = 16
    """Width of the layer that scores groups for attention."""
    tanh_constant: float = 5.0
    """C of the logits C tanh(u / T)."""
    temperature: float = 1.0
    """T of the logits C tanh(u / T)."""

    def __post_init__(self) -> None:
        widths = ("hidden", "type_embedding", "device_embedding", "attention")
        check_ranges(self, "seq2seq", dict.fromkeys(widths, (1, MOST_WIDTH)))
        if self.hidden % 2:
            raise InvalidValue("hidden", self.hidden, "an even number, shared by two directions", where="seq2seq")
        for name in ("tanh_constant", "temperature"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "more than 0", where="seq2seq")


INITS = ("starts", "none", "pretrained")
WEIGHTS_ENDING = ".safetensors"
"""How the name of a file of weights ends."""
MOST_STEPS, MOST_MEASURED = 10_000, 1_000
"""Of what an update takes: steps, samples and elites; measured placements, and samples for each of them."""


@dataclass(frozen=True)
class PlacerArchitecture:
    """The size of a policy."""

    hidden: int = 64
    """Width of the encoder."""
    num_layers: int = 3
    """Rounds of messages."""
    table_scale: float = 10.0
    """How fast the free logits of each group (a table, added to the encoder's logits) learn; 0 leaves them out."""

    def __post_init__(self) -> None:
        check_ranges(self, "policy", {"hidden": (1, MOST_WIDTH), "num_layers": (0, MOST_LAYERS)})
        _check_weights("policy", self.hidden, self.num_layers)
        if not self.table_scale >= 0:
            raise InvalidValue("table_scale", self.table_scale, "at least 0", where="policy")


@dataclass(frozen=True)
class PPOConfig:
    """Options of `GroupPPO`; all can be reached from `rlplace train` as `--ppo.NAME`."""

    learning_rate: float = 3e-3
    """Of Adam."""
    n_steps: int = 1
    """Steps of all envs a rollout, where there are envs (`PlacerPPO`)."""
    batch_size: int | None = None
    """Placements a gradient step; the whole rollout by default."""
    n_epochs: int = 3
    """Passes over a rollout."""
    clip_range: float = 0.2
    """How far the ratio of a group may leave 1."""
    normalize_advantage: bool = True
    """Divide the advantages of a minibatch by their spread."""
    ent_coef: float = 0.0
    """Weight of the mean entropy of a group."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """End a rollout's passes early when a group's mean divergence passes 1.5 times this."""
    flips: float = 2.0
    """Groups in which a sample differs from the mode, on average."""
    elite_coef: float = 1.0
    """Weight of cloning the best placements; 0 is plain PPO."""
    num_elites: int = 1
    """How many of the best to clone."""
    elite_smoothing: float = 0.02
    """Probability that cloning leaves to other devices."""

    def __post_init__(self) -> None:
        check_ranges(self, "PPO", dict.fromkeys(("n_steps", "n_epochs", "num_elites"), (1, MOST_STEPS)))
        for name in ("learning_rate", "clip_range", "max_grad_norm", "flips"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "more than 0", where="PPO")
        if self.batch_size is not None and self.batch_size < 2:  # their advantages are told apart by their spread
            raise InvalidValue("batch_size", self.batch_size, "at least 2", where="PPO")


@dataclass(frozen=True)
class CloneConfig:
    """Options of `CloneLearner`."""

    learning_rate: float = 3e-3
    """Of Adam."""
    num_elites: int = 8
    """How many of the best placements are cloned; the mode after cloning several need not be one of them."""
    num_steps: int = 3
    """Gradient steps an update."""
    smoothing: float = 0.02
    """Probability that cloning leaves to other devices."""
    flips: float = 2.0
    """Groups in which a sample differs from the mode, on average."""

    def __post_init__(self) -> None:
        check_ranges(self, "clone", dict.fromkeys(("num_elites", "num_steps"), (1, MOST_STEPS)))
        for name in ("learning_rate", "flips"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "more than 0", where="clone")


@dataclass(frozen=True)
class GuideConfig:
    """How far a search follows a policy that guides it; all can be reached from `rlplace train` as `--guided.NAME`."""

    starts: float = 0.1
    """Share of a search's placements that are the policy's, to start from, where it was taught before."""
    moves: float = 0.1
    """Share of annealing's moves that the policy proposes."""

    def __post_init__(self) -> None:
        for name in ("starts", "moves"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidValue(name, getattr(self, name), "0..1", where="guide")


@dataclass(frozen=True)
class ReinforceConfig:
    """Options of `Reinforce`."""

    learning_rate: float = 3e-3
    """Of Adam."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    baseline_decay: float = 0.9
    """Weight of the past in the moving average of rewards that rewards are compared with."""
    failing_until: float = 0.5
    """Share of learning after which placements that do not run teach nothing any more."""
    logit_noise: float = 0.5
    """Spread of the noise on the logits that samples are drawn with, over the size of these logits."""
    noise_until: float = 0.5
    """Share of learning after which there is no such noise."""
    ent_coef: float = 0.0
    """Weight of the mean entropy of a group."""
    elite_coef: float = 0.0
    """Weight of cloning the best placement seen; 0 is plain REINFORCE."""
    flips: float | None = None
    """Groups in which a sample differs from the mode on average, where the policy can be told; None lets it be sure."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "more than 0", where="reinforce")
        for name in ("failing_until", "noise_until"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidValue(name, getattr(self, name), "0..1", where="reinforce")
        for name in ("logit_noise", "ent_coef", "elite_coef"):
            if not getattr(self, name) >= 0:
                raise InvalidValue(name, getattr(self, name), "at least 0", where="reinforce")
        if self.flips is not None and not self.flips > 0:
            raise InvalidValue("flips", self.flips, "more than 0", where="reinforce")
        if not 0.0 <= self.baseline_decay < 1.0:
            raise InvalidValue("baseline_decay", self.baseline_decay, "at least 0 and less than 1", where="reinforce")


@dataclass(frozen=True)
class LearnConfig:
    """How the methods `policy` and `guided` learn; what is None goes with the policy and the learner (`recipe`)."""

    policy: str | None = None
    """Which policy proposes placements: placer, gnn, improver, schedule, or seq2seq (of the 2017 paper); placer by
    default."""
    learner: str | None = None
    """How it learns: ppo, reinforce, or clone (of the best placements seen); by default reinforce for seq2seq, ppo for
    the others."""
    reward: str | None = None
    """log_speedup, or sqrt as in the 2017 paper: the default of reinforce."""
    init: str | None = None
    """What the policy begins with: starts (imitates the portfolio's heuristics and tuned list schedules), none,
    pretrained (the weights that come with rlplace), or FILE.safetensors (kept by a run); by default none for seq2seq,
    pretrained for schedule, starts for the others."""
    share: float | None = None
    """Share of its search that the policy samples for; the rest anneals its best placement. 1 is the policy alone: the
    default of all but placer, which has 0.05."""
    num_samples: int | None = None
    """Simulated placements an update; by default 64 for placer, 16 for the others."""
    num_measured: int = 6
    """Measured placements an update."""
    screened: int | None = None
    """Samples simulated for each one that is measured, beside as many of the search's best; 1 measures samples as they
    come, and nothing else: the default of reinforce, 8 of the others."""
    placer: PlacerArchitecture = field(default_factory=PlacerArchitecture)
    """Of the policy `placer`."""
    gnn: GnnConfig = field(default_factory=GnnConfig)
    """Of the policy `gnn`."""
    improver: ImproverConfig = field(default_factory=ImproverConfig)
    """Of the policy `improver`."""
    seq2seq: Seq2SeqConfig = field(default_factory=Seq2SeqConfig)
    """Of the policy `seq2seq`."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Of the policy `schedule`."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Of the learner `ppo`."""
    clone: CloneConfig = field(default_factory=CloneConfig)
    """Of the learner `clone`."""
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    """Of the learner `reinforce`."""
    imitate: bool = True
    """Whether the policy imitates what search finds (expert iteration); otherwise it learns from its samples alone."""
    guided: GuideConfig = field(default_factory=GuideConfig)
    """Of a policy that guides a search."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        check_ranges(recipe, "learn", {"num_samples": (1, MOST_STEPS)})
        check_ranges(self, "learn", {"num_measured": (1, MOST_MEASURED)})
        if not 0.0 <= recipe.share <= 1.0:
            raise InvalidValue("share", recipe.share, "0..1", where="learn")
        check_ranges(recipe, "learn", {"screened": (1, MOST_MEASURED)})
        if recipe.init not in INITS and not recipe.init.endswith(WEIGHTS_ENDING):
            raise UnknownName("init", recipe.init, INITS, hint=f"Or name a file, FILE{WEIGHTS_ENDING}.")
        if recipe.init == "none" and not recipe.share:
            hint = "Without a start and without samples there is nothing to search from."
            raise InvalidValue("share", recipe.share, "more than 0 where init is none", where="learn", hint=hint)

    @property
    def recipe(self) -> Recipe:
        """What was chosen, completed by what goes with the policy and the learner."""
        return complete(
            self.policy,
            self.learner,
            reward=self.reward,
            init=self.init,
            share=self.share,
            num_samples=self.num_samples,
            screened=self.screened,
        )


MOST_WIDTH = 4096
MOST_LAYERS = 16
_MOST_WEIGHTS = 1 << 24
"""Of one matrix in each layer; a layer has about six, and Adam keeps two numbers more for each."""


def _check_weights(where: str, hidden: int, layers: int) -> None:
    if hidden * hidden * max(layers, 1) > _MOST_WEIGHTS:
        actual, expected = f"{hidden} in {layers} layers", f"hidden * hidden * layers at most {_MOST_WEIGHTS:,}"
        raise InvalidValue("hidden", actual, expected, where=where)


@dataclass(frozen=True)
class Recipe:
    """How a policy learns, with nothing left open; the fields are those of `LearnConfig`."""

    policy: str = "placer"
    learner: str = "ppo"
    reward: str = "log_speedup"
    init: str = "starts"
    share: float = 0.05
    screened: int = 8
    num_samples: int = 64


_OF_POLICY: Mapping[str, Mapping[str, Any]] = {
    "seq2seq": {"learner": "reinforce", "init": "none", "share": 1.0, "num_samples": 16},
    "gnn": {"share": 1.0, "num_samples": 16},
    "improver": {"share": 1.0, "num_samples": 16},
    "schedule": {"init": "pretrained", "share": 1.0, "num_samples": 16},
}
_OF_LEARNER: Mapping[str, Mapping[str, Any]] = {"reinforce": {"reward": "sqrt", "screened": 1}}


def complete(policy: str | None, learner: str | None, **chosen: Any) -> Recipe:
    """The recipe of a policy and a learner, with what was chosen (what is not None) in the place of its own.

    A policy decides on its learner, its start, its share of the search and its samples an update, a learner on what it
    takes for rewards and on which samples are measured. Policies and learners of other packages go by the defaults of
    `Recipe`.

    Example:
        >>> paper = complete("seq2seq", None)
        >>> paper.learner, paper.reward, paper.init, paper.share, paper.screened
        ('reinforce', 'sqrt', 'none', 1.0, 1)
        >>> own = complete(None, None, share=0.5)
        >>> own.policy, own.learner, own.init, own.share, own.num_samples
        ('placer', 'ppo', 'starts', 0.5, 64)
    """
    recipe = Recipe() if policy is None else Recipe(policy)
    recipe = replace(recipe, **_OF_POLICY.get(recipe.policy, {}))
    if learner is not None:
        recipe = replace(recipe, learner=learner)
    recipe = replace(recipe, **_OF_LEARNER.get(recipe.learner, {}))
    return replace(recipe, **{name: value for name, value in chosen.items() if value is not None})


@dataclass(frozen=True)
class PretrainConfig:
    """How weights of the policy `schedule` are trained."""

    seed: int = 0
    """Of problems, weights and gradient steps."""
    num_drawn: int = 240
    """Weights of the list scheduler that are drawn, each tried over every grouping."""
    drawn_problems: int = 64
    """Problems that they are tried on."""
    num_bases: int = 24
    """Those of them that do best together, which are varied."""
    num_varied: int = 160
    """Variations of them."""
    varied_problems: int = 120
    """Problems that these are tried on."""
    num_components: int = 128
    """Groupings with weights that the policy knows, of those tried."""
    problems: int = 600
    """Problems that each of them is simulated on, for the networks to learn from."""
    synthetic: float = 0.4
    """Share of problems whose graphs are synthetic; the others are captured models, or `graphs`."""
    captured: bool = True
    """Capture models too; without, all graphs are synthetic or of `graphs`."""
    graphs: tuple[Path, ...] = ()
    """Graph files that are trained on besides."""
    hidden: int = 32
    """Width of the networks."""
    steps: int = 600
    """Gradient steps of each network."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "pretrain")
        for name in (
            *("num_drawn", "drawn_problems", "num_bases", "num_varied", "varied_problems", "num_components"),
            *("hidden", "steps"),
        ):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="pretrain")
        if self.problems < 2:
            raise InvalidValue("problems", self.problems, "at least 2", where="pretrain")
        if not 0.0 <= self.synthetic <= 1.0:
            raise InvalidValue("synthetic", self.synthetic, "0..1", where="pretrain")
