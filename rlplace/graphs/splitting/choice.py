"""`choose`: which dimensions of a step a `SplitPlan` splits, found from chains of products.

What an index does in the forward says what it is: the output of one product with a parameter and the sum of another is
the hidden width between them; the same with a product of two activations in between that runs over it is a head; the
output of a product that a softmax loss runs over is a vocabulary. Names of modules say nothing here.

`SoftmaxLoss`: a softmax with its negative log-likelihood, whose classes can be split.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import module_of
from rlplace.graphs.capturing.lower import tensor_bytes
from rlplace.graphs.capturing.portable import attention
from rlplace.graphs.program import SplitPlan
from rlplace.graphs.splitting.dimensions import PRODUCTS, Atom, Dim, Dimensions, argument, leaves, shows

aten = torch.ops.aten

LARGE = 16
"""A table is split by columns if it has more than the bytes of all tables over this ..."""
LARGE_UPDATE = 1000
"""... and a parameter is updated in parts if it has more than those of all over this: gpt2 in 4 micro-batches on
`4xV100-pcie` takes 305 ms whole, 298 with 16 here, 295 with 64 and 283 with 1000."""
_COUNTED = {"attention": " heads, or groups of heads that share keys and values"}
EVEN = 1.1
"""An update is in parts along the first dimension where the largest has at most this many times its share."""


@dataclass(frozen=True)
class SoftmaxLoss:
    """The ops of a mean or sum of negative log-likelihoods of a softmax.

    Attributes:
        logits: (N, classes).
        softmax: the logarithm of the softmax.
        loss: of `softmax`.
        backward: from the gradient of the loss to that of `softmax`; None in inference.
        gradient: of the logits, from `backward`.
        aliases: of `softmax`.
    """

    logits: Node
    softmax: Node
    loss: Node
    backward: Node | None
    gradient: Node | None
    aliases: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node | None, ...]:
        """All of its ops."""
        return self.softmax, *self.aliases, self.loss, self.backward, self.gradient


def softmax_losses(graph: torch.fx.Graph) -> Iterator[SoftmaxLoss]:
    """The softmax losses of a graph whose other ops read nothing of them but the loss and the gradient of logits."""
    for softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        aliases, readers, seen = list[Node](), list[Node](), [softmax]
        while seen:
            for user in seen.pop().users:
                is_alias = user.target in (aten.detach.default, aten.alias.default)
                (aliases if is_alias else readers).append(user)
                seen += [user] if is_alias else []
        users = {user.target: user for user in readers}
        loss = users.pop(aten.nll_loss_forward.default, None)
        backward = users.pop(aten.nll_loss_backward.default, None)
        gradient = users.pop(aten._log_softmax_backward_data.default, None)
        logits: Any = softmax.args[0]
        fits = (
            not users
            and len(readers) == 1 + 2 * (backward is not None)
            and logits.meta["val"].dim() == 2
            and softmax.args[1] in (1, -1)
            and loss is not None
            and loss.args[2] is None
            and loss.args[3] in (1, 2)
            and (backward is None) == (gradient is None)
        )
        if backward is not None and gradient is not None:
            fits = fits and set(backward.users) == {gradient} and gradient.args[0] is backward
        if fits and loss is not None:
            yield SoftmaxLoss(logits, softmax, loss, backward, gradient, tuple(aliases))


@dataclass(frozen=True)
class Choice:
    """What is split.

    Attributes:
        classes: by atom that is split, its class.
        parameters: placeholders, each with the atom that it is split along; one without a class where ops stay whole.
        tokens: atoms along which sums are cut into chunks.
    """

    classes: dict[Atom, str]
    parameters: dict[Node, Atom]
    tokens: frozenset[Atom] = frozenset()


def is_forward(node: Node) -> bool:
    """Whether an op belongs to the forward."""
    return bool((node.meta.get("custom") or {}).get("phase", "forward") == "forward")


class _Roles:
    """What each atom is used for in the forward.

    Attributes:
        of: by atom, its roles: `out`, `in` (of a product with a parameter), `heads` (of a product of activations),
            `loss`, `result`, `rows`, `columns` (of a table), `routed` (tokens that were picked, and what is made of
            them), `whole` (an op needs all of it).
        first: by atom, the op that first has it.
    """

    def __init__(self, graph: torch.fx.Graph, dimensions: Dimensions, parameters: Sequence[Node]) -> None:
        self.of: dict[Atom, set[str]] = {}
        self.first: dict[Atom, Node] = {}
        self._dimensions, self._parameters = dimensions, set(parameters)
        self._over_heads: list[Node] = []
        losses = list(softmax_losses(graph))
        apart = {node for loss in losses for node in loss.nodes}
        for node in graph.nodes:
            if node.op == "call_function" and is_forward(node) and node not in apart:
                self._add(node)
        for loss in losses:
            self._mark("loss", loss.loss, dimensions.of[loss.logits][1])

    def _mark(self, role: str, node: Node, *dims: Dim) -> None:
        for dim in dims:
            for leaf in leaves(dim):
                self.of.setdefault(leaf, set()).add(role)
                self.first.setdefault(leaf, node)

    def _add(self, node: Node) -> None:
        use, of = self._dimensions.uses.get(node), self._dimensions.of
        if use is None:
            for read in node.all_input_nodes:
                if isinstance(of.get(read), tuple) and not _is_list(node):
                    self._mark("whole", node, *of[read])
            return
        if node.target in PRODUCTS:
            self._add_product(node)
        elif node.target is aten.embedding.default:
            rows, columns = of[argument(node, 0)]
            self._mark("rows", node, rows)
            self._mark("columns", node, columns)
        elif node.target is aten.index_select.default:
            self._mark("routed", node, of[node][int(argument(node, 1))])
            self._mark("whole", node, *use.whole)
        else:
            if node.target is attention:
                self._mark("heads", node, *use.batch)
                self._over_heads.append(node)
            self._mark("whole", node, *use.whole, *use.summed)

    def _add_product(self, node: Node) -> None:
        of = self._dimensions.of
        one, other = (argument(node, position) for position in PRODUCTS[node.target])  # type: ignore[index]
        are_parameters = [shows(each) in self._parameters for each in (one, other)]
        rows, columns, summed = of[one][-2], of[other][-1], of[one][-1]
        if not any(are_parameters):
            # heads that share keys and values are rows, with their tokens; an outer product has two such sides
            is_of_heads = len(leaves(rows)) > 1 >= len(leaves(columns))
            self._mark("heads", node, *self._dimensions.uses[node].batch, *[rows] * is_of_heads)
            self._mark("whole", node, columns, summed, *[rows] * (not is_of_heads))
            self._over_heads.append(node)
            return
        out, tokens = (columns, rows) if are_parameters[1] else (rows, columns)
        self._mark("out", node, out)
        self._mark("in", node, summed)
        if any("routed" in self.of.get(leaf, ()) for leaf in leaves(tokens)):
            self._mark("expert", node, out, summed)

    def where_heads_end(self) -> str:
        """The op before a product of activations that needs whole what a projection makes, in words.

        Of several the one that is nearest to the projection: others see only what it makes of it.
        """
        of, found = self._dimensions.of, ""
        queue, seen = [*self._over_heads], {*self._over_heads}
        for node in queue:
            if node not in self._over_heads:
                if node.target in PRODUCTS or node.op != "call_function":
                    continue
                use = self._dimensions.uses.get(node)
                read = [] if node.target is operator.getitem else node.all_input_nodes
                needed = use.whole if use else [dim for one in read for dim in of.get(one, ())]
                if any("out" in self.of.get(leaf, ()) for dim in needed for leaf in leaves(dim)):
                    found = (
                        f": op {node.target} in module {module_of(node) or 'the root'} needs all that a projection "
                        "makes, the heads among it. Project queries, keys and values apart, or to parts of one size"
                    )
            queue += [one for one in node.all_input_nodes if one not in seen]
            seen.update(node.all_input_nodes)
        return found


def _is_list(node: Node) -> bool:
    """Whether an op makes something that is no tensor of what it reads."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))


def choose(
    graph: torch.fx.Graph,
    dimensions: Dimensions,
    parameters: Sequence[Node],
    results: Sequence[Node],
    plan: SplitPlan,
    num_trainable: int,
) -> Choice:
    """What a plan splits.

    Args:
        graph: of the step.
        dimensions: of its tensors.
        parameters: placeholders.
        results: what an inference returns; nothing for training.
        plan: what to split.
        num_trainable: parameters that are updated, the first ones.

    Raises:
        CaptureError: a shard would have nothing in it, or there is nothing to split.
    """
    roles = _Roles(graph, dimensions, parameters)
    returned = {leaf for node in results for dim in dimensions.of[node] for leaf in leaves(dim)}
    atoms_of = {one: [leaf for dim in dimensions.of[one] for leaf in leaves(dim)] for one in parameters}
    tables = _large_tables(parameters)
    readers: dict[Atom, list[Node]] = {}
    for one, atoms in atoms_of.items():
        for atom in atoms:
            readers.setdefault(atom, []).append(one)
    classes: dict[Atom, str] = {}
    split: dict[Node, Atom] = {}
    empty: list[tuple[Atom, str]] = []
    for name in plan.classes:
        for atom in roles.first:  # in the order of the ops
            own = readers.get(atom, ())
            if not own or name != _class_of(roles.of[atom], is_result=atom in returned, is_table=set(own) <= tables):
                continue
            if any(one in split or atoms_of[one].count(atom) > 1 for one in own):
                continue
            bounds = plan.bounds(atom.size)
            if min(end - start for start, end in pairwise(bounds)) < 1:
                empty.append((atom, name))
                continue
            classes[atom] = name
            split.update(dict.fromkeys(own, atom))
    # it stays whole where others of its class, or a factor of the same dimension, are split
    for atom, name in empty:
        if name not in classes.values() and not any(one in split for one in readers[atom]):
            node = roles.first[atom]
            raise CaptureError(
                f"cannot split {name} by {plan.parts}: op {node.target} in module {module_of(node) or 'the root'} runs "
                f"over {atom.size}{_COUNTED.get(name, '')}, and a shard would have nothing of it. Take fewer or more "
                f"even parts, or leave {name!r} out.",
                op=str(node.target),
            )
    if "updates" in plan.classes:
        split |= dict(_updates(parameters[:num_trainable], dimensions, Choice(classes, split), plan))
    if not split:
        untrained = "" if num_trainable or "updates" not in plan.classes else ", and it updates no parameter"
        heads = roles.where_heads_end() if "attention" in plan.classes else ""
        raise CaptureError(
            f"cannot split {', '.join(plan.classes)}: the step has none of them that a chain of products with "
            f"parameters shows{untrained}{heads}. Leave `split` out."
        )
    by_tokens = plan.reduce == "chunks"
    tokens = frozenset(_tokens(dimensions, set(parameters), classes, plan)) if by_tokens else frozenset[Atom]()
    return Choice(classes, split, tokens)


def _tokens(dimensions: Dimensions, parameters: set[Node], classes: dict[Atom, str], plan: SplitPlan) -> Iterator[Atom]:
    """Of each product and lookup whose results are partial, the dimension of its tokens whose chunks are most even."""
    of = dimensions.of
    for node in dimensions.uses:
        if node.target in PRODUCTS:
            one, other = (argument(node, position) for position in PRODUCTS[node.target])
            are_parameters = [shows(each) in parameters for each in (one, other)]
            summed, tokens = of[one][-1], leaves(of[one][-2] if are_parameters[1] else of[other][-1])
            if not any(are_parameters):
                continue
        elif node.target is aten.embedding.default:
            summed, tokens = of[argument(node, 0)][0], [leaf for dim in of[argument(node, 1)] for leaf in leaves(dim)]
        else:
            continue
        even = {leaf: _unevenness(plan, leaf.size) for leaf in tokens if leaf not in classes}
        if even and min(even.values()) < math.inf and not classes.keys().isdisjoint(leaves(summed)):
            yield min(even, key=even.__getitem__)


def _unevenness(plan: SplitPlan, size: int) -> float:
    """The largest chunk over its share of so many indices; infinite where a chunk would be empty."""
    sizes = [end - start for start, end in pairwise(plan.bounds(size))]
    most = max(own * sum(plan.shares) / (share * size) for own, share in zip(sizes, plan.shares, strict=True))
    return most if all(sizes) else math.inf


def _class_of(roles: set[str], *, is_result: bool, is_table: bool) -> str:
    """What an atom is, for its roles; empty where it cannot be split."""
    if "columns" in roles and roles == {"columns"} and is_table:
        return "tables"
    if "whole" in roles:
        return ""
    if "out" in roles and ("loss" in roles or (is_result and "in" not in roles)):
        return "vocabulary"
    if not {"in", "out"} <= roles or roles & {"rows", "columns", "loss"}:
        return ""
    return "attention" if "heads" in roles else "experts" if "expert" in roles else "mlp"


def _large_tables(parameters: Sequence[Node]) -> set[Node]:
    """Parameters that only lookups read, and that are large among these."""
    return _large([one for one in parameters if _is_table(one)])


def _is_table(parameter: Node) -> bool:
    users = [user for user in parameter.users if is_forward(user)]
    return bool(users) and all(user.target is aten.embedding.default and user.args[0] is parameter for user in users)


def _large(parameters: Sequence[Node], least: int = LARGE) -> set[Node]:
    sizes = {one: tensor_bytes(one.meta["val"]) for one in parameters}
    return {one for one, size in sizes.items() if size * least > sum(sizes.values())}


def _updates(
    trainable: Sequence[Node], dimensions: Dimensions, choice: Choice, plan: SplitPlan
) -> Iterator[tuple[Node, Atom]]:
    """Large parameters of which nothing is split, each with the dimension along which it is updated in parts.

    Tables are left out: their gradients are made of the lookups of all micro-batches at once.
    """
    large = _large(trainable, LARGE_UPDATE)
    for one in trainable:
        if one in large and one not in choice.parameters and not _is_table(one):
            atoms = [leaf for dim in dimensions.of[one] for leaf in leaves(dim)]
            free = [leaf for leaf in atoms if leaf not in choice.classes and atoms.count(leaf) == 1]
            if even := [leaf for leaf in free if _unevenness(plan, leaf.size) <= EVEN]:
                yield one, even[0]
