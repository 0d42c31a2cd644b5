"""Faults for settings that nothing has read and that could change the plan: a job is never understood only in part."""

import shlex
from collections.abc import Collection, Sequence

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.known_settings import could_matter, says_part, subjects, trains_a_part
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import readable

_MOST_SHOWN = 12
_RANKS, _OF_OPTIONS = ("lora_r", "lora_rank"), "options"  # of programs over transformers and peft


def unread_faults(settings: Settings, systems: Sequence[str], left_out: Collection[str]) -> list[str]:
    """Faults for unknown settings: those of adapters, frozen and quantised weights first, then those that could change
    the shape, the plan or the batch. `left_out` are settings that the user leaves out; each must be in the files."""
    topics = subjects(settings.given, *systems)
    unknown = [name for name in settings.unread() if name not in topics and not settings.is_named(name, left_out)]
    of_files = [name for name in unknown if not trains_a_part(name)]  # those of adapters are of many programs
    if 2 * len(of_files) > len(settings.given):
        return [
            say(
                "{settings}: {count} of {all} settings are unknown; check that the file is of this system",
                settings=_listed(settings, unknown),
                count=len(unknown),
                all=len(settings.given),
            )
        ]
    said_by_value = [name for name in unknown if says_part(settings.given[name])]
    unknown = [name for name in unknown if name in said_by_value or could_matter(name, settings.given[name], *systems)]
    of_parts = [name for name in unknown if name in said_by_value or trains_a_part(name)]
    faults: list[str] = [
        say("--set {name}=ignore: no setting in the files is called so", name=name)
        for name in left_out
        if not any(settings.is_named(key, (name,)) for key in settings.given)
    ]
    if of_parts:
        faults.append(
            say(
                "{settings}: adapters, frozen and quantised weights that are said so are not counted here, and the job "
                "would be another; to have it without them: {ways}",
                settings=_listed(settings, of_parts),
                ways=_with_rank(_ways(settings, of_parts), settings, of_parts, systems),
            )
        )
    others = [name for name in unknown if name not in of_parts]
    if others:
        faults.append(
            say(
                "{settings}: this is not known here and could change the model, the plan or the batch; say what it "
                "means by a field of the job (--set SECTION.FIELD=VALUE), and leave it out: {ways}",
                settings=_listed(settings, others),
                ways=_ways(settings, others),
            )
        )
    return faults


def _listed(settings: Settings, names: Sequence[str]) -> str:
    """Settings with their values, the first of many."""
    listed = tuple(readable(settings.setting_text(name)) for name in names[:_MOST_SHOWN])
    if len(names) > _MOST_SHOWN:
        return say("{listed} and {count} more", listed=listed, count=len(names) - _MOST_SHOWN)
    return say("{listed}", listed=listed)


def _with_rank(ways: str, settings: Settings, names: Sequence[str], systems: Sequence[str]) -> str:
    """The ways out, with one to adapters whose rank is said and that nothing known here turns on."""
    rank = next((settings.given[name] for name in names if name.lstrip("-") in _RANKS), None)
    if rank is None or _OF_OPTIONS not in systems:
        return ways
    return say(
        "{ways}; to have such adapters: --set model.adapter.rank={rank}", ways=ways, rank=shortened(str(rank), 20)
    )


def _ways(settings: Settings, names: Sequence[str]) -> str:
    return " ".join(f"--set {shlex.quote(settings.shown(name).lstrip('-'))}=ignore" for name in names)
