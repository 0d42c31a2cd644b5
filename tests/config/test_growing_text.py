"""Text of a few hundred bytes that would take a parser minutes or gigabytes: refused before it is read."""

import json
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.toml_file import parse_toml, read_toml
from shardwright.config.user_file import FileFault
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.planner.search.constraints import constraints_of

PARTS = ".".join("a" * 20_000)
LONG_KEYS = {
    "bare": f"{PARTS} = 1",
    "a table": f"x = 1\n[{PARTS}]",
    "an array of tables": f"[[{PARTS}]]",
    "quoted": ".".join(['"a"', "'b'"] * 9) + " = 1",
    "with blanks": " . ".join(["a-b", "c_d"] * 9) + " = 1",
    "inline": "x = { " + ".".join("abcdefghijklmnopq") + " = 1 }",
    "behind a string": 'x = "\\"" # "\n' + PARTS + " = 1",
    "behind a text that ends in a quote": 'x = ["""a"""", """ """]\n' + PARTS + ' = 1\ny = """ """',
    "behind a literal that ends in one": "x = ['''a'''', ''' ''']\n" + PARTS + " = 1\ny = ''' '''",
    "between texts of a line": 'x = { y = """a"""", ' + PARTS + ' = 1, z = "b" }',
    "behind lines of text": 'x = """\na \\""" b\\\\"""\n' + PARTS + " = 1",
}


@pytest.mark.parametrize("name", LONG_KEYS)
def test_dotted_keys_are_bounded(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(LONG_KEYS[name])
    with pytest.raises(FileFault, match=r"is not valid TOML: a key has more than 16 parts \(about line \d\)"):
        read_toml(tmp_path / "job.toml")
    with pytest.raises(ShellFault, match="a key has more than 16 parts"):
        read_data("job.toml", LONG_KEYS[name])


@pytest.mark.parametrize(
    "text",
    [
        f"x = '{PARTS}'", f'x = "{PARTS}"', f"x = '''\n{PARTS}'''", f'x = """\n{PARTS}"""', f"# {PARTS}\nx = 1",
        "x = 1 # \"\ny = '#'\n" + ".".join("abcdefgh") + " = 1", "x = [1.5, 2.5]\n'a.b'.c = 2",
    ],
)  # fmt: skip
def test_dots_elsewhere_are_none(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


@given(st.text("a.'\"#\\\n =[]", max_size=60))
def test_what_is_let_through_is_what_toml_has(text: str) -> None:
    """And nothing with a key of many parts is."""
    try:
        expected = tomllib.loads(text)
    except ValueError:
        return
    assert parse_toml(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a" * 1_000_000, "a " * 500_000, '"' * 1_000_000, "'" * 999_999, '"""' + "\\" * 10**6, '"\\' * 500_000,
        '\\"""' * 250_000, "'''a''" * 160_000,
    ],
)  # fmt: skip
def test_the_look_at_keys_takes_no_longer_than_the_text(text: str) -> None:
    before = time.process_time()
    with pytest.raises(ValueError, match=r"line 1|end of document"):
        parse_toml(text)
    assert time.process_time() - before < 10  # a square of a million steps would be hours


def test_limits_of_the_search_are_read_so_too() -> None:
    for value in ("1" * 5000, "[" * 5000, "{" + PARTS + " = 1}"):
        with pytest.raises(PlanError, match=r"plan\.tp"):
            constraints_of([f"plan.tp={value}"], [])


# Of a size that can be read, if slowly, where nothing is refused; the fuzzer of growth has larger ones.
MERGES = {
    "ten of ten": "a0: &a0 {" + ", ".join(f"q{n}: 1" for n in range(10)) + "}\n"
    + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 6)),
    "many of many": "a: &a {" + ", ".join(f"q{n}: 1" for n in range(5000)) + "}\nb:\n  <<: [" + "*a, " * 50 + "]\n",
    "one in another": "a0: &a0 {q: 1, r: 2}\n"
    + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 18)),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGES)
def test_merge_keys_are_bounded(name: str) -> None:
    assert len(MERGES[name]) < 150_000
    with pytest.raises(ShellFault, match=r"line \d+: merge keys \(<<\) that make more than 200,000 values; mend it"):
        read_data("merge.yaml", MERGES[name])


def test_a_mapping_that_merges_itself() -> None:
    with pytest.raises(ShellFault, match="a mapping that merges itself"):
        read_data("merge.yaml", "a: &a\n  <<: *a\n  x: 1\n")
    with pytest.raises(ShellFault, match="a mapping that merges itself"):
        read_data("merge.yaml", "a: &a\n  b: &b\n    <<: [{c: 1, <<: *b}]\n")


keys = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1)


@given(st.lists(keys, min_size=1, max_size=4), keys)
def test_usual_merges_are_as_yaml_says(merged: list[dict[str, int]], own: dict[str, int]) -> None:
    """A key of one's own goes before a merged one, and an earlier merge before a later one."""
    lines = [f"m{n}: &m{n} {json.dumps(pairs)}" for n, pairs in enumerate(merged)]
    all_of_them = ", ".join(f"*m{n}" for n in range(len(merged)))
    lines += ["x:", f"  <<: [{all_of_them}]", *(f"  {key}: {value}" for key, value in own.items())]
    expected = {key: value for pairs in reversed(merged) for key, value in pairs.items()} | own
    assert read_data("merge.yaml", "\n".join(lines))["x"] == expected


@pytest.mark.parametrize("value", ["!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!int x", "2001-13-45"])
def test_a_value_that_is_not_of_its_type_is_a_fault(value: str) -> None:
    with pytest.raises(ShellFault, match=r"it is not valid YAML: a value can't be read as its type \(\w+\); mend it"):
        read_data("a.yaml", f"a: {value}")


def test_words_of_a_script_take_time_by_their_number(tmp_path: Path) -> None:
    """Ten times the words of an array take some ten times as long, and not a hundred times."""
    took_s = []
    for number in (6_000, 60_000):
        words = (
            "A=(--hidden-size 64 --num-layers "
            + "word " * number
            + ")\ntorchrun pretrain_gpt.py --tensor-model-parallel-size 1 ${A[@]}\n"
        )
        (tmp_path / "run.sh").write_text(words)
        before = time.process_time()
        run = CliRunner().invoke(cli, ["import", "megatron", str(tmp_path / "run.sh")])
        took_s.append(time.process_time() - before)
        assert isinstance(run.exception, PlanError)
        assert "--num-layers word word" in str(run.exception)
    assert took_s[1] < 30 * took_s[0]
