import re

import pytest

from fadex.quant import Recipe, Rule, Site, int_group, nvfp4, razer_e3m3
from fadex.quant.recipes import as_recipe

A, B = nvfp4(), int_group(4, 32)


@pytest.mark.smoke
@pytest.mark.parametrize("pattern, yes, no", [
    ("kernel", ["kernel"], ["a/kernel", "kernel2", "kernel/x"]),
    ("*/kernel", ["a/kernel"], ["kernel", "a/b/kernel"]),
    ("**/kernel", ["kernel", "a/kernel", "a/b/c/kernel"], ["akernel", "a/kernels", "a/kernel/b"]),
    ("layers/**/kernel", ["layers/kernel", "layers/0/mlp/kernel"], ["x/layers/kernel", "layers"]),
    ("layers/**", ["layers/a", "layers/a/b"], ["layers", "mylayers/a"]),
    ("layers/*", ["layers/a"], ["layers/a/b", "layers"]),
    ("**", ["", "a", "a/b"], []),
    ("layers/?/w", ["layers/0/w"], ["layers/10/w", "layers//w"]),
    ("layers/[0-3]/w", ["layers/2/w"], ["layers/4/w", "layers/-/w", "layers/3"]),
    ("layers/[!0]/w", ["layers/2/w"], ["layers/0/w", "layers///w"]),
    ("a.b/w+(1)", ["a.b/w+(1)"], ["axb/w+(1)", "a.b/ww(1)"]),
    ("a[b", ["a[b"], ["ab"]),
    ("*_proj/w*", ["q_proj/w", "q_proj/weight"], ["q_proj/a/w", "x/q_proj/w"]),
    ("a/**/b/**/c", ["a/b/c", "a/x/b/y/z/c"], ["a/c", "b/c"]),
    (re.compile(r".*kernel"), ["a/kernel", "kernel"], ["kernel/x"]),
    (re.compile(r"layers/\d+/w"), ["layers/12/w"], ["layers/x/w", "x/layers/1/w"]),
])
def test_patterns_match_whole_paths(pattern, yes, no):
    rule = Rule(pattern, A)
    for path in yes:
        assert rule.matches(path), path
    for path in no:
        assert not rule.matches(path), path


def test_the_first_match_decides():
    recipe = Recipe((("**/embedding", None), ("**/kernel", A), ("layers/**", B), ("**", None)))
    assert recipe.match("layers/0/kernel").target is A
    assert recipe.match("layers/0/gain").target is B
    assert recipe.match("embedding").target is None
    assert recipe.match("head").pattern == "**"
    assert Recipe([("a", A)]).match("b") is None


def test_strict_recipes_name_the_pattern_and_the_paths():
    rules = (("**/kernl", A), ("**", None))
    with pytest.raises(ValueError, match=r"pattern '\*\*/kernl' matches no path; .* the paths are "
                                         r"a/kernel, b \(strict=False"):
        Recipe(rules).resolve(["a/kernel", "b"])
    with pytest.raises(ValueError, match=r"pattern 'x\+' matches no path"):
        Recipe([(re.compile("x+"), A)]).resolve(["a"])
    assert set(Recipe(rules, strict=False).resolve(["a/kernel", "b"])) == {"a/kernel", "b"}
    many = [f"layer{i}" for i in range(30)]
    with pytest.raises(ValueError, match=r"layer19, \.\.\. \(strict"):
        Recipe([("x", A)]).resolve(many)
    # The catch-all may find nothing left; a rule that an earlier one shadows is not misspelt.
    found = Recipe([("**", A), ("**/kernel", B)]).resolve(["a/kernel"])
    assert found["a/kernel"].target is A
    assert Recipe([("a", A), ("**", B)]).resolve(["a"])["a"].target is A


def test_axis_is_the_contraction_axis_except_for_embeddings_and_what_a_rule_says():
    rule = Rule("**", A)
    assert rule.axis_for("layers/kernel") == -2
    assert rule.axis_for("tok/embedding") == rule.axis_for("embedding") == -1
    assert rule.axis_for("embedding/kernel") == -2
    assert Rule("**", A, -3).axis_for("embedding") == -3


def test_recipes_are_hashable_and_made_from_what_is_at_hand():
    rules = [("**/kernel", A), ("**", Site(B, A))]
    assert hash(Recipe(rules)) == hash(Recipe(tuple(rules))) and Recipe(rules) == Recipe(rules)
    assert Recipe(rules) != Recipe(rules, strict=False)
    assert as_recipe(A) == Recipe((("**", A),)) and as_recipe(rules) == Recipe(rules)
    assert as_recipe(Recipe(rules)) == Recipe([Rule("**/kernel", A), ("**", Site(B, A))])
    assert Recipe([("a", A, -1)]).rules[0].axis == -1


def test_errors_name_the_argument():
    for call, error, message in (
        (lambda: Recipe(A), TypeError, "rules: expected a sequence of"),
        (lambda: Recipe([A]), TypeError, r"recipe: expected \(pattern, format\) or a Rule"),
        (lambda: Recipe([("a",)]), TypeError, r"recipe: expected \(pattern, format\) or a Rule"),
        (lambda: Recipe([(3, A)]), TypeError, "recipe: a pattern is a string or a compiled"),
        (lambda: Recipe([("a", "nvfp4")]), ValueError, "recipe: 'a': expected a Format such as"),
        (lambda: Recipe([("a", A, "x")]), TypeError, "recipe: 'a': axis must be an integer"),
        (lambda: Recipe([("a", nvfp4)]), ValueError, r"did you mean nvfp4\(\)\?"),
        (lambda: Recipe([("[z-a]", A)]).match("a"), ValueError, r"recipe: pattern '\[z-a\]'"),
        (lambda: as_recipe("nvfp4"), TypeError, "recipe: expected a Recipe, a Format, a Site"),
        (lambda: Site("int8"), ValueError, "weights: expected a Format or None, got 'int8'"),
        (lambda: Site(razer_e3m3(), 4), ValueError, "activations: expected a Format or None"),
    ):
        with pytest.raises(error, match=message):
            call()
