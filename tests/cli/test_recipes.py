"""`docs/recipes.md` says what `plan` answers: the line of each case is what the page's own command says now."""

import pytest

from support.recipe_plans import PAGE, TABLE, cases, row

pytestmark = pytest.mark.usefixtures("searched_once")

CASES = cases(PAGE.read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.sampled(10)
@pytest.mark.parametrize("title", CASES)
def test_the_page_has_the_answer_of_the_command(title: str) -> None:
    (table,) = TABLE.findall(PAGE.read_text(encoding="utf-8"))
    assert row(title, CASES[title]) in table.splitlines(keepends=True), "run `make pages`"
    assert table.count("\n") == 2 + len(CASES)
