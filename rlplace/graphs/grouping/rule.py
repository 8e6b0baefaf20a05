"""`GroupingRule`: the word that says how ops are grouped, checked and taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.errors import InvalidValue, UnknownName

RULES = ("heavy-edge", "colocation", "module", "device-map", "metis", "none")
DEVICE_MAP = "device-map"


@dataclass(frozen=True)
class GroupingRule:
    """A rule with its options.

    | word | groups |
    |---|---|
    | `heavy-edge` | merged where sending costs more than it gains, heaviest edges first |
    | `colocation` | the 2017 paper's: an op with its gradient, an op with its only consumer |
    | `colocation:PATTERN,...` | the same, and each module that a pattern matches is one group |
    | `module` | the ops of a module |
    | `module:DEPTH` | the ops of a module and all below it, DEPTH names deep |
    | `module:DEPTH:apart` | the same, with forward, backward and update apart |
    | `device-map` | what a Hugging Face device map cannot take apart; a constraint, not only a start |
    | `metis` | a balanced partition with few bytes cut |
    | `none` | every op by itself |

    Attributes:
        name: one of `RULES`.
        depth: names of a module path that count; 0 for all of them.
        is_apart: whether the phases of a module are groups of their own.
        cells: patterns of modules that are one group each.
    """

    name: str
    depth: int = 0
    is_apart: bool = False
    cells: tuple[str, ...] = ()

    @classmethod
    def parse(cls, word: str) -> GroupingRule:
        """The rule that `word` names.

        Raises:
            UnknownName: no such rule.
            InvalidValue: an option that the rule does not have.

        Example:
            >>> GroupingRule.parse("module:2")
            GroupingRule(name='module', depth=2, is_apart=False, cells=())
        """
        name, *options = word.split(":")
        if name not in RULES:
            raise UnknownName("grouping rule", name, RULES)
        if name == "colocation" and len(options) == 1 and all(options[0].split(",")):
            return cls(name, cells=tuple(options[0].split(",")))
        if name == "module" and 1 <= len(options) <= 2 and options[0].isdecimal() and int(options[0]) > 0:
            if options[1:] in ([], ["apart"]):
                return cls(name, depth=int(options[0]), is_apart=bool(options[1:]))
        elif not options:
            return cls(name)
        raise InvalidValue(
            "grouping rule",
            word,
            "heavy-edge, colocation, colocation:PATTERN,..., module, module:DEPTH, module:DEPTH:apart, device-map, "
            "metis or none",
        )
