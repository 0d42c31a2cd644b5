"""Liger's kernels (linkedin/Liger-Kernel) in the models of a program over transformers' Trainer: its software is then
another, with norms, rotary positions, MLPs and a loss in kernels of their own."""

from shardwright.interchange.reading.settings import Settings

_OPTIONS = ("--use_liger_kernel", "--use_liger", "--enable_liger_kernel")  # transformers, TRL, LLaMA-Factory
_WITH_LIGER = {"transformers-2025": "transformers-liger", "deepspeed-2025": "deepspeed-liger"}


def with_liger(software: str, settings: Settings) -> str:
    """A generation of software, or the one that has Liger's kernels beside if an option turns them on."""
    answers = [settings.flag(name) for name in _OPTIONS]  # all are read
    return _WITH_LIGER.get(software, software) if any(answers) else software
