"""Options of a launch besides the job: the launchers that take each, and its faults."""

import re
from dataclasses import dataclass
from typing import Literal

from shardwright.config import largest
from shardwright.config.phrase import both, say
from shardwright.config.units import DAY_S

Launcher = Literal["slurm", "kubernetes", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("slurm", "kubernetes", "torchrun")

_LAUNCHERS_OF_OPTION: dict[str, tuple[Launcher, ...]] = {
    "time": ("slurm", "kubernetes"),
    "account": ("slurm",),
    "partition": ("slurm",),
    "image": ("slurm", "kubernetes"),
    "claim": ("kubernetes",),
    "first_node": ("torchrun",),
}
# The time limits that Slurm takes, but "04:00", which it takes for 4 minutes.
_TIME = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<hours>\d{1,4}):(?P<minutes>\d\d):(?P<seconds>\d\d)|(?P<alone>\d{1,7})"
    r"|(?P<whole_days>\d{1,4})-(?P<day_hours>\d{1,2})(?::(?P<day_minutes>\d\d))?"
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_ACCOUNT = re.compile(r"[A-Za-z0-9_.,+-]{1,128}")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@#+-]{0,511}")  # or the path of a squashed image, for pyxis
_LAST_PORT = 65_535
_MOST_SAVE_S = 65_535  # the most that Slurm's --signal takes


@dataclass(frozen=True)
class LaunchOptions:
    """The options as typed; an empty text or 0 if an option is not given. `launchers` should have one entry."""

    launchers: tuple[Launcher, ...]
    port: int = 29500
    time: str = ""
    save_before: int = 0  # seconds to save and leave in, before the job is ended; 0: measured or predicted
    account: str = ""
    partition: str = ""
    image: str = ""
    claim: str = ""
    first_node: str = ""
    target: str = ""  # the software that runs the job, where it is not this runtime

    @property
    def launcher(self) -> Launcher:
        """The launcher, for options without faults."""
        return self.launchers[0]

    @property
    def limit_s(self) -> int:
        """Seconds of the time limit, for options without faults; 0 is no limit."""
        match = _TIME.fullmatch(self.time)
        if match is None:
            return 0
        if match["alone"]:
            return 60 * int(match["alone"])
        if match["whole_days"]:
            minutes = 60 * int(match["day_hours"]) + int(match["day_minutes"] or 0)
            return DAY_S * int(match["whole_days"]) + 60 * minutes
        return DAY_S * int(match["days"] or 0) + 3600 * int(match["hours"]) + 60 * int(match["minutes"]) + int(match[4])

    def faults(self) -> list[str]:
        """All faults of the options, each with a way out."""
        if len(self.launchers) != 1:
            fault = say("nothing says what starts the job; give one of --slurm, --kubernetes and --torchrun")
            if self.launchers:
                fault = say(
                    "{flags} are given; give one of --slurm, --kubernetes and --torchrun",
                    flags=both([f"--{launcher}" for launcher in self.launchers]),
                )
            return [fault, *self._faults_of_values()]
        faults = list[str]()
        for option, launchers in _LAUNCHERS_OF_OPTION.items():
            if getattr(self, option) and self.launcher not in launchers:
                flag = f"--{option.replace('_', '-')}"
                options = both([f"--{launcher}" for launcher in launchers])
                faults.append(
                    say(
                        "{flag} says nothing to --{launcher}; leave it out, or use {options}",
                        flag=flag,
                        launcher=self.launcher,
                        options=options,
                    )
                )
        if self.target and self.launcher != "slurm":
            faults.append(
                say(
                    "--for says nothing to --{launcher}; use --slurm, or start what `shardwright export JOB --to "
                    "{target}` writes",
                    launcher=self.launcher,
                    target=self.target,
                )
            )
        if self.target and self.save_before:
            faults.append(say("--save-before is of this runtime, and --for names other software; leave one out"))
        if self.launcher == "kubernetes" and not self.image:
            faults.append(say("--kubernetes runs the job in containers and no image is named; name one with --image"))
        return faults + self._faults_of_values()

    def _faults_of_values(self) -> list[str]:
        faults = list[str]()
        if self.time and not (_TIME.fullmatch(self.time) and 0 < self.limit_s <= largest.SECONDS):
            forms = say("minutes, HH:MM:SS or D-HH:MM:SS, such as 04:00:00")
            faults.append(say("--time {time} is no time limit; use {forms}", time=repr(self.time), forms=forms))
        if not 0 < self.port <= _LAST_PORT:
            faults.append(say("--port {port} is no port; use one of 1 to {last}", port=self.port, last=_LAST_PORT))
        if self.save_before > _MOST_SAVE_S:
            faults.append(
                say(
                    "--save-before {save_before} is more than Slurm's {most_save_s:,} s; use less",
                    save_before=self.save_before,
                    most_save_s=_MOST_SAVE_S,
                )
            )
        for option, pattern, example in (
            ("account", _ACCOUNT, say("letters, digits and _ . - such as research")),
            ("partition", _ACCOUNT, say("letters, digits and _ . - such as gpu")),
            ("claim", _CLAIM, say("small letters, digits and - such as training-runs")),
            ("first_node", _HOST, say("the name or address of a machine, such as node001")),
        ):
            value = getattr(self, option)
            if value and not pattern.fullmatch(value):
                faults.append(
                    say(
                        "--{option} {value} is no such name; use {example}",
                        option=option.replace("_", "-"),
                        value=repr(value),
                        example=example,
                    )
                )
        if self.image and not _IMAGE.fullmatch(self.image):
            example = say("registry.here/shardwright:1, or for pyxis registry.here#shardwright:1")
            faults.append(
                say(
                    "--image {image} is no name of an image; use one such as {example}",
                    image=repr(self.image),
                    example=example,
                )
            )
        return faults


def limit_text(seconds: int) -> str:
    """A time limit as Slurm writes it: "04:00:00", "2-00:00:00"."""
    days, seconds = divmod(seconds, DAY_S)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
