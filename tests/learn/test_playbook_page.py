"""The grid of the playbook on its page is what the measured runs and their predictions are now."""

import pytest

from shardwright.learn.idea_pages import LANGUAGES, IdeaPage
from support.playbook_page import cells, chosen, fastest, filled, plan_text


@pytest.mark.long
@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_are_those_of_now(language: str) -> None:
    text = IdeaPage("playbook", language).markdown
    assert filled(text, language) == text, "run tests/support/playbook_page.py"


def test_each_cell_has_its_fastest_run_and_a_choice_that_fits() -> None:
    assert sum(map(len, cells().values())) == 664 and len(cells()) == 10
    for runs in cells().values():
        assert all(run.row.step_s >= fastest(runs).row.step_s for run in runs)
        assert chosen(runs).fits
    assert plan_text(fastest(cells()[16, 8])) == "dp 8, zero 0, mb 2"
