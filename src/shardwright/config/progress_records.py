"""The progress of work: records of a logger, which a program may listen to.

Each record says in its message what is being done. It has `share`, of the whole work that an answer takes, or `part`,
(number, of so many parts of equal length): the shares of the records after it are those of this part.
"""

import logging

LOGGER = logging.getLogger("shardwright.progress")


def tell_share(words: str, share: float) -> None:
    """Record that a share of the work is done."""
    LOGGER.info(words, extra={"share": share})


def tell_part(words: str, number: int, num_parts: int) -> None:
    """Record that a part of the work begins; the first has number 0."""
    LOGGER.info(words, extra={"part": (number, num_parts)})
