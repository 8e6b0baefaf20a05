"""Options of policies, learners and their training; importing this imports no torch.

`LearnConfig` names the policy, its learner and its start, and holds the options of each policy and learner. `Recipe` is
the set of choices that go together by default. Ranges stand
in the types of fields: options may come from a file, and networks are made before anything is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field

from rlplace.errors import UnknownName, refuse_if
from rlplace.records import NotNegative, Number, Positive, Share, Whole, record

MOST_WIDTH, MOST_LAYERS = 4096, 16
_MOST_WEIGHTS = 1 << 24
"""Of one matrix in each layer; a layer has about six, and Adam keeps two numbers more for each."""

Width = Annotated[Whole, Field(ge=1, le=MOST_WIDTH)]
Layers = Annotated[Whole, Field(ge=0, le=MOST_LAYERS)]
Steps = Annotated[Whole, Field(ge=1, le=10_000)]
"""Gradient steps, samples or elites of an update."""
Measured = Annotated[Whole, Field(ge=1, le=1_000)]
"""Measured placements of an update, or samples for each of them."""


def _check_weights(hidden: int, layers: int) -> None:
    refuse_if(
        hidden * hidden * max(layers, 1) > _MOST_WEIGHTS,
        "hidden",
        f"{hidden} in {layers} layers",
        f"hidden * hidden * layers at most {_MOST_WEIGHTS:,}",
    )


@record(frozen=True)
class GnnConfig:
    """The size of a `GnnPolicy`."""

    hidden: Width = 64
    """Width of the network."""
    num_layers: Layers = 2
    """Rounds of messages between groups before devices are looked at."""
    num_rounds: Annotated[Layers, Field(ge=1)] = 2
    """Rounds in which groups and devices see where groups are likely to be."""
    marks: Annotated[Whole, Field(ge=0, le=MOST_WIDTH)] = 8
    """Random numbers that tell devices apart that are equal otherwise."""

    def __post_init__(self) -> None:
        _check_weights(self.hidden, self.num_layers + self.num_rounds)


@record(frozen=True)
class ImproverConfig:
    """The size of an `ImproverPolicy`, and how far it goes."""

    hidden: Width = 32
    """Width of the network."""
    num_layers: Layers = 2
    """Rounds of messages between groups."""
    moves: Positive = 2.0
    """Groups that a pass moves on average before a learner says otherwise."""
    explore: Annotated[Share, Field(gt=0)] = 0.5
    """Share of the moves that are drawn at random, however much was learned: without them the same few moves that do
    no harm would be tried for ever."""

    def __post_init__(self) -> None:
        _check_weights(self.hidden, self.num_layers)


@record(frozen=True)
class ScheduleConfig:
    """The size of the policy `schedule`, and how far its samples leave its best guess."""

    hidden: Width = 32
    """Width of its networks; pretrained weights bring their own."""
    flips: Positive = 2.0
    """Groups in which a first sample differs from the mode, on average."""


@record(frozen=True)
class Seq2SeqConfig:
    """Sizes of the policy `seq2seq`, and how its logits are bounded."""

    hidden: Width = 64
    """Width of the decoder, and of the encoder's two directions together."""
    type_embedding: Width = 16
    """Width of the embedding of an op type."""
    device_embedding: Width = 16
    """Width of the embedding of a device."""
    attention: Width = 16
    """Width of the layer that scores groups for attention."""
    tanh_constant: Positive = 5.0
    """C of the logits C tanh(u / T)."""
    temperature: Positive = 1.0
    """T of the logits C tanh(u / T)."""

    def __post_init__(self) -> None:
        refuse_if(self.hidden % 2, "hidden", self.hidden, "an even number, shared by two directions")


INITS = ("starts", "none", "pretrained")
WEIGHTS_ENDING = ".safetensors"
"""How the name of a file of weights ends."""


@record(frozen=True)
class PlacerArchitecture:
    """The size of a policy."""

    hidden: Width = 64
    """Width of the encoder."""
    num_layers: Layers = 3
    """Rounds of messages."""
    table_scale: NotNegative = 10.0
    """How fast the free logits of each group (a table, added to the encoder's logits) learn; 0 leaves them out."""

    def __post_init__(self) -> None:
        _check_weights(self.hidden, self.num_layers)


@record(frozen=True)
class PPOConfig:
    """Options of `GroupPPO`; in `rlplace train` they are `--ppo.NAME`."""

    learning_rate: Positive = 3e-3
    """Of Adam."""
    batch_size: Annotated[Whole, Field(ge=2)] | None = None
    """Placements per gradient step; the whole rollout by default."""
    n_epochs: Steps = 3
    """Passes over a rollout."""
    clip_range: Positive = 0.2
    """Largest difference of the ratio of a group from 1."""
    normalize_advantage: bool = True
    """Divide the advantages of a minibatch by their standard deviation."""
    ent_coef: Number = 0.0
    """Weight of the mean entropy of a group."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    target_kl: Number | None = None
    """End a rollout's passes early if the mean divergence of a group is above 1.5 times this value."""
    flips: Positive = 2.0
    """Average number of groups in which a sample differs from the mode."""
    elite_coef: Number = 1.0
    """Weight of cloning the best placements; 0 is plain PPO."""
    num_elites: Steps = 1
    """Number of best placements to clone."""
    elite_smoothing: Number = 0.02
    """Label smoothing: the probability of other devices when cloning."""


@record(frozen=True)
class CloneConfig:
    """Options of `CloneLearner`."""

    learning_rate: Positive = 3e-3
    """Of Adam."""
    num_elites: Steps = 8
    """How many of the best placements are cloned; the mode after cloning several need not be one of them."""
    num_steps: Steps = 3
    """Gradient steps an update."""
    smoothing: Number = 0.02
    """Label smoothing: the probability of other devices when cloning."""
    flips: Positive = 2.0
    """Average number of groups in which a sample differs from the mode."""


@record(frozen=True)
class GuideConfig:
    """How far a search follows a policy that guides it; all can be reached from `rlplace train` as `--guided.NAME`."""

    starts: Share = 0.1
    """Share of a search's placements that are the policy's, to start from, where it was taught before."""
    moves: Share = 0.1
    """Share of annealing's moves that the policy proposes."""


@record(frozen=True)
class ReinforceConfig:
    """Options of `Reinforce`."""

    learning_rate: Positive = 3e-3
    """Of Adam."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    baseline_decay: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Weight of the past in the moving average of rewards (the baseline)."""
    failing_until: Share = 0.5
    """Share of the training after which failed placements are ignored."""
    logit_noise: NotNegative = 0.5
    """Standard deviation of the noise on the logits of samples, divided by the size of these logits."""
    noise_until: Share = 0.5
    """Share of the training after which there is no such noise."""
    ent_coef: NotNegative = 0.0
    """Weight of the mean entropy of a group."""
    elite_coef: NotNegative = 0.0
    """Weight of cloning the best placement seen; 0 is plain REINFORCE."""
    flips: Positive | None = None
    """Average number of groups in which a sample differs from the mode, if the policy supports it; None does not
    control it."""


@record(frozen=True)
class LearnConfig:
    """Options of the methods `policy` and `guided`; a field that is None gets the default of the policy and the learner
    (`recipe`)."""

    policy: str | None = None
    """The policy that proposes placements: placer, gnn, improver, schedule, or seq2seq (of the 2017 paper); placer by
    default."""
    learner: str | None = None
    """The learner of the policy: ppo, reinforce, or clone (imitates the best placements seen); by default reinforce for
    seq2seq, ppo for the others."""
    reward: str | None = None
    """log_speedup, or sqrt as in the 2017 paper: the default of reinforce."""
    init: str | None = None
    """The start of the policy: starts (imitates the portfolio's heuristics and tuned list schedules), none,
    pretrained (the weights that come with rlplace), or FILE.safetensors (written by a run); by default none for
    seq2seq, pretrained for schedule, starts for the others."""
    share: Share | None = None
    """Share of the search for samples of the policy; the rest anneals the best placement. With 1, only the policy
    searches: the default of all policies except placer, which has 0.05."""
    num_samples: Steps | None = None
    """Simulated placements per update; by default 64 for placer, 16 for the others."""
    num_measured: Measured = 6
    """Measured placements per update."""
    screened: Measured | None = None
    """Samples simulated for each measured sample; as many of the best simulated placements are measured, too. With 1,
    all samples are measured, and nothing else: the default of reinforce; 8 for the others."""
    placer: PlacerArchitecture = field(default_factory=PlacerArchitecture)
    """Options of the policy `placer`."""
    gnn: GnnConfig = field(default_factory=GnnConfig)
    """Options of the policy `gnn`."""
    improver: ImproverConfig = field(default_factory=ImproverConfig)
    """Options of the policy `improver`."""
    seq2seq: Seq2SeqConfig = field(default_factory=Seq2SeqConfig)
    """Options of the policy `seq2seq`."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Options of the policy `schedule`."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Options of the learner `ppo`."""
    clone: CloneConfig = field(default_factory=CloneConfig)
    """Options of the learner `clone`."""
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    """Options of the learner `reinforce`."""
    imitate: bool = True
    """Whether the policy imitates the best placements of searches (expert iteration); otherwise it learns only from its
    samples."""
    guided: GuideConfig = field(default_factory=GuideConfig)
    """Options of a policy that guides a search."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        if recipe.init not in INITS and not recipe.init.endswith(WEIGHTS_ENDING):
            raise UnknownName("init", recipe.init, INITS, hint=f"Or name a file, FILE{WEIGHTS_ENDING}.")
        refuse_if(
            recipe.init == "none" and not recipe.share,
            "share",
            recipe.share,
            "more than 0 where init is none: without a start and samples there is nothing to search from",
        )

    @property
    def recipe(self) -> Recipe:
        """The options, completed with defaults of the policy and the learner.

        The policy determines the learner, the start, the share of the search and the samples per update. The learner
        determines the reward and which samples are measured. Policies and learners of other packages have the defaults
        of `Recipe`.

        Example:
            >>> paper = LearnConfig(policy="seq2seq").recipe
            >>> paper.learner, paper.reward, paper.init, paper.share, paper.screened
            ('reinforce', 'sqrt', 'none', 1.0, 1)
        """
        chosen = {one.name: value for one in fields(Recipe) if (value := getattr(self, one.name)) is not None}
        of_policy = _OF_POLICY.get(self.policy or Recipe.policy, {})
        learner = {**of_policy, **chosen}.get("learner", Recipe.learner)
        return Recipe(**{**of_policy, **_OF_LEARNER.get(learner, {}), **chosen})


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
