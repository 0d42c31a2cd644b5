"""Commands that jobs are written as, taken apart as a launcher would: the words behind the program."""

from functools import cache

from interchange.drawn_jobs import jobs_of
from shardwright.interchange.exported import exported
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.system import SYSTEMS

NUM_EXPORTS = 30


@cache
def exports(name: str) -> list[dict[str, str]]:
    """Files of 30 different plans."""
    return [exported(SYSTEMS[name], job).files for job in jobs_of(SYSTEMS[name], seed=5, count=NUM_EXPORTS)]


def arguments_of(script: str, program: str = ".py") -> list[str]:
    """The arguments of the program that a script starts, by the ending of its name."""
    followed = Script(Variables())
    followed.follow(script)
    words = followed.commands[-1].words
    at = next(place for place, word in enumerate(words) if word.endswith(program))
    return words[at + 1 :]
