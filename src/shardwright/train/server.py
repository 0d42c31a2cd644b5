"""The server that ranks are forked from on a CPU: it loads torch once, and each rank is up in a fraction of a second.

They are not forked from the process that launches them, whose threads and sockets (the rendezvous store's) they would
inherit. CUDA does not survive a fork, so there they are spawned and need no server.
"""

import multiprocessing
from multiprocessing.forkserver import ensure_running


def start_server(device: str) -> None:
    """Start it for a job with that `run.device`, or do nothing if it runs.

    A command that launches ranks does so first of all: the server loads torch while the command does the same. Where
    "auto" then finds CUDA, it was started in vain, and ends with the command.
    """
    if device != "cuda":
        multiprocessing.set_forkserver_preload(["shardwright.train.preload"])
        ensure_running()
