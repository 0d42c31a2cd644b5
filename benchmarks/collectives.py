"""Predicted seconds of collectives against public measurements of them by themselves.

    python benchmarks/collectives.py               # prints a table; benchmarks/truth/collectives.csv has the rows

A row is a collective of so many bytes on so many devices: `bus_gb_per_s` is the bus bandwidth of nccl-tests, the bytes
that pass the busiest link of a ring, divided by the seconds. `algorithm` is the one that NCCL was told to take; empty,
it chose one itself. The rates are set by hand from these rows (calibrations' `link`, `switch_reduce`, `link_latency_s`,
`collective_s`, and config/networks); no constant of a training run is.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.config.load import make_job
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.collective_time import all_to_all_s, nccl_ring_s, nccl_switched_trees_s, ring_s
from shardwright.cost.from_job import run_of
from shardwright.cost.topology import group_of, reach_of_ranks

TABLE = Path(__file__).parent / "truth" / "collectives.csv"
NODE = 8  # devices of a node in every row


@dataclass(frozen=True)
class MeasuredCollective:
    """A measured collective and the seconds that are predicted for it."""

    system: str
    collective: str
    num_devices: int
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_s / self.measured_s


def measured_collectives() -> Iterator[MeasuredCollective]:
    """All rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            num_devices, num_bytes, collective = int(row["devices"]), int(row["bytes"]), row["collective"]
            rounds = 2 if collective == "all_reduce" else 1
            bus_bytes = rounds * num_bytes * (num_devices - 1) / num_devices
            yield MeasuredCollective(
                row["system"],
                collective,
                num_devices,
                num_bytes,
                measured_s=bus_bytes / (float(row["bus_gb_per_s"]) * 1e9),
                predicted_s=_predicted_s(row, num_devices, num_bytes),
            )


def _predicted_s(row: dict[str, str], num_devices: int, num_bytes: int) -> float:
    nodes = int(row["nodes"])
    cluster = {
        "device": row["device"],
        "nodes": nodes,
        "devices_per_node": NODE,
        "inter_node": {"bandwidth_gb_per_s": float(row["network_gb_per_s"])},
        "network": {"kind": row["network"]},
    }
    plan = {"dp": nodes * NODE, "zero": 1}
    fields = {"model": {"name": "llama3-8b"}, "cluster": cluster, "plan": plan}
    number = {"compute": "fp16" if row["device"].startswith("v100") else "bf16"}
    job = make_job(fields | {"batch": {"global_batch_size": nodes * NODE}, "precision": number})
    rates, group = rates_of(run_of(job), shipped()), group_of(num_devices, 1, reach_of_ranks(NODE))
    if row["collective"] == "all_to_all":
        return float(all_to_all_s(rates, group, num_bytes))
    if row["algorithm"] == "nvls-tree":
        return float(nccl_switched_trees_s(rates, group, num_bytes))
    rounds = 2 if row["collective"] == "all_reduce" else 1
    if row["algorithm"] == "ring":
        return float(nccl_ring_s(rates, group, num_bytes, rounds))
    return float(ring_s(rates, group, num_bytes, rounds, scatters=row["collective"] == "reduce_scatter"))


def error(rows: list[MeasuredCollective]) -> float:
    """The median error: a ratio r counts as |log r|."""
    return math.exp(statistics.median(abs(math.log(row.ratio)) for row in rows)) - 1


def main() -> None:
    """Print a line a system, collective and number of devices."""
    groups: dict[tuple[str, str, int], list[MeasuredCollective]] = defaultdict(list)
    for row in measured_collectives():
        groups[row.system, row.collective, row.num_devices].append(row)
    print("| system | collective | devices | sizes | predicted / measured, smallest to largest | median error |")
    print("|---|---|---|---|---|---|")
    for (system, collective, num_devices), rows in groups.items():
        ratios = " ".join(f"{row.ratio:.2f}" for row in sorted(rows, key=lambda row: row.num_bytes))
        print(f"| {system} | {collective} | {num_devices} | {len(rows)} | {ratios} | {error(rows):.1%} |")
    print(f"\nall: {error([row for rows in groups.values() for row in rows]):.1%}")


if __name__ == "__main__":
    main()
