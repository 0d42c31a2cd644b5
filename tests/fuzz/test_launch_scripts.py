"""Launch scripts drawn at random, a few of those that `tests/fuzz/launch_scripts.py` draws."""

from fuzz.launch_scripts import read_of_seed


def test_the_plan_is_that_of_the_last_command_and_its_files() -> None:
    ways, faults, refusals = read_of_seed(seed=7, count=60)
    assert faults == [] and refusals == []
    assert ways["as meant"] == 60
