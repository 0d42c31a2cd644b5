"""The name of an attempt, which all ranks that are started together agree on, and no earlier ranks have.

torchrun restarts ranks with the store of earlier attempts, which still holds addresses of dead ranks. Its numbers of
restarts can't name attempts: only the agent whose rank failed counts a restart, so ranks of one attempt may get
different numbers (torch.distributed.elastic.agent.server). But torchrun guarantees that no rank of an attempt starts
while a rank of an earlier attempt runs: an agent stops its ranks before it joins the next round. So each rank stores a
unique token, and rank 0 answers with the tokens of all ranks.
"""

import json
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from shardwright.config.phrase import both, say

_LONGEST_POLL_S = 0.25


class NotMetError(RuntimeError):
    """Ranks did not report in time; the message names them."""


def attempt_name(store: dist.Store, rank: int, world: int, timeout_s: float, describe: Callable[[int], str]) -> str:
    """The name of this attempt, agreed on in a store that earlier attempts have used. Waits for all ranks. Raises
    NotMetError after `timeout_s`."""
    token = uuid.uuid4().hex
    store.set(f"meeting/word/{rank}", token)
    began_s, poll_s = time.monotonic(), 0.01
    host = _Host(store, token, world) if rank == 0 else None
    while True:
        name = host.poll() if host else _poll_answer(store, rank, token)
        if name:
            return name
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            silent = sorted(host.silent) if host else [0]
            missing = both([describe(silent_rank) for silent_rank in silent[:8]])
            if len(silent) > 8:
                missing = say("{ranks} and {more} more", ranks=missing, more=len(silent) - 8)
            raise NotMetError(
                say(
                    "{rank} waited {waited_s:.0f} s for all ranks to meet, and {missing} did not come: dead, not "
                    "started, or waiting itself; if machines start slowly, raise run.timeout_s",
                    rank=describe(rank),
                    waited_s=waited_s,
                    missing=missing,
                )
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


class _Host:
    """Rank 0's part: it publishes the tokens in the store, until each rank has seen its own token among them."""

    def __init__(self, store: dist.Store, token: str, world: int) -> None:
        self.silent = set(range(1, world))
        self._store = store
        self._tokens = {0: token}

    def poll(self) -> str:
        """The attempt's name if all ranks have met, else ""."""
        name, previous_tokens = self._tokens[0], dict(self._tokens)
        for rank in self.silent:
            key = f"meeting/word/{rank}"
            if self._store.check([key]):  # it may be of an earlier attempt, and be replaced in a moment
                self._tokens[rank] = self._store.get(key).decode()
        if self._tokens != previous_tokens or len(self._tokens) == 1:
            self._store.set("meeting/answer", json.dumps({"name": name, "words": self._tokens}))
        self.silent = {rank for rank in self.silent if not self._store.check([f"meeting/{name}/{rank}"])}
        if self.silent:
            return ""
        self._store.set(f"meeting/{name}/all", "")
        return name


def _poll_answer(store: dist.Store, rank: int, token: str) -> str:
    """The attempt's name if rank 0 has seen this rank's token and all ranks have met, else ""."""
    if not store.check(["meeting/answer"]):
        return ""
    answer = json.loads(store.get("meeting/answer"))
    if answer["words"].get(str(rank)) != token:
        return ""
    name = str(answer["name"])
    store.set(f"meeting/{name}/{rank}", "")
    return name if store.check([f"meeting/{name}/all"]) else ""
