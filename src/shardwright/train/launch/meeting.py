"""The name of an attempt: all ranks that are started together have it, and none that were started before.

torchrun restarts ranks in the store of the attempts before, where addresses of dead ranks are still to be read. It
numbers restarts by agent, and only the agent whose rank failed counts one, so that ranks of one attempt may be told
different numbers (torch.distributed.elastic.agent.server). What it does promise is that no rank of an attempt is
started while one of an earlier attempt runs: an agent stops its ranks before it joins the next round. So each rank
leaves a word that nobody has said before, and rank 0 answers with the words of all.
"""

import json
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

_LONGEST_LOOK_S = 0.25


class NotMetError(RuntimeError):
    """Ranks did not report in time. The message says which."""


def attempt_name(store: dist.Store, rank: int, world: int, timeout_s: float, describe: Callable[[int], str]) -> str:
    """Meet the other ranks of this attempt in a store that earlier ones have used. Raises NotMetError."""
    word = uuid.uuid4().hex
    store.set(f"meeting/word/{rank}", word)
    began_s, look_s = time.monotonic(), 0.01
    host = _Host(store, word, world) if rank == 0 else None
    while True:
        name = host.look() if host else _answer(store, rank, word)
        if name:
            return name
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            silent = sorted(host.silent) if host else [0]
            named = " and ".join(describe(other) for other in silent[:8])
            named += f" and {len(silent) - 8} more" if len(silent) > 8 else ""
            raise NotMetError(
                f"{describe(rank)} waited {waited_s:.0f} s for all ranks to meet, and {named} did not come: dead, not "
                "started, or waiting itself; if machines start slowly, raise run.timeout_s"
            )
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)


class _Host:
    """Rank 0's side: it publishes the words that it has found, until each rank has found its own among them."""

    def __init__(self, store: dist.Store, word: str, world: int) -> None:
        self.silent = set(range(1, world))
        self._store = store
        self._words = {0: word}

    def look(self) -> str:
        """The attempt's name if all have met, else nothing."""
        name, before = self._words[0], dict(self._words)
        for rank in self.silent:
            key = f"meeting/word/{rank}"
            if self._store.check([key]):  # it may be an earlier attempt's, and be replaced in a moment
                self._words[rank] = self._store.get(key).decode()
        if self._words != before or len(self._words) == 1:
            self._store.set("meeting/answer", json.dumps({"name": name, "words": self._words}))
        self.silent = {rank for rank in self.silent if not self._store.check([f"meeting/{name}/{rank}"])}
        if self.silent:
            return ""
        self._store.set(f"meeting/{name}/all", "")
        return name


def _answer(store: dist.Store, rank: int, word: str) -> str:
    """The attempt's name if this rank has been heard and all have met, else nothing."""
    if not store.check(["meeting/answer"]):
        return ""
    answer = json.loads(store.get("meeting/answer"))
    if answer["words"].get(str(rank)) != word:
        return ""
    name = str(answer["name"])
    store.set(f"meeting/{name}/{rank}", "")
    return name if store.check([f"meeting/{name}/all"]) else ""
