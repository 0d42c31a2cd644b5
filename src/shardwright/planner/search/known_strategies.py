"""Strategies that a search leaves out: those that the job's software lacks, and those that need an unknown number.

A field that the user keeps is never left out; then it is marked, or an error asks for the number.
"""

from dataclasses import replace

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.software import software_of
from shardwright.config.software_support import had_by
from shardwright.cost.calibration import device_of
from shardwright.planner.search.constraints import Constraints

# The values that are searched if the host is unknown.
_ON_DEVICE = {"offload_optimizer": (0.0,), "offload_parameters": (False,), "offload_activations": (False,)}


def within_known(job: JobSpec, constraints: Constraints) -> tuple[Constraints, list[str]]:
    """The constraints without strategies that the job's software lacks or that can't be priced on its devices; and a
    sentence for each of these."""
    constraints, sentences = _within_software(job, constraints)
    names = [part.device for part in job.cluster.parts] or [job.cluster.device]
    devices = [device_of(name) for name in names if name != "unknown"]
    without_host = [device.name for device in devices if not device.knows_host]
    left_out = {name: values for name, values in _ON_DEVICE.items() if name not in constraints.keep}
    if without_host and left_out:
        constraints = replace(constraints, among={**constraints.among, **left_out})
        sentences.append(
            say(
                "Plans that offload are left out: nothing is known of the host beside {device}; add host_gb_per_s, "
                "host_memory_gib and host_memory_gb_per_s to its file in devices",
                device=without_host[0],
            )
        )
    without_float8 = [device.name for device in devices if not device.peak_flops("fp8")]
    if without_float8 and constraints.float8 not in ("none", job.precision.float8):
        sentences.append(
            say(
                "Plans with float8 {recipe} are left out: {device} has no known rate of fp8; add peak_tflops.float8 to "
                "its file in devices",
                recipe=constraints.float8,
                device=without_float8[0],
            )
        )
        constraints = replace(constraints, float8="none")
    return constraints, sentences


def _within_software(job: JobSpec, constraints: Constraints) -> tuple[Constraints, list[str]]:
    """The constraints without strategies that software other than this runtime lacks; and a sentence for it."""
    software = software_of(job.cluster.software)
    if software.is_own:
        return constraints, []
    supported = {name: values for name, values in had_by(software).items() if name not in constraints.keep}
    if not supported:
        return constraints, [
            say(
                "Nothing is known of what {software} lacks, so plans may need what it has not; say so in its entry in "
                "software, by schedules, zero_stages and the like",
                software=software.name,
            )
        ]
    among = {
        name: tuple(value for value in constraints.among.get(name, values) if value in values)
        for name, values in supported.items()
    }
    sentence = say("Plans that need what {software} lacks are left out", software=software.name)
    return replace(constraints, among={**constraints.among, **among}), [sentence]
