"""Lines of settings that a faster plan changes."""

import shlex

import pytest

from shardwright.report.flag_changes import SettingChange, _line


@pytest.mark.parametrize("value", ["Ett|ttL", "Et*3|t*3L", "plain"])
def test_a_flag_can_be_pasted_into_a_shell(value: str) -> None:
    line = _line("--", SettingChange("pipeline-model-parallel-layout", None, value))
    assert shlex.split(line) == ["+", "--pipeline-model-parallel-layout", value]
    assert ("'" in line) == (value != "plain")


def test_a_setting_of_a_file_stays_as_it_is() -> None:
    assert _line("", SettingChange("parallelism.layout", "a|b", "c|d")) == "  parallelism.layout a|b -> c|d"
