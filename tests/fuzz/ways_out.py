"""Jobs with faults, and the ways out that their faults name: with one of them that fault is gone.

    python tests/fuzz/ways_out.py --seed 1 --count 2000

A way out is read where it says a field and a value: "set plan.zero to 3", `plan.cp_method = "ring"`, "use dp 2", and
"use 1, 2 or 4" of the field that the fault begins with. A choice left to the user ("use another width") is none.
"""

import argparse
import copy
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.draw import Fields, draw
from shardwright.config.base import PlanError
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.job_program import plan_faults

_SECTIONS = "model|plan|batch|precision|optimizer|data|run|checkpoint|health|cluster"
_FIELD = rf"(?:{_SECTIONS})(?:\.[a-z_0-9]+)+"
_VALUE = r"\"[^\"]*\"|'[^']*'|-?[0-9][0-9_.e+-]*[0-9]|[0-9]|true|false|none|\[[^\]]*\]"
_SAID = re.compile(rf"({_FIELD}) ?(?:=|to) ?({_VALUE})(?![\w.])")
_NUMBERS = re.compile(r"use ((?:[0-9]+)(?:, [0-9]+)*(?: or [0-9]+)?)(?:$|,| \()")
_AXES = re.compile(r"use (dp|tp|pp|cp|ep) ([0-9]+)(?:$|,)")
_BATCH = re.compile(r"use a batch of ([0-9]+)(?: or ([0-9]+))?")
_AT_MOST = re.compile(r"use at most ([0-9]+)(?:$|,| \()")
_WORD = re.compile(r"use \"([a-z0-9-]+)\"$")
_SCHEDULE = re.compile(r"(?:such as|or use|or schedule) '?([a-z0-9-]+)'?(?:$| \()")
_LEAVE_IT_OUT = re.compile(rf"and ({_FIELD}) is [^;]*; leave it out")
_LEAVE = re.compile(rf"leave ({_FIELD}) out")
_BEGINS = re.compile(rf"({_FIELD}) (?:[0-9]|= )")
DEFAULT = object()  # a field that is left out

CHANGED: tuple[tuple[str, str], ...] = tuple(
    (section, name)
    for section, names in {
        "plan": "tp pp cp ep dp zero schedule microbatch_size virtual_stages expert_tp zero_ranks sequence_parallel "
        "recompute compress offload_activations offload_parameters extra_warmup cp_method",
        "model": "heads kv_heads layers sequence mtp_layers tied_embeddings", "batch": "global_batch_size",
        "optimizer": "warmup_steps clip_grad_norm", "precision": "compute float8",
    }.items()
    for name in names.split()
)  # fmt: skip
_WORDS: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULES.names, "recompute": ("none", "full", "stage", "selective", "matmul", "budget"),
    "compress": ("none", "int8", "powersgd", "topk"), "cp_method": ("ring", "all-gather", "ulysses"),
    "compute": ("float32", "bf16", "fp16"), "float8": ("none", "rowwise", "delayed", "blockwise"),
    "sequence_parallel": (True, False), "offload_parameters": (True, False), "tied_embeddings": (True, False),
    "offload_activations": (True, False), "clip_grad_norm": (0.0, 1.0),
}  # fmt: skip


def drawn(seed: int, number: int) -> Fields:
    """A job in which one to three fields were changed, whatever the others say."""
    rng, fields = random.Random(f"ways out {seed}:{number}"), draw(seed, number)
    for section, name in rng.sample(CHANGED, rng.randint(1, 3)):
        fields.setdefault(section, {})[name] = rng.choice(_WORDS.get(name, (1, 2, 3, 4, 5, 7, 8, 12)))
    return fields


def faults_of(fields: Fields) -> list[str]:
    """All that `estimate` and `train` refuse of a job."""
    try:
        job = make_job(copy.deepcopy(fields))
    except PlanError as error:
        return list(error.faults)
    return plan_faults(job)


def ways_out(fault: str) -> Iterator[tuple[str, Any]]:
    """(field, value) of each way out that a fault says in such words."""
    _, semicolon, says = fault.rpartition("; ")
    if not semicolon or "it should be" in fault:  # a value that no field has; what it may be is said before
        return
    for field, value in _SAID.findall(says):
        yield field, _plain(value)
    if (numbers := _NUMBERS.match(says)) and (begins := _BEGINS.match(fault)):
        for number in re.findall("[0-9]+", numbers[1]):
            yield begins[1], int(number)
    if axis := _AXES.match(says):
        yield f"plan.{axis[1]}", int(axis[2])
    for number in filter(None, batch.groups() if (batch := _BATCH.match(says)) else ()):
        yield "batch.global_batch_size", int(number)
    if (begins := _BEGINS.match(fault)) and (most := _AT_MOST.match(says)):
        yield begins[1], int(most[1])
    if begins and (word := _WORD.match(says)):
        yield begins[1], word[1]
    if (schedule := _SCHEDULE.search(says)) and schedule[1] in SCHEDULES.names and "schedule" in fault:
        yield "plan.schedule", schedule[1]
    if left_out := _LEAVE_IT_OUT.search(fault) or _LEAVE.match(says):
        yield left_out[1], DEFAULT
    elif begins and says.startswith("leave it out"):
        yield begins[1], DEFAULT


def _plain(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text[0] in "\"'":
        return text[1:-1]
    if re.fullmatch("-?[0-9]+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def with_field(fields: Fields, field: str, value: Any) -> Fields:
    """The job with another value of a field."""
    result = copy.deepcopy(fields)
    *sections, name = field.split(".")
    place = result
    for section in sections:
        place = place.setdefault(section, {})
    if value is DEFAULT:
        place.pop(name, None)
    else:
        place[name] = value
    return result


def kind_of(fault: str) -> str:
    """A fault without its numbers and its way out."""
    return re.sub(r"[0-9][0-9.]*", "N", fault.rpartition("; ")[0])


def false_ways(fields: Fields) -> tuple[int, list[str]]:
    """(how many ways out were tried, those with which their fault is still there)."""
    tried, wrong = 0, []
    for fault in faults_of(fields):
        for field, value in ways_out(fault):
            tried += 1
            left = faults_of(with_field(fields, field, value))
            if kind_of(fault) in map(kind_of, left):
                same = next(one for one in left if kind_of(one) == kind_of(fault))
                wrong.append(f"{fault}\n  with {field} = {'nothing' if value is DEFAULT else repr(value)}: {same}")
    return tried, wrong


def main() -> int:
    """Draw, and print each way out that is none. 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    asked = parser.parse_args()
    tried, wrong = 0, []
    for number in range(asked.count):
        here, of_draw = false_ways(drawn(asked.seed, number))
        tried, wrong = tried + here, wrong + [f"{number}: {one}" for one in of_draw]
    print("\n".join([*wrong, f"{asked.count} draws, {tried} ways out tried, {len(wrong)} are none"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
