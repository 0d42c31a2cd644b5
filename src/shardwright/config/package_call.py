"""Calls of a package that has the name of what a job does, such as `shardwright.train("quickstart")`: they are refused
with the call that is right. Python itself says "'module' object is not callable", and no way out."""

import sys
from types import ModuleType
from typing import Any, NoReturn


def call_of_job(name: str, job: str = "") -> str:
    """The call by which a job does what `name` says; `job` is the one that was asked for, if any."""
    loaded = repr(job) if job else '"llama3-8b", devices=64, device="h100-sxm"'
    return f"shardwright.load({loaded}).{name}(...)"


class CommandPackage(ModuleType):
    """A package with the name of what a job does."""

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise TypeError with the call that is right."""
        name = self.__name__.rpartition(".")[2]
        job = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        raise TypeError(f"{self.__name__} is a package, not a function; a job has it: {call_of_job(name, job)}")


def refuse_calls(package: str) -> None:
    """Let calls of a package that is being imported tell the call that is right."""
    sys.modules[package].__class__ = CommandPackage
