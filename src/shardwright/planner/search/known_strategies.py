"""What a search leaves out because a number that one strategy alone needs is not known: the rest is searched all the
same. What the user keeps is never left out; then the number is asked for."""

from dataclasses import replace

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import device_of
from shardwright.planner.search.constraints import Constraints

# Without a known host nothing is kept in its memory.
_ON_DEVICE = {"offload_optimizer": (0.0,), "offload_parameters": (False,), "offload_activations": (False,)}


def within_known(job: JobSpec, constraints: Constraints) -> tuple[Constraints, list[str]]:
    """The constraints, less strategies that can't be priced on the job's devices; and a sentence for each of these."""
    names = [part.device for part in job.cluster.parts] or [job.cluster.device]
    devices = [device_of(name) for name in names if name != "unknown"]
    sentences = []
    without_host = [device.name for device in devices if not device.knows_host]
    left_out = {name: values for name, values in _ON_DEVICE.items() if name not in constraints.keep}
    if without_host and left_out:
        constraints = replace(constraints, among={**constraints.among, **left_out})
        sentences.append(
            f"Plans that offload are left out: nothing is known of the host beside {without_host[0]}; add "
            "host_gb_per_s, host_memory_gib and host_memory_gb_per_s to its file in devices"
        )
    without_float8 = [device.name for device in devices if not device.peak_flops("fp8")]
    if without_float8 and constraints.float8 not in ("none", job.precision.float8):
        sentences.append(
            f"Plans with float8 {constraints.float8} are left out: {without_float8[0]} has no known rate of fp8; add "
            "peak_tflops.float8 to its file in devices"
        )
        constraints = replace(constraints, float8="none")
    return constraints, sentences
