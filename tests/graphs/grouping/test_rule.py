import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.grouping.groups import RULES, GroupingRule


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_a_word(name):
    assert GroupingRule.parse(name) == GroupingRule(name)


def test_options_follow_colons():
    assert GroupingRule.parse("module:3:apart") == GroupingRule("module", depth=3, is_apart=True)
    assert GroupingRule.parse("colocation:enc.*,out") == GroupingRule("colocation", cells=("enc.*", "out"))


@pytest.mark.parametrize(
    "word", ["module:0", "module:x", "module:1:away", "module:1:apart:2", "metis:3", "colocation:", "none:1", "module:"]
)
def test_options_that_are_not_there_are_refused(word):
    with pytest.raises(InvalidValue, match="grouping rule is"):
        GroupingRule.parse(word)


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'heavy-edge'"):
        GroupingRule.parse("heavyedge")
