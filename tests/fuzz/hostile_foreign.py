"""Cases of launch scripts and configurations of other systems that are wrong, or meant to do harm."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePath
from random import Random
from typing import Any

from fuzz import mutations as mutate
from fuzz.hostile import Case
from fuzz.hostile_python import PYTHON_FORMS, mangled_python
from fuzz.trainer_jobs import trainer_files, trainer_jobs
from interchange.public_jobs import files_of, public_jobs
from interchange.wrapped_files import WRAPPED
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.exported import Lacking, exported
from shardwright.interchange.reading.plain_data import read_data, read_documents
from shardwright.interchange.system import SYSTEMS, System

_LLAMA = ("cluster.name=mine", "cluster.device=h100-sxm", "cluster.devices_per_node=8", "cluster.nodes=1", "plan.dp=8",
          "model.name=llama3-8b", "model.sequence=4096", "precision.compute=bf16", "plan.zero=3",
          "plan.tp=1", "plan.pp=1")  # fmt: skip
# Shell scripts that could go on for ever, grow without end, or lead elsewhere.
_BOMBS = (
    "A=x\n" + "A=$A$A\n" * 60,
    "A='A'\nB=${A:-${A:-${A:-$A}}}\n",
    "N=$((9**9**9**9))\n",
    "N=$((2 ** 62 * 4))\n",
    "N=$((1/0))\n",
    "N=$(expr 9 '**' 9 '**' 9 '**' 9)\n",
    "N=$(echo '" + "(" * 3000 + "1" + ")" * 3000 + "' | bc)\n",
    "N=" + "$(echo " * 40 + "1" + ")" * 40 + "\n",
    "source " + "../" * 90 + "etc/x.sh\nsource /dev/stdin.sh\nbash run.sh\n",
    "N=$(( " + "(" * 3000 + "1" + ")" * 3000 + " ))\n",
    "while true; do :; done\n",
    "for i in 1 2 3; do eval $i; done\n",
    ". run.sh\n",
    "source ./run.sh\n",
    "bash run.sh\n",
    "sbatch <<EOF\nbash run.sh\nEOF\n",
    "X='eval $X'\neval $X\n",
    "cat <<EOT > f\nnever ends",
    "if [ 1 ]; then\n" * 200,
    "case x in\n",
    "( " * 500,
    "{ " * 500,
    "A=( 1 2 3\n",
    "A=(",
    "echo '",
    'echo "',
    "${",
    "$((",
    "$(",
    "`",
    "f() { f; }\nf\n",
    "A[999999999]=1\n",
    'B="${A[99999999999999999999]}"\n',
    "exit 1\n",
    "unset TP\n",
    "set -e\n",
    "rm -rf /\n",
    "--num-layers",
    "\\",
    "\x00",
    "\r\n",
    "<<<<<<",
    ">&>&>&",
    "A=${B:=${C:=${D:?no}}}\n",
    "A=(" + "word " * 60_000 + ")\n",
    "JOB=$(sbatch run.sh)\n",
    "IFS='" + "ab" * 20_000 + "'\nN=" + "xa" * 20_000 + "\nrun $N\n",
    "mapfile -t N <<EOF\n" + "x\n" * 60_000 + "EOF\nrun ${N[@]:1}\n",
    "read -a N <<< '" + "x " * 20_000 + "'\n",
    "let " + "N[" * 9_000 + "\n",
    "N=$((" + "N<<" * 2_000 + "9))\n",
    "((" + "N=" * 9_000 + "9))\n",
    "case a in " + "a) N=1;& " * 2_000 + "esac\n",
    "case a in a) N=1;;& ;;& ;&\n",
    "f() ( f; )\nf | cat &\n",
    "echo 'source more.sh; source more.sh' > more.sh\nsource more.sh\n",
    "for i in 1 2; do break 99999999999999999999; done\n",
    "declare -n N=N\nN=1\ndeclare -n M=$N\n",
    "declare -i N=N+1\nN+=N\n",
    'export "=" "=1" $(env) "$(env)"\n',
    "printf -v\nlet\nread\nmapfile <<< x\ntime\ncommand\n",
    "JOB=" + "$(sbatch --wrap " * 40 + "x" + ")" * 40 + "\n",
    "case $RANK in\n" * 70,
    "case $RANK in\n[0-9])\n" + "bash run.sh\n" * 40 + ";;\nesac\n",
    "EXTRA='" + '{"a":' * 3000 + "1" + "}" * 3000 + "'\n",
    "torchrun a.py --own_kwargs '" + '{"a":' * 3000 + "' x" + "=" * 5000 + " ++a.b=1\n",
    'bash -c "bash -c \'bash -c \\"torchrun a.py --num-layers 1 --hidden-size 2\\"\'"\n',
)
# System -> settings of an adapter.
_LORA: dict[str, dict[str, Any]] = {
    "axolotl": {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
    "llamafactory": {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "q_proj,v_proj"},
    "ms-swift": {"tuner_type": "lora", "lora_rank": 8, "lora_alpha": 32, "target_modules": "all-linear"},
    "trl": {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj", "o_proj"]},
}
# Megatron-LM's arguments as a YAML, and the script that names it.
_YAML_OF_MEGATRON = (
    ("run.sh", "torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg gpt.yaml\n"),
    (
        "gpt.yaml",
        "language_model: {num_layers: 4, hidden_size: 512, num_attention_heads: 8, num_query_groups: 2,\n"
        "  activation_func: swiglu, add_bias_linear: false, normalization: RMSNorm}\n"
        "model_parallel: {tensor_model_parallel_size: 2, sequence_parallel: true, bf16: true}\n"
        "micro_batch_size: 2\nglobal_batch_size: 32\nseq_length: 1024\nmax_position_embeddings: 1024\n"
        "position_embedding_type: rope\nuse_distributed_optimizer: true\nlr: 1.0e-4\ntrain_iters: 10\n",
    ),
)
_WORDS = ("--tensor-model-parallel-size", "--unknown-flag", "$TP", "${N:-8}", "$((2*4))", "$(expr 2 \\* 4)", "'", "\\")
# Digits that are no number, or one that no machine word holds.
_DIGITS = ("²", "1²", "٣", "٣²", "--5", "-²", "1" * 5000, "9" * 19, "0" * 30, "1_000", "+7", "²:8", "1.²")
_ARGUMENTS = (
    ["--devices", "64", "--device", "h100-sxm"], ["--devices", "7"], ["--device", "nope"], ["--set", "TP=4"],
    ["--set", "plan.tp=3"], ["--set", "model.vocab=1000"], ["--set", "=4"], ["--set", "A"],
    ["--devices-per-node", "3"], [],
)  # fmt: skip


@lru_cache(maxsize=1)
def _bases() -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Files of every system that are right."""
    result = [(job["system"], tuple(files_of(job).items())) for job in public_jobs().values()]
    job = load_job("quickstart", list(_LLAMA))
    written = [(system.name, tuple(_written(system, job).items())) for system in SYSTEMS.values()]
    script = dict(written)["torchtitan"][0]
    return (
        *result,
        *written,
        *_adapted(),
        ("megatron", _YAML_OF_MEGATRON),
        *(("megatron", ((name, text),)) for name, text in WRAPPED.items()),
        *(("torchtitan", (script, ("job_config.py", text))) for text in PYTHON_FORMS),
    )


def _adapted() -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Files of the trainers that train adapters, each with one."""
    for job in trainer_jobs():
        if job["system"] in _LORA:
            settings = job["settings"] | _LORA[job["system"]]
            yield job["system"], tuple(trainer_files(job | {"settings": settings}).items())


def _written(system: System, job: JobSpec) -> dict[str, str]:
    """Files of the job, or of the nearest one that the system has."""
    try:
        return exported(system, job).files
    except Lacking as lack:
        if lack.nearest is None:
            raise
        return exported(system, lack.nearest).files


def foreign_case(random: Random) -> Case:
    """Files of another system with keys, values, words or bytes that are wrong."""
    system, files = random.choice(_bases())
    if random.random() < 0.05:
        system = random.choice(list(SYSTEMS))
    case = Case("foreign", ["import", system, *(name for name, _ in files), "--json"])
    case.arguments += random.choice(_ARGUMENTS)
    wrong = random.choice(files)[0]
    for name, text in files:
        raw = text.encode()
        if name == wrong:
            raw = _mangled(random, name, text)
        case.put(name, raw)
    if random.random() < 0.02:
        case.special["odd.sh"] = random.choice(["fifo", "sparse", "-> /dev/zero", "-> ."])
        case.arguments.append("odd.sh")
    return case


def _mangled(random: Random, name: str, text: str) -> bytes:
    if random.random() < 0.3:
        return mutate.broken(random, text.encode())
    if PurePath(name).suffix in (".sh", ""):  # a recipe of a Makefile has no suffix
        return _mangled_script(random, text).encode("utf-8", "surrogatepass")
    if PurePath(name).suffix == ".py":
        return mangled_python(random, text).encode("utf-8", "surrogatepass")
    documents = read_documents(name, text) if "---" in text else [read_data(name, text)]
    data: Any = mutate.fields(random, documents[-1], ["tp", "stage", "model", "trainer", "replicas", "command"])
    if not isinstance(data, dict):
        return json.dumps(data).encode()
    if random.random() < 0.3:
        _put_digits(random, data)
    kind = PurePath(name).suffix
    written = {".toml": mutate.toml, ".json": json.dumps}.get(kind, _yaml)(data)
    return written.encode("utf-8", "surrogatepass")


def _put_digits(random: Random, data: dict[Any, Any]) -> None:
    """Digits that are no number, in the place of some value that is no section."""
    while data:
        key = random.choice(list(data))
        if not isinstance(data[key], dict):
            data[key] = random.choice(_DIGITS)
            return
        data = data[key]


def _yaml(data: Any) -> str:
    try:
        return yaml_text(data)
    except (ValueError, TypeError, AttributeError):
        return json.dumps(data)


def _mangled_script(random: Random, text: str) -> str:
    kind = random.randrange(4)
    lines = text.splitlines(keepends=True)
    if kind == 0:
        at = random.randrange(len(lines) + 1)
        return "".join([*lines[:at], random.choice(_BOMBS), *lines[at:]])
    words = text.split(" ")
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(len(words))
        if kind == 1:
            words[at] = random.choice(_DIGITS) if random.random() < 0.3 else str(mutate.value(random, 8))[:2000]
        elif kind == 2:
            words.insert(at, random.choice(_WORDS + _DIGITS))
        else:
            del words[at]
    return " ".join(words)
