"""Ranks of one machine behind links of a known rate: a network namespace each, joined by a bridge, shaped by tc.

A rank's own traffic leaves through one link, whatever communicator it is of. Only sending is shaped, with a token
bucket whose burst is small against a message. Nothing of it touches the machine's own network: the bridge is in a
namespace too, and with the namespaces all is gone.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEVICE = "eth0"
FRAME_BYTES = 9000  # large: each frame costs processor time, which links of real machines do not take
BURST_BYTES = 32 * 1024
QUEUE_S = 2.0  # what would wait longer in a link is dropped: more than all that is ever under way
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class NoLinksError(Exception):
    """This machine can't make them, or this user may not."""


@dataclass(frozen=True)
class Links:
    """The namespaces of ranks 0 to n - 1."""

    namespaces: tuple[str, ...]

    def enter(self, rank: int) -> None:
        """Move this process behind its link. Before it starts any thread: those that run stay where they are."""
        with Path("/run/netns", self.namespaces[rank]).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def shape(megabits_per_s: float) -> None:
    """Give the link of this process, which has entered it, a rate."""
    _run(f"tc qdisc replace dev {DEVICE} root {_bucket(megabits_per_s)}")


def _bucket(megabits_per_s: float) -> str:
    return f"tbf rate {megabits_per_s * 1e6:.0f}bit burst {BURST_BYTES} latency {QUEUE_S}s"


@contextmanager
def links(num_ranks: int) -> Iterator[Links]:
    """Make the namespaces and their links; they are gone afterwards. NoLinksError says why there can be none."""
    if os.geteuid() != 0:
        raise NoLinksError("namespaces and tc need root, and this is another user; run it as root")
    prefix = f"overlap-{os.getpid()}"
    hub, namespaces = f"{prefix}-hub", tuple(f"{prefix}-{rank}" for rank in range(num_ranks))
    try:
        _run(f"ip netns add {hub}")
        _run(f"ip -n {hub} link add bridge type bridge")
        _run(f"ip -n {hub} link set bridge up")
        for rank, name in enumerate(namespaces):
            _run(f"ip netns add {name}")
            peer = f"type veth peer name {DEVICE} mtu {FRAME_BYTES} netns {name}"
            _run(f"ip -n {hub} link add port{rank} mtu {FRAME_BYTES} {peer}")
            _run(f"ip -n {hub} link set port{rank} master bridge up")
            _run(f"ip -n {name} address add 10.77.0.{rank + 1}/24 dev {DEVICE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {DEVICE} up")
        # Better now than in the ranks: whether there is a token bucket at all.
        _run(f"tc -n {namespaces[0]} qdisc add dev {DEVICE} root {_bucket(1000.0)}")
        _run(f"tc -n {namespaces[0]} qdisc delete dev {DEVICE} root")
        yield Links(namespaces)
    finally:
        for name in (*namespaces, hub):  # a namespace takes its devices with it
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _run(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoLinksError(f"there is no {error.filename} here; install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise NoLinksError(f"`{command}` failed: {error.stderr.strip()}") from error
