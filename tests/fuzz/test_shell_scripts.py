"""Shell scripts drawn at random, a few of the draws that `make fuzz` makes."""

from fuzz.draw_scripts import FORMS
from fuzz.shell_scripts import read_of_seed, ways_of_forms


def test_a_script_that_is_followed_has_the_values_of_bash() -> None:
    """Three of four are followed, so that this says something."""
    ways, faults = read_of_seed(seed=7, count=100)
    assert faults == []
    assert ways["as bash"] > 65 and ways["the job of bash"] > 1


def test_most_forms_are_followed() -> None:
    forms = ways_of_forms(seed=5, count=1)
    assert len(forms) == sum(map(len, FORMS.values()))
    assert not any(ways["otherwise"] for ways in forms.values())
    assert sum(ways["as bash"] for ways in forms.values()) > 0.9 * len(forms)
