"""The server that ranks are forked from on a CPU: it loads torch once, and each rank is up in a fraction of a second.

They are not forked from the process that launches them, whose threads and sockets (the rendezvous store's) they would
inherit. CUDA does not survive a fork, so there they are spawned and need no server.
"""

import multiprocessing
from multiprocessing.forkserver import ensure_running
from pathlib import Path

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's, told without torch


def start_server() -> None:
    """Start it, or do nothing if it runs."""
    multiprocessing.set_forkserver_preload(["shardwright.train.preload"])
    ensure_running()


def start_server_early(device: str) -> None:
    """Start it if a job with that `run.device` will need it, as far as one can tell without torch.

    A command that launches ranks does so first of all: the server loads torch while the command does the same.
    """
    if device == "cpu" or (device == "auto" and not any(Path(driver).exists() for driver in _GPU_DRIVERS)):
        start_server()
