"""The memory that each stage of ZeRO saves a rank, and its cost in seconds: one job under four plans. No torch.

python examples/which_zero.py
"""

from shardwright.config.load import load_job
from shardwright.config.units import memory_text, seconds_text
from shardwright.memory.job_memory import job_memory
from shardwright.planner.own_plan import estimate

JOB = (
    "model.name=llama3-8b", "cluster.device=h100-sxm", "cluster.devices_per_node=8", "cluster.nodes=8",
    "cluster.intra_node.bandwidth_gb_per_s=450", "cluster.inter_node.bandwidth_gb_per_s=50",
    "batch.global_batch_size=512", "precision.compute=bf16",
)  # fmt: skip


def main() -> None:
    """Print a line for each stage of ZeRO over 64 replicas."""
    for zero in range(4):
        job = load_job("quickstart", [*JOB, f'plan={{dp=64, zero={zero}, recompute="full"}}'])
        memory, price = job_memory(job)[0], estimate(job)
        kept = f"state {memory_text(memory.state_bytes)}, activations {memory_text(memory.activations_bytes)}"
        print(f"ZeRO {zero}: {kept}, a step {seconds_text(price.step.total)}, MFU {100 * price.step.mfu:.0f} %")


if __name__ == "__main__":
    main()
