"""Megatron-LM's flags for the batch, the number types, the optimizer, and the learning rate."""

from itertools import pairwise
from typing import Any

from shardwright.config.batch import BatchSpec
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.interchange.learning_rates import lowest_rate, lowest_ratio
from shardwright.interchange.reading.setting_notes import (
    counted_as_adamw,
    falls_as_cosine,
    falls_linearly,
    taken_rate,
    wrong_value,
)
from shardwright.interchange.reading.settings import Flat, Settings, plain_text
from shardwright.interchange.reading.shell_marks import UNKNOWN
from shardwright.interchange.rows import Rule, Table, number, word_for
from shardwright.interchange.systems.megatron_plan import shards_state

_NUMBERS = {"fp32": "float32", "bf16": "bf16"}
_FLOAT8 = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
_STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse-sqrt",
    "wsd": "wsd",
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
_OPTIMIZERS = {
    "adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
    "dist_muon": "muon",
}
_OPTIMIZERS_OF_FORKS = {"adafactor": "adafactor", "adamw": "adamw"}


def _read_batch(settings: Settings, fields: Flat) -> None:
    share = fields["plan.dp"] * fields["plan.microbatch_size"]
    # How often DeepSpeed's first Megatron accumulates, whose --batch-size is that of a device.
    accumulated = 1 if settings.has("global-batch-size") else settings.count("gas", 1, least=1)
    size = settings.count("global-batch-size", share * accumulated)
    ramp = settings.words("rampup-batch-size")
    schedule = " ".join(settings.words("step-batch-size-schedule"))
    if schedule:
        ramp, size = _ramp_of(schedule, fields["model.sequence"], settings, size)
    fields["batch.global_batch_size"] = size
    if not ramp:
        return
    numbers = [number for word in ramp if (number := whole(word.replace("_", ""))) is not None]
    if len(numbers) != 3 or len(ramp) != 3:
        settings.faults.append(settings.fault_text("rampup-batch-size", ramp, say("three whole numbers")))
        return
    start, increment, samples = numbers
    if share and (start % share or increment % share) and size % share == 0:
        settings.lost.append(
            say(
                "the batch grows from {start} by {increment}, which {dp} replicas x {size} can't share; all steps have "
                "the full one here",
                start=start,
                increment=increment,
                dp=fields["plan.dp"],
                size=fields["plan.microbatch_size"],
            )
        )
        return
    fields |= {"batch.ramp.start": start, "batch.ramp.increment": increment, "batch.ramp.samples": samples}


_SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _ramp_of(text: str, sequence: int, settings: Settings, size: int) -> tuple[list[str], int]:
    """The ramp (start, increment, samples) of a schedule "TOKENS:BATCH TOKENS:BATCH ...", and its last batch size.

    The ramp is empty if the schedule is not valid or its steps are not equal.
    """
    pairs = []
    for word in text.split()[:1000]:
        tokens, _, batch = word.partition(":")
        scale = _SCALES.get(tokens[-1:].upper(), 1.0)
        number = tokens[:-1] if scale > 1 else tokens
        batch_size = whole(batch)
        if batch_size is None or whole(number.replace(".", "", 1)) is None:
            settings.faults.append(
                wrong_value(f"--step-batch-size-schedule {text[:60]}", say("TOKENS:BATCH with blanks between"))
            )
            return [], size
        pairs.append((float(number) * scale, batch_size))
    if len(pairs) < 2 or sequence == 0:
        return [], pairs[0][1] if pairs else size
    steps = {(round(after[0] - before[0], 3), after[1] - before[1]) for before, after in pairwise(pairs)}
    if len(steps) > 1 or pairs[0][0] or min(step[1] for step in steps) <= 0:
        settings.lost.append(
            say(
                "{setting}: its steps are not equal; all have the last batch here",
                setting=f"--step-batch-size-schedule {text[:60]}",
            )
        )
        return [], pairs[-1][1]
    ((_, increment),) = steps
    return [str(pairs[0][1]), str(increment), str(round(pairs[-1][0] / sequence))], pairs[-1][1]


def _write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["global-batch-size"] = job.batch.global_batch_size
    ramp = job.batch.ramp
    if job.batch.grows:
        settings["rampup-batch-size"] = [ramp.start, ramp.increment, ramp.samples]


def _read_numbers(settings: Settings, fields: Flat) -> None:
    bf16, fp16 = settings.flag("bf16"), settings.flag("fp16")
    compute = "bf16" if bf16 else "fp16" if fp16 else "float32"
    main_gradients = settings.one_of("main-grads-dtype", _NUMBERS, "fp32", "precision.gradients")
    if bf16:
        is_half = settings.flag("grad-reduce-in-bf16") or main_gradients == "bf16"
    else:
        is_half = not settings.flag("accumulate-allreduce-grads-in-fp32")
    settings.ignore("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16")
    fields |= {
        "precision.compute": compute,
        "precision.gradients": "compute" if is_half and (bf16 or fp16) else "float32",
    }
    names = [f"exp-avg{end}-dtype" for end in ("", "-sq")]
    moments = {settings.one_of(name, _NUMBERS, "fp32", "precision.moments") for name in names}
    fields["precision.moments"] = "bf16" if moments == {"bf16"} else "float32"
    if len(moments) > 1:
        settings.lost.append(
            say(
                "{options} differ, and moments are of one type here: float32",
                options=both(["--exp-avg-dtype", "--exp-avg-sq-dtype"]),
            )
        )
    if fp16:
        constant = settings.number("loss-scale", 0.0)
        fields["precision.loss_scale"] = constant or settings.number("initial-loss-scale", 2.0**32)
        fields["precision.loss_scale_growth_steps"] = 0 if constant else settings.count("loss-scale-window", 1000)
    settings.ignore("loss-scale", "initial-loss-scale", "loss-scale-window")


def _write_numbers(job: JobSpec, settings: dict[str, Any]) -> None:
    precision = job.precision
    if precision.compute != "float32":
        settings[precision.compute] = True
    if precision.compute == "bf16" and precision.gradient_number == "bf16":
        settings["grad-reduce-in-bf16"] = True
    if precision.compute == "fp16" and precision.gradient_number == "float32":
        settings["accumulate-allreduce-grads-in-fp32"] = True
    if precision.moments == "bf16" and shards_state(job):
        settings |= {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}
    if precision.compute == "fp16" and precision.loss_scale:
        if precision.loss_scale_growth_steps:
            settings |= {
                "initial-loss-scale": precision.loss_scale,
                "loss-scale-window": precision.loss_scale_growth_steps,
            }
        else:
            settings["loss-scale"] = precision.loss_scale


def _read_float8(settings: Settings, fields: Flat) -> None:
    if not settings.has("fp8-format", "fp8-hybrid", "fp8-e4m3"):
        settings.ignore("fp8-recipe", "fp8-amax-history-len", "no-fp8-wgrad", "disable-fp8-wgrad")
        return
    recipe = settings.one_of("fp8-recipe", _FLOAT8, "delayed")
    fields |= {
        "precision.float8": recipe,
        "precision.float8_weight_gradients": not settings.flag(("no-fp8-wgrad", "disable-fp8-wgrad")),
    }
    history = settings.count("fp8-amax-history-len", 1)
    if recipe == "delayed":
        fields["precision.float8_history"] = history


def _write_float8(job: JobSpec, settings: dict[str, Any]) -> None:
    precision = job.precision
    if precision.float8 in _FLOAT8:
        settings |= {"fp8-format": "hybrid", "fp8-recipe": precision.float8}
        settings |= {} if precision.float8_weight_gradients else {"no-fp8-wgrad": True}
        settings |= {"fp8-amax-history-len": precision.float8_history} if precision.float8 == "delayed" else {}


def steps_of(batch: BatchSpec, samples: int) -> int:
    """The number of steps that train on at least so many sequences."""
    low, high = 0, 1
    while batch.samples_before(high) < samples:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if batch.samples_before(middle) < samples else (low, middle)
    return low


def _batch_of(fields: Flat) -> BatchSpec:
    """The batch of the fields; without its ramp if that is not valid, which the checks of the job report."""
    names = ("start", "increment", "samples")
    ramp = {name: fields[f"batch.ramp.{name}"] for name in names if f"batch.ramp.{name}" in fields}
    size = max(1, fields["batch.global_batch_size"])
    try:
        batch = BatchSpec(global_batch_size=size, ramp=ramp)  # type: ignore[arg-type]
    except ValueError:
        return BatchSpec()
    return BatchSpec(global_batch_size=size) if batch.faults() else batch


def _read_length(settings: Settings, fields: Flat) -> None:
    """Read the steps of the run, of its warm-up, and of its decay."""
    batch = _batch_of(fields)

    def steps(name: str, default: int) -> int:
        counts = [
            settings.count(f"{name}-samples", 0),
            settings.count(f"{name}-tokens", 0) // max(1, fields["model.sequence"]),
        ]
        samples = min(filter(None, counts), default=0)
        iterations = settings.count(f"{name}-iters", 0)
        if iterations and counts[1]:  # Megatron-DeepSpeed ends with the first of them
            return min(iterations, steps_of(batch, min(samples, 1 << 50)))
        if iterations and samples:
            settings.faults.append(
                say(
                    "{setting} and its samples or tokens are both there; leave one out",
                    setting=settings.setting_text(f"{name}-iters"),
                )
            )
        return iterations or steps_of(batch, min(samples, 1 << 50)) or default

    total = steps("train", 0)
    if not total:
        total = 1
        settings.note(say("nothing says how long the run is; one step is taken (--set optimizer.steps=N)"))
    decay_end = steps("lr-decay", total)
    if UNKNOWN.search(plain_text(settings.given.get("lr-warmup-fraction"))):  # neither memory nor time depends on it
        settings.lose(
            "lr-warmup-fraction", say("nothing says it, and there is no warm-up (--set optimizer.warmup_steps=N)")
        )
        settings.given["lr-warmup-fraction"] = 0.0
    warmup_share = settings.number("lr-warmup-fraction", -1.0)
    is_share = warmup_share >= 0 and not settings.has("lr-warmup-tokens")  # which Megatron-DeepSpeed takes first
    warmup = round(warmup_share * decay_end) if is_share else steps("lr-warmup", 0)
    fields |= {"optimizer.steps": total, "optimizer.warmup_steps": min(warmup, total)}
    if decay_end != total and fields["optimizer.schedule"] not in ("constant", "wsd"):
        settings.lost.append(
            say(
                "the learning rate falls until step {end:,} there, and until the last of {steps:,} here",
                end=decay_end,
                steps=total,
            )
        )
    decay_steps = settings.count("lr-wsd-decay-iters", 0)
    if samples := min(settings.count("lr-wsd-decay-samples", 0), 1 << 50):
        decay_steps = total - steps_of(batch, max(0, batch.samples_before(total) - samples))
    if fields["optimizer.schedule"] == "wsd" and decay_steps:
        fields["optimizer.decay_share"] = min(1.0, decay_steps / total)


def _write_length(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer, batch = job.optimizer, job.batch
    lengths = {"train": optimizer.steps, "lr-decay": optimizer.steps, "lr-warmup": optimizer.warmup_steps}
    if optimizer.schedule == "wsd":
        lengths["lr-wsd-decay"] = round(optimizer.decay_share * optimizer.steps)
    for name, steps in lengths.items():
        if batch.grows:
            start = optimizer.steps - steps if name == "lr-wsd-decay" else 0
            settings[f"{name}-samples"] = batch.samples_before(steps + start) - batch.samples_before(start)
        else:
            settings[f"{name}-iters"] = steps


def _read_rate(settings: Settings, fields: Flat) -> None:
    rate, least = settings.number("lr", 0.0), settings.number("min-lr", 0.0)
    style = _STYLES.get(settings.text("lr-decay-style", "linear").lower().replace("_", "-"), "")
    if not style:  # neither memory nor time depends on it
        style = "cosine"
        settings.lost.append(falls_as_cosine(settings.setting_text("lr-decay-style")))
    fields["optimizer.schedule"] = style
    if not rate:
        rate = 1e-4
        settings.note(taken_rate("1e-4"))
    fields |= {"optimizer.learning_rate": rate, "optimizer.min_learning_rate_ratio": lowest_ratio(rate, least)}
    if style == "wsd":
        shape = settings.text("lr-wsd-decay-style", "exponential").lower()
        fields["optimizer.decay_shape"] = _DECAYS.get(shape, "linear")
        if shape not in _DECAYS:
            settings.lost.append(falls_linearly(f"--lr-wsd-decay-style {shape[:60]}"))
    settings.lose("lr-warmup-init", say("the warm-up begins at 0 here"))
    settings.lose("decoupled-lr", say("embedding and head have the learning rate of all here"))
    settings.ignore("decoupled-min-lr")


def _write_rate(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings["lr"] = optimizer.learning_rate
    settings["min-lr"] = lowest_rate(optimizer.learning_rate, optimizer.min_learning_rate_ratio)
    if style := word_for(optimizer.schedule, _STYLES):
        settings["lr-decay-style"] = style.replace("wsd", "WSD")
    if optimizer.schedule == "wsd" and (shape := word_for(optimizer.decay_shape, _DECAYS)):
        settings["lr-wsd-decay-style"] = shape


def _read_optimizer(settings: Settings, fields: Flat) -> None:
    words = _OPTIMIZERS | _OPTIMIZERS_OF_FORKS
    word = settings.text("optimizer", "adam").lower()
    if word not in words and "optimizer.name" not in settings.overrides:
        settings.lost.append(counted_as_adamw(settings.setting_text("optimizer"), third=word == "ademamix"))
    name = settings.one_of("optimizer", {word: "adamw"} | words, "adam", "optimizer.name")
    fields["optimizer.name"] = name
    first, second = settings.number("adam-beta1", 0.9), settings.number("adam-beta2", 0.999)
    if name == "lion":
        first, second = settings.number("lion-beta1", 0.95), settings.number("lion-beta2", 0.98)
    fields |= {
        "optimizer.beta1": first,
        "optimizer.beta2": second,
        "optimizer.epsilon": settings.number("adam-eps", 1e-8),
    }
    fields["optimizer.momentum"] = settings.number("muon-momentum" if name == "muon" else "sgd-momentum", 0.9)
    if name == "muon":
        fields["optimizer.newton_schulz_steps"] = settings.count("muon-num-ns-steps", 5)


def _write_optimizer(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer, name = job.optimizer, job.optimizer.name
    settings["optimizer"] = word_for(name, _OPTIMIZERS) or "adam"
    if name == "lion":
        settings |= {"lion-beta1": optimizer.beta1, "lion-beta2": optimizer.beta2}
    elif name == "sgd":
        settings["sgd-momentum"] = optimizer.momentum
    else:
        settings |= {"adam-beta1": optimizer.beta1, "adam-beta2": optimizer.beta2, "adam-eps": optimizer.epsilon}
    if name == "muon":
        settings |= {"muon-momentum": optimizer.momentum, "muon-num-ns-steps": optimizer.newton_schulz_steps}
        settings["muon-nesterov"] = True


OPTIMIZER: Table = (
    Rule(("optimizer",), _read_optimizer, _write_optimizer),
    Rule(("lr", "min-lr", "lr-decay-style"), _read_rate, _write_rate),
    Rule(("train-iters", "lr-decay-iters", "lr-warmup-iters"), _read_length, _write_length),
    number("weight-decay", "optimizer.weight_decay", 0.01, always=True),
    number("clip-grad", "optimizer.clip_grad_norm", 1.0),
)
TRAINING: Table = (
    Rule(("global-batch-size", "rampup-batch-size"), _read_batch, _write_batch),
    Rule(("bf16", "fp16"), _read_numbers, _write_numbers),
    Rule(("fp8-format", "fp8-recipe"), _read_float8, _write_float8),
    *OPTIMIZER,
)
