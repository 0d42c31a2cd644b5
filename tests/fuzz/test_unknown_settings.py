"""Unknown settings in public jobs, a few of the draws that `make fuzz` makes."""

import pytest

from fuzz.unknown_settings import faults_of_seed


@pytest.mark.long
def test_an_unknown_setting_that_could_change_the_plan_is_refused_and_settled() -> None:
    assert faults_of_seed(seed=3, count=40) == []
