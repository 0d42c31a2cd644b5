"""Notes and faults about settings that several systems have. A setting stands in them with its value, as its users
write it."""

from collections.abc import Container, Iterable

from shardwright.config.phrase import either, say


def none_of(setting: str, words: Iterable[str], job_field: str = "") -> str:
    """The fault of a setting, with its value, that stands for nothing here; `job_field` is what --set may give in its
    place."""
    way = say(", or --set {field}=NAME", field=job_field) if job_field else ""
    return say("{setting} can't be said here; use one of {words}{way}", setting=setting, words=tuple(words), way=way)


def none_of_few(setting: str, choices: list[str]) -> str:
    """The fault of a setting, with its value, that stands for nothing here, where there are few choices."""
    return say("{setting} can't be said here; use {choices}", setting=setting, choices=either(choices))


def wrong_value(setting: str, expected: str) -> str:
    """The fault of a setting whose value is not what is expected."""
    return say("{setting}: it should be {expected}", setting=setting, expected=expected)


def priced_as(software: str) -> str:
    """The note on the generation of software that prices a job."""
    return say("priced as {software} software (--as NAME for another)", software=software)


def nearest_here(setting: str, nearest: str) -> str:
    """The note on a setting, with its value, in whose place another is taken."""
    return say("{setting}: the nearest here is {nearest}", setting=setting, nearest=nearest)


def pages_stay(setting: str) -> str:
    """A note on an optimizer whose state is in pages that leave a full device."""
    return say(
        "{setting}: where a device is full, pages of the optimizer's state go to host memory there, and stay on the "
        "device here (--set plan.offload_optimizer=1)",
        setting=setting,
    )


def counted_as_adamw(setting: str, third: bool = False) -> str:
    """The note on a setting, with its value, that names an optimizer that is not here; `third` is True for one with
    three moments."""
    if third:
        return say(
            "{setting}: AdamW with two moments in float32 is counted here, and it keeps a third, of 4 bytes a "
            "parameter (--set optimizer.name=NAME)",
            setting=setting,
        )
    return say(
        "{setting}: AdamW with two moments in float32 is counted here (--set optimizer.name=NAME)", setting=setting
    )


def taken_rate(rate: str) -> str:
    """The note on a learning rate that nothing says."""
    return say("nothing says the learning rate; {rate} is taken (--set optimizer.learning_rate=RATE)", rate=rate)


def taken_length(tokens: int) -> str:
    """The note on a length of samples that nothing says."""
    return say("nothing says how long samples are; {tokens:,} tokens are taken (--set model.sequence=N)", tokens=tokens)


def unread_files(settings: Iterable[str], overrides: Container[str]) -> tuple[list[str], list[str]]:
    """(faults, notes) of settings, with their values, whose files decide the plan and are none of the files: faults,
    and notes where `overrides`, the fields that --set gives, say the stage of ZeRO."""
    if "plan.zero" in overrides:
        why = say("it is not read, and what it says of numbers, batches and offloading is not in the job")
        return [], [say("{subject}: {fault}", subject=setting, fault=why) for setting in settings]
    faults: list[str] = [
        say(
            "{setting} is a file that is not read, and it says how things are split: name it too, or say the stage of "
            "ZeRO: --set plan.zero=N",
            setting=setting,
        )
        for setting in settings
    ]
    return faults, []


def falls_as_cosine(setting: str) -> str:
    """The note on a form of the learning rate, with its setting, in whose place a cosine is taken."""
    return say("{setting}: the learning rate falls as a cosine here", setting=setting)


def falls_linearly(setting: str) -> str:
    """The note on a form of the learning rate, with its setting, in whose place a line is taken."""
    return say("{setting}: the rate falls linearly here", setting=setting)


def off_without_tensors(setting: str) -> str:
    """The note on sequence parallelism that a job with one tensor-parallel rank switches on."""
    return say("{setting} is off, as Megatron-LM turns it off where no tensors are split (tensor 1)", setting=setting)
