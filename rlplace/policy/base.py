"""Policies and learners, the common part of policies, and their checkpoints.

`Policy`, `Learner` and the other protocols define their interfaces; `PolicyModule` and `IndependentPolicy` are base
classes with defaults, which a policy may inherit and need not. `ProblemTensors` is a problem as networks take it.

A checkpoint holds weights as safetensors and everything else as JSON beside them; loading runs no code. Weights that
come with the package, trained by `scripts/pretrain.py`, are in the folder `weights`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import Parameter

from rlplace.env import ProblemFeatures
from rlplace.errors import FileProblem, check_known, refuse_if
from rlplace.files import check_header, read_json, read_plain, write_bytes_atomic, write_json_atomic
from rlplace.records import read_record, shortened

SCHEMA = 1
LARGEST_BYTES = 256 << 20
"""Of a file of weights; those of policies have a few megabytes."""
_STRANGE = (
    *(SafetensorError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of safetensors, PyTorch and NumPy on tensors, numbers or names that are not the expected ones."""


def save_checkpoint(path: str | os.PathLike[str], about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` to `path` (`policy.safetensors`) and `about`, with its `schema` and `kind`, beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    path = Path(path)
    write_bytes_atomic(path, save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}))
    write_json_atomic(path.with_suffix(".json"), dict(about))


def load_checkpoint(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors that `save_checkpoint` wrote for a policy of that kind.

    Raises:
        FileProblem: a file is missing, malformed, or of another kind.
    """
    path = Path(path)
    about_path = path.with_suffix(".json")
    data = read_plain(path, largest_bytes=LARGEST_BYTES, holds="weights", follows_links=True)
    about = read_json(about_path, hint=f"It describes the weights of {path.name}: put it beside them.")
    if not isinstance(about, dict) or about.get("schema") != SCHEMA or about.get("kind") != kind:
        raise FileProblem(about_path, _another(about, kind))
    check_header(data, path)
    with refusing(path, f"not the weights of {about_path.name}"):
        return about, load(data)


def _another(about: object, kind: str) -> str:
    wrong = f"not a policy of schema {SCHEMA} and kind {kind!r}"
    actual = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(actual, str) or actual == kind:
        return f"{wrong}."
    reader = f"`load_checkpoint(path, {actual!r})` reads what its `save` kept"
    return f"{wrong}, but of kind {actual!r}: {reader}. If that is a policy, `--policy {actual}` takes it."


@contextmanager
def refusing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """While active, an error of tensors, numbers or names that do not fit is one of the file.

    Raises:
        FileProblem: such an error; `what` is the beginning of the message.
    """
    try:
        yield
    except _STRANGE as error:
        raise FileProblem(path, f"{what}: {shortened(str(error))}.") from error


Sizes = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Types and shapes of tensors, by name."""


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Sizes, path: str | os.PathLike[str], what: str = "not these weights"
) -> None:
    """Refuses tensors of a checkpoint that a network cannot use, before anything of their size is made.

    Args:
        tensors: as `load_checkpoint` returned them.
        expected: of each that is needed; any floating-point type will do for another.
        path: of the checkpoint, for messages.
        what: the beginning of the message.

    Raises:
        FileProblem: one is missing, of another shape or type, or holds numbers that are not finite.
    """
    for name, (dtype, shape) in expected.items():
        found, wanted = tensors.get(name), tuple(shape)
        are_real = found is not None and found.is_floating_point() and dtype.is_floating_point
        if found is None or tuple(found.shape) != wanted or not (are_real or found.dtype == dtype):
            looks = "missing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise FileProblem(path, f"{what}: {name} is {looks}, expected {wanted} {dtype}.")
        if found.is_floating_point() and not bool(torch.isfinite(found.float()).all()):
            raise FileProblem(path, f"{name} holds numbers that are not finite.")


def set_tensors(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    what: str = "weights of a policy of another size",
) -> None:
    """Sets parameters and buffers to those of the same names in a checkpoint; `check_tensors` refuses wrong ones."""
    check_tensors(tensors, {name: (tensor.dtype, tensor.shape) for name, tensor in own.items()}, path, what)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def set_all(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Sets all parameters and buffers of a module to those of a checkpoint, which may hold no others.

    Raises:
        FileProblem: names or shapes are others.
    """
    with refusing(path, f"not the weights of {path.with_suffix('.json').name}"):
        module.load_state_dict(tensors)


def pretrained_kinds() -> tuple[str, ...]:
    """Names of the policies whose pretrained weights come with the package."""
    folder = files("rlplace.policy.weights")
    return tuple(sorted(Path(one.name).stem for one in folder.iterdir() if one.name.endswith(".safetensors")))


def pretrained_path(kind: str) -> Path:
    """The file of the pretrained weights of a policy; their description is beside it (`.json`).

    Raises:
        UnknownName: there are none for that policy.
    """
    hint = "Others begin with weights of a run: FILE.safetensors."
    check_known("pretrained policy", kind, pretrained_kinds(), hint=hint)
    with as_file(files("rlplace.policy.weights") / f"{kind}.safetensors") as path:
        return path


@runtime_checkable
class Policy(Protocol):
    """A distribution over placements of a problem's G groups on D devices."""

    @property
    def num_groups(self) -> int:
        """G, the number of groups."""

    @property
    def num_devices(self) -> int:
        """D, the number of devices."""

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) sampled devices of groups; with `rng`, or by default with the policy's own generator."""

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G), with gradients."""

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest placement, or an approximation of it."""

    def save(self, path: Path) -> None:
        """Writes the weights to `path` (safetensors), and the description of the policy to a `.json` file in the same
        folder."""


@runtime_checkable
class LearnedPolicy(Policy, Protocol):
    """A policy with parameters: the policies that `reinforce` can teach."""

    def parameters(self) -> Iterator[Parameter]:
        """The parameters to learn."""


@runtime_checkable
class GroupPolicy(LearnedPolicy, Protocol):
    """A policy that decides group by group; `ppo` needs such a policy.

    Its log-probability is the sum of those of `evaluate` over groups, each conditional on the groups before it.
    """

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients."""


@runtime_checkable
class Loadable(Policy, Protocol):
    """A policy that takes weights from a file: the interface that `--init FILE` needs."""

    @property
    def kind(self) -> str:
        """The kind of policy that its checkpoints name."""

    def load(self, path: Path) -> None:
        """Takes the weights that `save` wrote; refuses those that do not fit."""


@runtime_checkable
class Straying(Protocol):
    """A policy that can be told how far its samples stray from its best guess."""

    def set_flips(self, flips: float) -> None:
        """Lets samples differ from the best guess in about `flips` groups."""


@runtime_checkable
class Tempered(Protocol):
    """A policy that divides its logits by a temperature, in samples as in log-probabilities."""

    temperature: Tensor


@runtime_checkable
class StartsSomewhere(Protocol):
    """A policy that proposes placements around one that is known: its log-probabilities depend on that one."""

    def start_from(self, group_devices: NDArray[np.integer]) -> None:
        """Proposes from now on around the placement (G,)."""


@runtime_checkable
class Learner(Protocol):
    """Trains a policy, in place."""

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Trains the policy to imitate good placements (G,) or (M, G)."""

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """Learns from placements (B, G) and their rewards (B,); figures of the update by name.

        If `update` has the keyword `ran`, it gets (B,) bool: whether each placement ran to its end.

        Args:
            group_devices: devices of groups, from the policy or elsewhere.
            rewards: larger is better; all finite.
            progress: finished share of the training, 0 to 1, for schedules.
        """

    def forget(self) -> None:
        """Forgets earlier rewards, for example after their meaning has changed."""


class PolicyModule(nn.Module):
    """A network that is a distribution over placements of G groups on D devices, decided group by group.

    A subclass defines `sample`, `mode` and `evaluate`. The rest of a policy's functions have a default: its
    log-probability is the sum over groups, and its file holds its options and weights.

    Attributes:
        kind: in its files, names the policy.
        config: its options, a dataclass; kept in its files. None for none.
        num_groups: groups that it places, G.
        num_devices: devices that it places them on, D.
        generator: draws the samples.
        suits: facts of the problems that its weights suit alone, by name: kept in its files, and the same in those that
            it loads.
        problem_buffers: names of the buffers that describe the problem; a state of a learner does not change them.
    """

    kind: str = ""
    config: Any = None
    suits: Mapping[str, Sequence[str]] = MappingProxyType({})
    problem_buffers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, allowed_GD: NDArray[np.bool_], seed: int) -> None:
        """A policy without weights yet.

        Args:
            allowed_GD: (G, D), where each group may be.
            seed: of the samples.
        """
        super().__init__()
        self.num_groups, self.num_devices = allowed_GD.shape
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        """In one line: that of a network would print every layer."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{type(self).__name__}({self.num_groups:,} groups on {self.num_devices} devices, {count:,} parameters)"

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients."""
        raise NotImplementedError

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G)."""
        return self.evaluate(group_devices)[0].sum(dim=-1)

    def drawing(self, rng: np.random.Generator | None) -> torch.Generator:
        """The generator of samples: the policy's own, which goes on, or one that `rng` seeds."""
        return self.generator if rng is None else torch.Generator().manual_seed(int(rng.integers(2**63)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes weights and buffers to `path` (`policy.safetensors`), kind and options beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        options = {} if self.config is None else dataclasses.asdict(self.config)
        about = {"schema": SCHEMA, "kind": self.kind, "options": options, **self.suits}
        save_checkpoint(path, about, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes the weights that a policy with the same options saved.

        Raises:
            FileProblem: a file is missing, malformed, of another kind or for other problems, or has weights of other
                shapes.
            InvalidValue: the policy there has other options.
        """
        self.load_weights(path)

    def load_weights(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """As `load`; returns all tensors of the file, among them buffers that suit the same problem alone."""
        about, tensors = load_checkpoint(path, self.kind)
        about_path = str(Path(path).with_suffix(".json"))
        if self.config is not None:
            saved = read_record(type(self.config), about.get("options"), about_path)
            refuse_if(
                saved != self.config,
                "options",
                str(self.config),
                str(saved),
                where=f"policy {self.kind}",
                hint=f"Give the policy the options of {about_path}.",
            )
        for name, values in self.suits.items():
            if about.get(name) != list(values):
                raise FileProblem(about_path, f"weights for a problem of other {name} than this one.")
        set_tensors(dict(self.named_parameters()), tensors, path)
        return tensors


class IndependentPolicy(PolicyModule):
    """A policy that decides every group by itself: a subclass defines `logits` alone.

    Attributes:
        temperature: divides logits, both for samples and for log-probabilities; `set_flips` sets it.
    """

    temperature: Tensor

    def __init__(self, allowed_GD: NDArray[np.bool_], seed: int) -> None:
        super().__init__(allowed_GD, seed)
        self.register_buffer("temperature", torch.ones(()))

    def load_weights(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """As that of any policy, and the temperature."""
        tensors = super().load_weights(path)
        set_tensors({"temperature": self.temperature}, tensors, path)
        return tensors

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity where a group may not be."""
        raise NotImplementedError

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn at the policy's temperature; by `rng` or by its own generator."""
        with torch.no_grad():
            log_probs_GD = torch.log_softmax(self.logits() / self.temperature, dim=-1)
        return drawn(log_probs_GD, num_samples, self.drawing(rng)).numpy().astype(np.int32)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest device of each group; the lower index where two are equal."""
        with torch.no_grad():
            return self.logits().argmax(dim=-1).numpy().astype(np.int32)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of devices (B, G) of groups, and entropies (B, G), at the policy's temperature."""
        return chosen_and_entropy((self.logits() / self.temperature)[None], group_devices)

    def set_flips(self, flips: float) -> None:
        """Sets the temperature at which a sample differs from the mode in `flips` groups, on average."""
        with torch.no_grad():
            self.temperature = torch.tensor(temperature_for(self.logits(), flips))


LEAST_LOG_PROB = -1e30
"""A finite stand-in for minus infinity, which keeps gradients finite."""


def chosen_and_entropy(logits_BGD: Tensor, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, G) of devices (B, G) by logits (B or 1, G, D), and entropies (B, G) in nats.

    A logit of minus infinity bars its device: it has no probability and adds nothing to the entropy.
    """
    devices_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
    log_probs_BGD = torch.log_softmax(logits_BGD, dim=-1)
    entropy_BG = -(log_probs_BGD.exp() * log_probs_BGD.clamp(min=LEAST_LOG_PROB)).sum(-1)
    chosen_BG = log_probs_BGD.expand(len(devices_BG), -1, -1).gather(-1, devices_BG[..., None])[..., 0]
    return chosen_BG, entropy_BG.expand(len(devices_BG), -1)


def gumbel(
    shape: tuple[int, ...] | torch.Size, generator: torch.Generator | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Noise of a shape: the largest of logits with this noise is one drawn from their softmax (Gumbel-max)."""
    return -(-torch.rand(shape, generator=generator, dtype=dtype).log()).log()


def drawn(log_probs_GD: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """(num_samples, G) int64 devices by log-probabilities (G, D), every group by itself."""
    return (log_probs_GD.double() + gumbel((num_samples, *log_probs_GD.shape), generator)).argmax(-1)


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Layers that are made within draw their weights from `seed`; PyTorch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed GPUs too, beyond the fork
        yield


def device_marks(features: ProblemFeatures, width: int, seed: int) -> Tensor:
    """(D, width) float32 random numbers that tell equal devices apart."""
    twins = features.twins()
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((int(twins.max()) + 1, width))[twins]).float()


LEAST_WEIGHT = 0.01
"""Weight of an edge that carries next to nothing, in mean costs of a group."""


@dataclass(frozen=True, eq=False)
class ProblemTensors:
    """A problem of G groups, K edges and D devices.

    Attributes:
        nodes: (G, F) float32.
        edges: (K, Fe) float32.
        edge_source, edge_target: (K,) int64.
        edge_weight: (K,) float32, seconds of each edge in mean costs of a group.
        devices: (D, Fd) float32: features of each device, and the summary of the problem.
        pairs: (G, D, Fp) float32.
        links: (D, D, Fl) float32.
        load: (G, D) float32, the work that each group adds to each device, in even shares of the step.
        held: (G, D) float32, the memory that it adds to each device's fullness.
        allowed: (G, D) bool.
    """

    nodes: Tensor
    edges: Tensor
    edge_source: Tensor
    edge_target: Tensor
    edge_weight: Tensor
    devices: Tensor
    pairs: Tensor
    links: Tensor
    load: Tensor
    held: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, features: ProblemFeatures) -> ProblemTensors:
        """Those of `features`."""
        arrays = features.arrays
        summary = torch.from_numpy(features.summary).expand(len(features.devices), -1)
        return cls(
            nodes=torch.from_numpy(features.nodes),
            edges=torch.from_numpy(features.edges),
            edge_source=torch.from_numpy(arrays.edge_source),
            edge_target=torch.from_numpy(arrays.edge_target),
            edge_weight=(torch.from_numpy(arrays.edge_s() / arrays.unit_s) + LEAST_WEIGHT).float(),
            devices=torch.cat([torch.from_numpy(features.devices), summary], dim=-1),
            pairs=torch.from_numpy(features.pairs),
            links=torch.from_numpy(features.links),
            load=torch.from_numpy(arrays.cost_s / arrays.share_s).float(),
            held=torch.from_numpy(arrays.held_bytes[:, None] / arrays.room_bytes).float(),
            allowed=torch.from_numpy(arrays.allowed.copy()),
        )


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
BISECTIONS = 30


def temperature_for(logits_GD: Tensor, flips: float) -> float:
    """The divisor of logits with which a sample differs from the mode in `flips` groups on average.

    Which groups are flipped, and to which device, depends on the policy: those that it is least sure of. A policy sure
    of everything would propose one placement for ever; an unsure one would change too much at once to tell which flip
    made a placement better.

    Args:
        logits_GD: (G, D), minus infinity where a group may not be.
        flips: more than 0; where no temperature gives as many, or as few, the nearest of the range is taken.
    """
    logits_GD = logits_GD.double()
    return divisor_for(flips, lambda divisor: logits_GD / divisor, LEAST_TEMPERATURE, MOST_TEMPERATURE, BISECTIONS)


def divisor_for(flips: float, logits_of: Callable[[float], Tensor], low: float, high: float, steps: int) -> float:
    """The largest divisor in a range with which samples differ from the mode in at most `flips` groups on average.

    Args:
        flips: groups.
        logits_of: (G, D) logits for a divisor; the larger it is, the more alike they are.
        low: end of the range.
        high: its other end.
        steps: bisections, of the logarithm.
    """
    for _ in range(steps):
        middle = (low * high) ** 0.5
        expected = (1.0 - torch.softmax(logits_of(middle), dim=-1).amax(dim=-1)).sum()
        low, high = (low, middle) if expected > flips else (middle, high)
    return low


@contextmanager
def at_temperature_1(policy: object) -> Iterator[None]:
    """While active, a policy that has a temperature has that of 1: its training holds for any way of sampling."""
    if not isinstance(policy, Tempered):
        yield
        return
    before, policy.temperature = policy.temperature, torch.ones(())
    try:
        yield
    finally:
        policy.temperature = before
