"""`LearnConfig`: which policy learns, how, and from what; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlplace.errors import InvalidValue, UnknownName

INITS = ("starts", "none")


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
        for name, least in (("hidden", 1), ("num_layers", 0), ("table_scale", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidValue(name, value, f"at least {least}", where="policy")


@dataclass(frozen=True)
class PPOConfig:
    """Options of `PlacerPPO`; all can be reached from `rlplace train` as `--ppo.NAME`."""

    learning_rate: float = 3e-3
    """Of Adam."""
    n_steps: int = 1
    """Steps of all envs a rollout."""
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
    """Label smoothing in cloning."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "n_epochs", "num_elites"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="PPO")
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
    """How many of the best placements are cloned."""
    num_steps: int = 3
    """Gradient steps an update."""
    smoothing: float = 0.02
    """Label smoothing."""
    flips: float = 2.0
    """Groups in which a sample differs from the mode, on average."""

    def __post_init__(self) -> None:
        for name in ("num_elites", "num_steps"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="clone")
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
class LearnConfig:
    """How the methods `policy` and `guided` learn."""

    policy: str = "placer"
    """Which policy proposes placements."""
    learner: str = "ppo"
    """How it learns: ppo, or clone (of the best placements seen)."""
    reward: str = "log_speedup"
    """log_speedup, or sqrt as in the 2017 paper."""
    init: str = "starts"
    """What the policy imitates first: starts (the portfolio's heuristics and tuned list schedules), or none."""
    share: float = 0.05
    """Share of its search that the policy samples for; the rest anneals its best placement. 1 is the policy alone."""
    num_samples: int = 64
    """Simulated placements an update."""
    num_measured: int = 6
    """Measured placements an update."""
    placer: PlacerArchitecture = field(default_factory=PlacerArchitecture)
    """Of the policy `placer`."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Of the learner `ppo`."""
    clone: CloneConfig = field(default_factory=CloneConfig)
    """Of the learner `clone`."""
    imitate: bool = True
    """Whether the policy imitates what search finds (expert iteration); otherwise it learns from its samples alone."""
    guided: GuideConfig = field(default_factory=GuideConfig)
    """Of a policy that guides a search."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_measured"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="learn")
        if not 0.0 <= self.share <= 1.0:
            raise InvalidValue("share", self.share, "0..1", where="learn")
        if self.init not in INITS:
            raise UnknownName("init", self.init, INITS)
        if self.init == "none" and not self.share:
            hint = "Without a start and without samples there is nothing to search from."
            raise InvalidValue("share", self.share, "more than 0 where init is none", where="learn", hint=hint)
