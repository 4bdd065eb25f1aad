"""Every key of a file has its line, in TOML and in YAML."""

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import JobError
from shoal.jobfile import _from_toml, _from_yaml
from shoal.jobfile._tree import Node, Problems

EXAMPLES = Path(__file__).parents[2] / "examples"

TOML = '''# a comment with [brackets] and = signs
a = 1
"b c" = "text with # and ] and \\" inside"  # tail
d.e.f = 'lit\\eral'
long = """
two lines
of "text" = [x]"""
list = [
  1,
  { x = 1, y.z = [2,
    3] },  # comment, with comma
  "s",
]
[table]
k = 1979-05-27 07:32:00
[table.inner]
"quoted.key" = true
[[rows]]
n = 1
[[rows]]
n = 2
[rows.sub]
m = 3
[[rows.deep]]
q = 4
'''


def lines(node: Node, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """Path -> line, for all values."""
    found = {path: node.line}
    if not isinstance(node.value, (dict, list)):
        return found
    for key, child in node.value.items() if isinstance(node.value, dict) else enumerate(node.value):
        found |= lines(child, (*path, key))
    return found


def test_toml_lines() -> None:
    root = _from_toml.read(TOML, Problems("a.toml"))
    assert root.plain() == tomllib.loads(TOML)
    found = lines(root)
    expected = {
        ("a",): 2, ("b c",): 3, ("d", "e", "f"): 4, ("long",): 5, ("list",): 8, ("list", 0): 9, ("list", 1): 10,
        ("list", 1, "y", "z", 0): 10, ("list", 1, "y", "z", 1): 10, ("list", 2): 12, ("table",): 14,
        ("table", "k"): 15, ("table", "inner"): 16, ("table", "inner", "quoted.key"): 17, ("rows",): 18,
        ("rows", 0): 18, ("rows", 0, "n"): 19, ("rows", 1): 20, ("rows", 1, "n"): 21, ("rows", 1, "sub"): 22,
        ("rows", 1, "sub", "m"): 23, ("rows", 1, "deep", 0): 24, ("rows", 1, "deep", 0, "q"): 25,
    }  # fmt: skip
    assert {path: found[path] for path in expected} == expected


KEYS = st.sampled_from(["a", "b-c", "d_1", '"q.r"', "'s t'", '"\\u00e9"'])
SCALARS = st.sampled_from(
    [
        "1",
        "-2.5e3",
        "true",
        "nan",
        '"x = [1] # no"',
        "'lit'",
        '"""m\nn"""',
        "'''o'p'''",
        '"""[\n"""',
        "'''\n]'''",
        "2020-01-01 10:00:00",
        '"\\""',
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: "[\n " + ",\n # c ]\n".join(v) + "\n]")
        | st.dictionaries(KEYS, inner, max_size=3).map(
            lambda d: "{ " + ", ".join(f"{k} = {v}" for k, v in d.items()) + " }"
        )
    ),
    max_leaves=8,
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=4).map(lambda d: "".join(f"{k} = {v}  # tail\n" for k, v in d.items()))
LISTS = ("many", "more")
HEADERS = st.sampled_from(["[one]", "[one.two]", "[[many]]", "[many.sub]", "[ 'x' . y ]", "[[many.more]]"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(TABLES, st.lists(st.tuples(HEADERS, TABLES), max_size=4))
def test_every_key_of_any_toml_has_its_line(top: str, rest: list[tuple[str, str]]) -> None:
    text = top + "".join(f"\n{head} # c\n{body}" for head, body in rest)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    source = text.split("\n")
    for path, line in lines(_from_toml.read(text, Problems("a.toml"))).items():
        if path and not any(isinstance(key, int) and before not in LISTS for before, key in pairwise(path)):
            keys = [key for key in path if isinstance(key, str)]
            assert any(key in source[line - 1] or not key.isascii() for key in keys), (path, line)
        assert 1 <= line <= len(source) and (not path or source[line - 1].strip())


YAML = """\
# comment
model: &m
  use: mlp
  hidden: 3
hparams.lr: 1e-3
on: yes
list:
  - 1
  - {a: .inf, b: 0x10}
  - [x, ~, 07]
copy: {<<: *m, hidden: 4}
"""


def test_yaml_lines_and_values() -> None:
    root = _from_yaml.read(YAML, Problems("a.yaml"))
    assert root.plain() == {
        "model": {"use": "mlp", "hidden": 3},
        "hparams": {"lr": 0.001},
        "on": "yes",
        "list": [1, {"a": float("inf"), "b": 16}, ["x", None, 7]],
        "copy": {"use": "mlp", "hidden": 4},
    }
    found = lines(root)
    assert found[("model",)] == 2 and found[("model", "hidden")] == 4
    assert found[("hparams", "lr")] == 5
    assert found[("list", 1)] == 9 and found[("list", 2, 1)] == 10


@pytest.mark.parametrize("text", ["1e-3", "1E5", "-3", "+.5", "1.", ".nan", "-.inf", "12", "0o17", "true"])
def test_yaml_numbers_are_those_of_version_1_2(text: str) -> None:
    value = _from_yaml.read(f"a: {text}", Problems("a.yaml")).plain()["a"]
    assert isinstance(value, (int, float))


@pytest.mark.parametrize("text", ["yes", "no", "on", "1:30", "2020-01-01", "1_000", "'1'", '"true"', "1e", "e3", "."])
def test_yaml_words_are_text(text: str) -> None:
    assert isinstance(_from_yaml.read(f"a: {text}", Problems("a.yaml")).plain()["a"], str)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = 1\nb = \n", 2), ("a = 1\na = 2\n", 2), ("a = 1\n[x\n", 2), ('\n\na = """x\n', 3), ("a = {b=1\n", 1)],
)
def test_broken_toml_has_its_line(text: str, line: int) -> None:
    with pytest.raises(JobError, match=rf"^a\.toml:{line}: ") as caught:
        _from_toml.read(text, Problems("a.toml"))
    assert len(caught.value.lines) == 1
