"""Variables that launchers set in the environment, and faults in them."""

import pytest

from shardwright.config.base import PlanError
from shardwright.train.launch.rank_environment import RankEnvironment

RIGHT = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
ALL = (*RIGHT, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def seat(monkeypatch: pytest.MonkeyPatch, **variables: str) -> RankEnvironment | None:
    for name in (*ALL, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return RankEnvironment.from_environment()


def test_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seat(monkeypatch) is None
    assert seat(monkeypatch, MASTER_ADDR="node0", WORLD_SIZE="4") is None  # a shell of a cluster
    assert seat(monkeypatch, **RIGHT) == RankEnvironment(3, 3, 4, 4, "node0", 29500, store_is_up=False)
    of_torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    result = seat(monkeypatch, **RIGHT, **of_torchrun, TORCHELASTIC_USE_AGENT_STORE="True")
    assert result == RankEnvironment(3, 1, 4, 2, "node0", 29500, store_is_up=True, store_is_used=True)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("RANK", "x", "RANK is 'x', and not a whole number of at least 0"),
        ("RANK", "-1", "RANK is '-1', and not a whole number of at least 0"),
        ("RANK", "\u0663", "RANK is '\u0663', and not a whole number of at least 0"),
        ("RANK", "9" * 6000, "RANK is '" + "9" * 40 + "', and not a whole number"),
        ("RANK", "4", "RANK 4 is not below WORLD_SIZE 4: ranks count from 0"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0, and not from 1 to 16777216"),
        ("WORLD_SIZE", "", "RANK is set and WORLD_SIZE is not"),
        ("MASTER_ADDR", " ", "RANK is set and MASTER_ADDR is not"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536, and not from 1 to 65535"),
        ("LOCAL_RANK", "1e3", "LOCAL_RANK is '1e3', and not a whole number"),
        ("GROUP_RANK", "?", "GROUP_RANK is '?', and not a whole number"),
    ],
)
def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, fault: str) -> None:
    with pytest.raises(PlanError) as refusal:
        seat(monkeypatch, **(RIGHT | {name: value}))
    (result,) = refusal.value.faults
    assert result.startswith(fault)
    assert result.endswith("start the ranks with torchrun, or unset RANK to have them started here")


def test_all_wrong_variables_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError) as refusal:
        seat(monkeypatch, **dict.fromkeys(ALL, "x"))
    assert len(refusal.value.faults) == len(ALL) - 1  # an address may be anything
