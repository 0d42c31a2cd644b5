"""DeepSpeed's three sizes of a batch: of a step, of a microbatch, and how many are accumulated. By DeepSpeed's own rule
two determine the third, that of a step alone means that nothing is accumulated, and all three have to agree."""

from shardwright.config.cluster_facts import USUAL_NODE, filled_nodes
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings

WORLD = "world_size"
# Names of DeepSpeed and of transformers' Trainer first, and then those that people's own programs have.
MICRO = (
    "train_micro_batch_size_per_gpu",
    "--per_device_train_batch_size",
    "--per_device_batch_size",
    "--per_gpu_train_batch_size",
    "--micro_batch_size",
    "--train_micro_batch_size_per_gpu",
    "--batch_size_per_device",
    "--batch_size_per_gpu",
)
_BATCH = ("train_batch_size", "--global_batch_size")
_STEPS = (
    "gradient_accumulation_steps",
    "--gradient_accumulation_steps",
    "--grad_accum_steps",
    "--grad_accum",
    "--accumulation_steps",
    "--grad_accumulation_steps",
    "--gradient_accumulation",
    "--accum_steps",
)
_SAID_BY_FIELDS = ("plan.microbatch_size", "batch.global_batch_size")


def read_batch(settings: Settings, fields: Flat) -> None:
    """Read dp, the microbatch size, and the global batch size."""
    ranks_per_replica = fields["plan.tp"] * fields["plan.pp"] * fields["plan.cp"]
    world = settings.count(WORLD, 0)
    dp = world // ranks_per_replica if world % ranks_per_replica == 0 else 0
    batch_size, accumulation_steps = settings.count(_BATCH, 0), settings.count(_STEPS, 0)
    microbatch_size = settings.overridden("plan.microbatch_size") or settings.count(MICRO, 0)
    if not microbatch_size and batch_size and dp:
        microbatch_size = batch_size // (max(1, accumulation_steps) * dp)
    microbatch_size = microbatch_size or _assumed_microbatch(settings)
    _tell_others(settings, MICRO, microbatch_size, "plan.microbatch_size")
    are_replicas_known = dp > 0
    dp = dp or _replicas(settings, ranks_per_replica, batch_size, (microbatch_size, accumulation_steps))
    samples = microbatch_size * accumulation_steps
    is_said = any(name in settings.overrides for name in _SAID_BY_FIELDS)
    if are_replicas_known and batch_size and samples and batch_size != samples * dp and not is_said:
        settings.faults.append(_contradiction(settings, batch_size, samples, dp, ranks_per_replica))
    fields |= {"plan.dp": dp, "plan.microbatch_size": microbatch_size}
    fields["batch.global_batch_size"] = batch_size or microbatch_size * max(1, accumulation_steps) * dp


def _tell_others(settings: Settings, names: tuple[str, ...], count: int, job_field: str) -> None:
    """Tell which of some names of one count say another than the one that is taken, since a file of DeepSpeed's and a
    command may say it both."""
    present = [name for name in names if settings.has(name)]
    others = [name for name in present if str(settings.given[name]) != str(count)]
    if others and others != present and job_field not in settings.overrides:
        settings.lost.append(
            say(
                "{settings}: {taken} is taken (--set {field}=N)",
                settings=tuple(map(settings.setting_text, others)),
                taken=settings.setting_text(next(name for name in present if name not in others)),
                field=job_field,
            )
        )


def _assumed_microbatch(settings: Settings) -> int:
    """The size of a microbatch where nothing says it; an assumption says so."""
    is_default = MICRO[0] in settings.automatic
    microbatch_size, source = (8, say(", the program's default,")) if is_default else (1, "")
    settings.note(
        say(
            "nothing says how many sequences a device takes at once; {count}{source} is taken (--set "
            "plan.microbatch_size=N)",
            count=microbatch_size,
            source=source,
        )
    )
    return microbatch_size


def _replicas(settings: Settings, ranks_per_replica: int, batch_size: int, shares: tuple[int, int]) -> int:
    """The number of replicas of a batch, each of which takes a microbatch some times (`shares`); 1 with a fault if
    nothing says it."""
    world, samples = settings.count(WORLD, 0), shares[0] * shares[1]
    if not world and batch_size and samples and batch_size % samples == 0:
        dp = batch_size // samples
        settings.note(
            say(
                "{devices} GPUs, for a batch of {batch} is {microbatch} x {steps} x {dp} (--devices N for others)",
                devices=dp * ranks_per_replica,
                batch=batch_size,
                microbatch=shares[0],
                steps=shares[1],
                dp=dp,
            )
        )
        return dp
    if not world and settings.asks_ranks:
        return 1
    problem = say("nothing says how many GPUs there are")
    if world:
        problem = say(
            "{devices} GPUs are not a multiple of {ranks} that share a replica",
            devices=world,
            ranks=ranks_per_replica,
        )
    near = filled_nodes(ranks_per_replica, world or USUAL_NODE)
    settings.faults.append(say("{problem}; say how many with --devices, such as {near}", problem=problem, near=near))
    return 1


def _contradiction(settings: Settings, batch_size: int, samples: int, dp: int, ranks_per_replica: int) -> str:
    """The fault of a batch that is not what the replicas take, with the number of GPUs that it is for."""
    names = [next((name for name in names if settings.given.get(name) is not None), "") for names in (MICRO, _STEPS)]
    parts = " x ".join(settings.setting_text(name) for name in names if name)
    batch = settings.setting_text(next(name for name in _BATCH if settings.given.get(name) is not None))
    devices = batch_size // samples * ranks_per_replica
    way = say("--set batch.global_batch_size={product}", product=samples * dp)
    if batch_size % samples == 0:
        way = say("--devices {devices}, or {way}", devices=devices, way=way)
    return say(
        "{batch} is not {parts} x {dp} replicas = {product}, and DeepSpeed stops there; {way}",
        batch=batch,
        parts=parts,
        dp=dp,
        product=samples * dp,
        way=way,
    )
