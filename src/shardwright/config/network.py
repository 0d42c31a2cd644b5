"""The network between nodes, by the names that the launcher of a job passes to NCCL and Gloo."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.network_facts import NetworkName


def _shell_name(value: str) -> str:
    """Check a name: it has no characters that are special in a shell. ValueError if it has some."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", value):
        raise ValueError("Input should be a name of at most 64 letters, digits and _ . : - such as eth0 or mlx5_0")
    return value


def _shell_name_or_empty(value: str) -> str:
    return _shell_name(value) if value else value


class NetworkSpec(Spec):
    """Kind and names of the network between nodes. Predictions read the kind, for its latencies and its share of the
    bandwidth."""

    kind: NetworkName = Field(
        "unknown",
        description="What joins the nodes; launch tells NCCL to use that and nothing slower, and predictions take its "
        "latencies. Unknown: InfiniBand's.",
    )
    interface: Annotated[str, AfterValidator(_shell_name_or_empty)] = Field(
        "",
        description="Interface by which nodes meet, as `ip link` names it, such as eth0; empty: NCCL and Gloo look for "
        "one.",
    )
    adapters: list[Annotated[str, AfterValidator(_shell_name)]] = Field(
        default_factory=list,
        max_length=largest.ADAPTERS,
        description="InfiniBand or RoCE adapters of a server, one for each rail, as `ibv_devices` names them, such as "
        "mlx5_0; empty: NCCL takes all that it finds.",
    )
