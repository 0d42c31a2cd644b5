"""A second process of the server that makes the memory of a plan and its traffic, while the first one makes its step
and its timeline: `python -m shardwright.studio.part_process LANGUAGE` reads questions as lines of JSON, and prints an
answer to each.
"""

import asyncio
import gc
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from shardwright.config.phrase import ENGLISH, spoken
from shardwright.report.plan_parts import Part
from shardwright.simulate.closed_form import StepTime
from shardwright.studio.page_state import PageState
from shardwright.studio.plan_answer import PlanAnswers, warm_up

PART = "memory"  # with the traffic about half of the time of all parts but the step
AFTER_STEP = "links"  # the traffic, which takes the time of the step
_MOST_LINE = 2**26  # bytes of one answer
_NEW_OBJECTS = 100_000  # after so many Python looks for garbage


class PartProcess:
    """The process, which ends with the block that `running` begins, or with the server. It answers one question after
    the other. A question whose future is cancelled is not asked; if it was, its answer is read and left."""

    def __init__(self, language: str = ENGLISH) -> None:
        self._language = language
        self._process: Process | None = None
        self._waiting, self._asking = asyncio.Lock(), asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the process during a block, if there is a second processor for it."""
        if (os.cpu_count() or 1) == 1:
            yield
            return
        words = [sys.executable, "-m", __name__, self._language]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=PIPE, stdout=PIPE, limit=_MOST_LINE, start_new_session=True
        )
        beginning = asyncio.ensure_future(self._begin(process))
        try:
            yield
        finally:
            self._process = None
            beginning.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # its pipes are closed while there is a loop

    @property
    def is_ready(self) -> bool:
        """True if it waits for questions."""
        return self._process is not None and self._process.returncode is None

    def ask(
        self, state: PageState, known: dict[str, str], part: str = PART, step: StepTime | None = None
    ) -> "asyncio.Future[bytes]":
        """The line of a part of a state, whose step takes `step` if the caller knows; empty if there is none, since the
        plan has faults or the process has ended."""
        question = {"part": part, "state": dict(state.texts), "known": known, "step": step and asdict(step)}
        return asyncio.ensure_future(self._answer(question))

    async def _begin(self, process: Process) -> None:
        assert process.stdout is not None
        if await process.stdout.readline():
            self._process = process

    async def _answer(self, question: dict[str, Any]) -> bytes:
        async with self._waiting:
            return await asyncio.shield(asyncio.ensure_future(self._asked(question)))

    async def _asked(self, question: dict[str, Any]) -> bytes:
        async with self._asking:
            process = self._process
            if process is None:
                return b""
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                return line if line and json.loads(line)["part"] == question["part"] else b""
        return b""


def made_part(answers: PlanAnswers, question: dict[str, Any]) -> Part:
    """The part of a question's state, or the faults of its plan."""
    state, step = PageState.read(question["state"]), question["step"]
    if step is not None:
        answers.take_step(state, StepTime(**step))
    return next(answers.parts(state, (question["part"],), question["known"]))


def main() -> None:
    """Print a line when all is loaded, and answer the questions of standard input until it ends."""
    gc.set_threshold(_NEW_OBJECTS)  # an account is many small objects, few of which are in cycles
    warm_up()
    print(flush=True)
    language = sys.argv[1]
    answers = PlanAnswers(language)
    for line in sys.stdin:
        part = spoken(made_part(answers, json.loads(line)), language)
        print(json.dumps(part, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
