"""Pictures of placements: what lies where is what `explain` prints, and each change has the collective of the page."""

import re

import pytest

from shardwright.learn.cut_tensors_figure import CutTensor, mlp_chains, placement_changes
from shardwright.learn.idea_pages import LANGUAGES, IdeaPage
from support.learn_pages import BLOCK

WORDS = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all"}


def chain_of(title: str) -> list[CutTensor | str]:
    return dict(mlp_chains())[title]


def cuts(chain: list[CutTensor | str]) -> list[str]:
    """Each tensor as rows, columns, whole or part, and each collective by its name."""
    shown = []
    for one in chain:
        if isinstance(one, CutTensor):
            kind = one.placement.kind
            shown.append({"replicate": "whole", "partial": "part"}.get(kind, "rows" if one.cuts_rows else "columns"))
        elif one in WORDS:
            shown.append(one)
    return shown


def test_columns_then_rows_leave_one_sum_after_a_pair_and_one_before_it_on_the_way_back() -> None:
    assert cuts(chain_of("forward")) == ["whole", "columns", "columns", "rows", "part", "all-reduce", "whole"]
    assert cuts(chain_of("backward")) == ["whole", "columns", "part", "all-reduce", "whole"]


def test_sequence_parallel_cuts_tokens_between_pairs() -> None:
    shown = cuts(chain_of("forward, with sequence parallel"))
    assert shown == ["rows", "all-gather", "whole", "columns", "columns", "rows", "part", "reduce-scatter", "rows"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_four_changes_are_the_table_of_the_page(language: str) -> None:
    cells = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", IdeaPage("placements", language).markdown, re.MULTILINE)
    rows = cells[1:]  # after the heading
    assert [chain[1] for _, chain in placement_changes()] == rows
    assert set(rows) == WORDS


def test_what_a_pair_of_products_leaves_is_what_explain_prints() -> None:
    """The page's first question shows the placement of an output product, which the picture has of a pair's end."""
    blocks = BLOCK.finditer(IdeaPage("placements", "en").markdown)
    (printed,) = (block["output"] for block in blocks if "output product" in block["command"])
    (_, chain), *_ = placement_changes()
    (part, _, _) = chain
    assert isinstance(part, CutTensor)
    assert f"tp {part.placement.dtensor}" in printed and part.label == "Partial(), P"
