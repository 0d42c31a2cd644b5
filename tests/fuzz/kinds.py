"""All kinds of cases, and how often each is drawn."""

from collections.abc import Callable
from random import Random

from fuzz.growth import growth_case
from fuzz.hostile import Case, entry_case, job_case, option_case, set_case
from fuzz.hostile_checkpoints import checkpoint_case
from fuzz.hostile_data import format_case
from fuzz.hostile_files import data_case, path_case, table_case, tokenizer_case
from fuzz.hostile_foreign import foreign_case
from fuzz.hostile_models import config_case, weights_case

KINDS: dict[str, tuple[Callable[[Random], Case], int]] = {
    "job": (job_case, 25), "set": (set_case, 20), "option": (option_case, 15), "table": (table_case, 12),
    "entry": (entry_case, 10), "data": (data_case, 10), "tokenizer": (tokenizer_case, 5), "path": (path_case, 3),
    "format": (format_case, 6),
}  # fmt: skip
# Drawn where somebody asks for them: checkpoints and weights need torch, and files of other systems what writes them.
ASKED_FOR: dict[str, tuple[Callable[[Random], Case], int]] = {
    "checkpoint": (checkpoint_case, 1), "config": (config_case, 1), "weights": (weights_case, 1),
    "foreign": (foreign_case, 1), "growth": (growth_case, 1),
}  # fmt: skip


def case_of(seed: int, number: int, kinds: list[str] | None = None) -> Case:
    """Case `number` of a seed: a function of both alone."""
    random = Random(f"{seed}:{number}")
    names = kinds or list(KINDS)
    known = KINDS | ASKED_FOR
    (name,) = random.choices(names, [known[kind][1] for kind in names])
    return known[name][0](random)
