"""Known settings of other systems that have no effect on a plan (known.toml, known_megatron.toml,
known_trainers.toml)."""

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwright.config.phrase import fixed
from shardwright.interchange.reading.plain_data import keys_of, object_of

KNOWN_FILES = ("known.toml", "known_megatron.toml", "known_trainers.toml")


@cache
def _known() -> dict[str, Any]:
    files = (resources.files(__package__) / name for name in KNOWN_FILES)
    return {key: table for file in files for key, table in tomllib.loads(file.read_text(encoding="utf-8")).items()}


class _Beginning(NamedTuple):
    """The beginning of names of settings on a subject. With `is_all` every name with it is known."""

    text: str
    is_all: bool
    subject: str


@cache
def _beginnings(system: str) -> tuple[_Beginning, ...]:
    """The known beginnings of names of a system, the longest first."""
    beginnings = [
        _Beginning(name.removesuffix("*"), name.endswith("*"), fixed(subject))
        for subject, names in _known()[system].items()
        for name in names
    ]
    return tuple(sorted(beginnings, key=lambda beginning: -len(beginning.text)))


def subject_of(system: str, name: str) -> str:
    """The subject of a setting that has no effect on the plan; empty if it is unknown.

    A name is known by its beginning if no word behind that could mean a size, a degree or what is trained; a beginning
    that ends with * stands for all names.
    """
    for beginning in _beginnings(system):
        if name.startswith(beginning.text) and (beginning.is_all or _is_harmless_after(beginning.text, name)):
            return beginning.subject
    return ""


def _is_harmless_after(beginning: str, name: str) -> bool:
    """True if a name says no more that matters than its known beginning does."""
    is_part = trains_a_part(name) and not trains_a_part(beginning)  # "--module" is no "--modules_to_save"
    return not (is_part or _has_weight(name[len(beginning) :]))


# Words of names that could mean the shape of a model, a plan, a batch, a length, memory, or what is trained.
_MATTERS = re.compile(
    r"\b(layers?|experts?|moe|kv|heads?|hidden|dense|sizes?|lengths?|len|seq|seqlen|sequences?|batch|microbatch|batches"
    r"|offload\w*|swap\w*|sparse|parallel\w*|degrees?|width|dims?|window\w*|vocab\w*|recompute\w*|remat\w*|shard\w*|mtp"
    r"|bubble|vision|projector|hybrid|mamba|kd|teacher|distill\w*|ltd|ssm|context|accum\w*|embed\w*|attention|attn"
    r"|topk|stages?|pipeline|tokens|ema|checkpointing|galore|apollo|badam|pure|overrides|cla|kvstates|mixture of depths"
    r"|(grads?|gradients?|activations?) (checkpoint|ckpt)|(checkpoint|ckpt) (grads?|gradients?|activations?)"
    r"|(ref|reference|rl|reward|teacher|guide|assistant|proxy|auxiliary|target|critic|judge|old) model"
    r"|(post|sandwich|qk|q|k) ?norm|spec|[a-z]*glu|gelu tanh|outer|subgroup|dualpipe\w*"
    r"|(norm|activation|act|mlp|ffn|position|positional) (fn |func |function |encoding |embedding )?(type|kind)|no bias"
    r"|model provider|gpt oss|num labels|kt)\b"
)
_DEGREES = re.compile(r"(?:^|[\s._-])(?:[tpcdem]p|vpp|etp)$")  # names that are short for degrees
# Words of names that mean none of these, whatever their section is.
_HARMLESS = re.compile(
    r"\b(seed|learning rate|lr|decays?|warmup|cooldown|intervals?|freq|frequency|folder|dir|path|log|logging|wandb"
    r"|tensorboard|verbose|print|timeout|profil\w*)\b"
)
_TRAINS_A_PART = re.compile(
    r"\b(q?lora\w*|dora|peft\w*|adapters?|finetuning|freeze\w*|frozen|unfreeze\w*|unfrozen\w*|trainable"
    r"|(mask|router|head|embeddings?|projector|bias|norms?) only|only (train|tune)\w*"
    r"|modules to save|additional target|llama ?pro\w*"
    r"|spectrum|lisa\w*|qat|onebit\w*|llmcompressor|quant(?!izers)\w*|gptq|awq|nf4"
    r"|[48]bit|bits|bnb|tuner\w*|train type)\b|^ {2}(rank|alpha)$"  # of options, with --
)
_PARTS = (
    "lora",
    "qlora",
    "rslora",
    "dora",
    "qdora",
    "adalora",
    "loha",
    "lokr",
    "ia3",
    "freeze",
    "frozen",
    "prefix_tuning",
    "prompt_tuning",
)
_LATENT_RANK = re.compile(r"(q|kv)[-_]lora[-_]rank")  # of latent attention, which has no adapters
# An option of an optimizer, and optimizers with other moments than AdamW, which is counted where nothing says more.
_OPTIMIZER = re.compile(r"\bopt(im|imizer)?\b")
_OF_OTHER_MOMENTS = re.compile(r"\b(sgd|adafactor|lion|muon|sophia\w*|shampoo|soap|lamb|adagrad|rmsprop|signsgd)\b")
# An option that names an optimizer, and names of Adam and AdamW.
_NAMES_OPTIMIZER = re.compile(r"\bopt(im|imizer)?( (name|type|selection|select|kind|class|choice|algorithm))?$")
_ADAM = re.compile(
    r"((torch|optim|apex|deepspeed|fused|hf|te|core|distributed)[._ ]*)*adamw?([._ ]*(torch|hf|fused|apex))*"
)
_REMARK = re.compile(r"_{0,2}(comment|remark)s?(_|$)|_{1,2}(notes?|readme|doc)(_|$)|//|#")  # names of remarks
_UNSAID = "?"  # a value that is not known
_COPIES = ("data_parallel", "data-parallel", "ddp")  # values of a parallelism that a job without other words has
_NO_VALUES = ("0", "0.0", "none", "null", "false", "no", "standard", "{}", "[]")
_WHOLE = ("full",)  # values of a way of training by which no part of the weights is left out


def _has_weight(name: str) -> bool:
    return trains_a_part(name) or _MATTERS.search(_words(name)) is not None or _DEGREES.search(name) is not None


def trains_a_part(name: str) -> bool:
    """True if a setting by its name is about adapters, frozen or quantised weights."""
    return not _LATENT_RANK.search(name) and _TRAINS_A_PART.search(_words(name)) is not None


def says_part(value: Any) -> bool:
    """True if a value is the name of a way in which only a part of the weights is trained."""
    return str(value).strip("'\"").lower() in _PARTS


def could_matter(name: str, value: Any, *systems: str) -> bool:
    """True if an unknown setting could change the plan, by its section or by the words of its name or of its keys."""
    if inner := object_of(value):
        return any(could_matter(f"{name}.{key}", part, *systems) for key, part in inner.items())
    text = str(value).lower()
    if _is_remark(name, value):
        return False
    if keys := keys_of(text):
        return any(could_matter(f"{name}.{key}", _UNSAID, *systems) for key in keys)
    if _OPTIMIZER.search(_words(name)) and _OF_OTHER_MOMENTS.search(text):
        return True
    if _NAMES_OPTIMIZER.search(_words(name)) and not (text in (*_NO_VALUES, "true") or _ADAM.fullmatch(text)):
        return True
    is_degree = _DEGREES.search(name) or re.search(r"parallel|degree|size$", name)
    if text in (*_NO_VALUES, *_COPIES, *(_WHOLE if trains_a_part(name) else ())) or (text == "1" and is_degree):
        return False
    sections = tuple(section for system in systems for section in _known()["sections"].get(system, ()))
    is_listed = any(name in _known()["changes"].get(system, ()) for system in systems)
    return is_listed or _has_weight(name) or (name.startswith(sections) and not _HARMLESS.search(_words(name)))


def _is_remark(name: str, value: Any) -> bool:
    """True for a text that a JSON, which has no comments, keeps under a name that no setting has: _note, //, #."""
    key = name.rpartition(".")[2].lstrip("-")
    is_of_words = isinstance(value, str) and " " in value.strip()
    return isinstance(value, str) and (bool(_REMARK.match(key)) or (key.startswith("_") and is_of_words))


def _words(name: str) -> str:
    """The words of a name, with blanks between; norms of layers are no layers, the size of a model is its name, and
    files of data in shards are files."""
    plain = re.sub(r"model[-_]size\b", "model", re.sub(r"layer[-_]?norm", "norm", name.lower()))
    plain = re.sub(r"shards?[-_](?=(?:files?|paths?|dir|folder|glob)\b)", "", plain)
    return re.sub(r"[-_.]", " ", plain)


def is_uncounted(subject: str) -> bool:
    """True if settings on a subject have an effect that the cost model does not count."""
    return subject in _known()["uncounted"]["subjects"]


def is_usual(name: str, value: Any) -> bool:
    """True if a setting on an uncounted subject has the value that the cost model assumes."""
    return str(value) in _known()["usual"].get(name, ())


def subjects(names: Any, *systems: str) -> dict[str, str]:
    """Subjects, by name, of the settings that have no effect on the plan in one of the systems."""
    by_name = {name: next(filter(None, (subject_of(system, name) for system in systems)), "") for name in names}
    return {name: subject for name, subject in by_name.items() if subject}


def known_setting(list_name: str, system: str, name: str) -> bool:
    """True if a list of known.toml ("takes_nothing", "takes_several") has a setting of a system."""
    return name.startswith(tuple(_known()[list_name].get(system, ())))


def program(system: str) -> str:
    """The program that launchers of a system start."""
    return str(_known()["programs"][system])
