"""The system whose file a text is, by its suffix and the tables, keys or programs that it names."""

from pathlib import PurePath

from shardwright.config.base import PlanError
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault

JOB = "shardwright"  # a job of this package, or a model as transformers describes it
_TITAN_TABLES = {"parallelism", "training", "activation_checkpoint", "job"}
_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_ACCELERATE_KEYS = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


def system_name_of(path: str, text: str) -> str:
    """The name of the system, or `JOB`. Raises PlanError for a text that no system is known to write."""
    suffix = PurePath(path).suffix.lower()
    if suffix in (".toml", ".json", ".yaml", ".yml"):
        try:
            keys = read_data(path, text).keys()
        except ShellFault as error:
            raise PlanError(path, [str(error)]) from None
        if suffix == ".toml":
            return "torchtitan-0.2" if _TITAN_TABLES & keys else JOB
        if suffix == ".json":
            return "deepspeed" if _DEEPSPEED_KEYS & keys else JOB
        if _ACCELERATE_KEYS & keys:
            return "accelerate"
        if {"model", "trainer"} <= keys:
            return "nemo"
    elif text.startswith("#!") or suffix in _SCRIPTS:
        return "torchtitan" if "torchtitan" in text else "megatron"
    raise PlanError(path, ["no system is known to write such a file; name it with --system, such as megatron"])
