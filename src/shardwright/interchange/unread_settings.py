"""Faults for settings that nothing has read and that could change the plan: a job is never understood only in part."""

import re
import shlex
from collections.abc import Collection, Sequence

from shardwright.config.base import shortened
from shardwright.config.catalog import written_alike
from shardwright.config.phrase import say
from shardwright.interchange.known_settings import could_matter, says_part, subjects, trains_a_part
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import readable

_MOST_SHOWN = 12
_SLIP = 0.9  # similarity from which an unknown name is taken for a known one that is written wrong
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
    slips = {name: meant for name in unknown if (meant := _meant(name, settings))}
    unknown = [name for name in unknown if name not in slips]
    said_by_value = [name for name in unknown if says_part(settings.given[name])]
    unknown = [name for name in unknown if name in said_by_value or could_matter(name, settings.given[name], *systems)]
    of_parts = [name for name in unknown if name in said_by_value or trains_a_part(name)]
    faults: list[str] = [
        say("--set {name}=ignore: no setting in the files is called so", name=name)
        for name in left_out
        if not any(settings.is_named(key, (name,)) for key in settings.given)
    ]
    faults += [
        say(
            "{setting}: this is not known here, and {meant} is; write that if it is meant, or leave this out: {ways}",
            setting=readable(settings.setting_text(name)),
            meant=settings.shown(meant),
            ways=_ways(settings, [name]),
        )
        for name, meant in slips.items()
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


def _meant(name: str, settings: Settings) -> str:
    """The setting that the reader of the files asks for, that they lack, and of which an unknown name may be a slip;
    empty if there is none. A digit is no slip: a third beta is not the second one."""
    section, _, own_name = name.rpartition(".")
    digits = re.findall(r"\d", own_name)
    asked = [
        other
        for other in settings.names_read - settings.given.keys()
        if other.rpartition(".")[0] == section
        and re.findall(r"\d", other.rpartition(".")[2]) == digits
        and other.lstrip("-") != name.lstrip("-")  # an option and a setting of a file, which have other meanings
    ]
    by_own_name = {other.rpartition(".")[2]: other for other in sorted(asked)}
    alike = written_alike(own_name, list(by_own_name), most=1, share=_SLIP)
    return by_own_name[alike[0]] if alike else ""


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
