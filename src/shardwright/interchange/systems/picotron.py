"""picotron (Hugging Face): one JSON with degrees, a model of Llama's kind by its name, and the batch.

Its optimizer changes the bf16 weights themselves, and gradients add up in float32 (picotron/data_parallel).
"""

from collections.abc import Mapping

from shardwright.config import largest
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.named_model import is_model, read_named_model, shape_fields
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.setting_notes import priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.rows import Rule, Table, count, degree, number, read_row
from shardwright.interchange.started_configuration import ranks_faults, started_configuration
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems.vocabularies import padded_vocabulary

SIGNS = (
    FileSigns(
        (("distributed", "model", "training", "dataset"),),
        commands=(r"\bpicotron\S{0,100}/train\.py\s+--config[= ]",),
    ),
)
_STARTED = (FileSigns(commands=(r"\.py\b.*\s--config[= ]",)),)  # as many programs are, so its file comes first
_RINGS = {"ring": "ring", "ulysses": "ulysses", "headwise": "ulysses"}  # of forks
_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "muon": "muon"}
_OF_OPTIMIZERS = ("training.optimizer.name", "model.optimizer")  # of forks
_EPSILON = "training.optimizer.muon_eps"
_ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}


def _read_numbers(settings: Settings, fields: Flat) -> None:
    if settings.flag("distributed.use_cpu"):
        settings.faults.append(say("distributed.use_cpu: it trains on processors; leave it out"))
    settings.ignore("model.dtype")  # picotron looks at the device alone
    fields |= {"precision.compute": "bf16", "precision.gradients": "float32"}
    settings.lost.append(say("the optimizer changes bf16 weights there, and keeps them in float32 too here"))
    name = settings.one_of(_OF_OPTIMIZERS, _OPTIMIZERS, "adamw", "optimizer.name")
    decay = settings.number(("training.optimizer.weight_decay",), 0.01)
    fields |= {"optimizer.name": name, "optimizer.weight_decay": decay, "optimizer.beta2": 0.999}
    if name == "muon":
        fields["optimizer.momentum"] = settings.number(("training.optimizer.momentum",), 0.95)
        fields["optimizer.newton_schulz_steps"] = settings.count("training.optimizer.ns_steps", 5, least=1)
    settings.ignore(*(key for key in settings.given if key.startswith(("training.optimizer.ns_co", _EPSILON))))
    if settings.flag("training.torch_compile"):
        settings.lose("training.torch_compile", say("this changes the time of a step, which is not counted"))
    fields |= {"optimizer.clip_grad_norm": settings.number(("training.grad_clip_norm",), 0.0)}
    fields |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}


def _read_batch(settings: Settings, fields: Flat) -> None:
    accumulation = settings.count("training.gradient_accumulation_steps", 1, largest.BATCH, 1)
    fields["batch.global_batch_size"] = fields["plan.microbatch_size"] * accumulation * fields["plan.dp"]
    fields["plan.schedule"] = settings.one_of("distributed.pp_engine", _ENGINES, "afab", "plan.schedule")
    fields["plan.cp_method"] = settings.one_of("distributed.cp_mode", _RINGS, "ring", "plan.cp_method")
    fields["plan.sequence_parallel"] = settings.flag("distributed.sequence_parallel") and fields["plan.tp"] > 1
    fields["plan.zero"] = 0
    if fields["plan.cp"] > 1 and not settings.flag("model.cp_zigzag_en"):
        settings.lost.append(say("ranks of cp take parts of a sequence in turn there, and share its work evenly here"))


def _read_shape(settings: Settings, fields: Flat) -> None:
    """Read what the file says over the model that it names. Its decoder has no biases and a head of its own."""
    for name, job_field in (
        ("num_hidden_layers", "layers"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "kv_heads"),
    ):
        if (value := settings.count(f"model.{name}", 0)) > 0:
            fields[f"model.{job_field}"] = value
    if tokens := settings.count("model.vocab_size", 0):  # of forks
        fields["model.vocab"] = tokens
    if positions := settings.count("model.max_position_embeddings", 0):
        fields["model.longest_sequence"] = positions
    if fields.get("model.tied_embeddings"):
        settings.note(say("the output head has weights of its own, as picotron has it"))
    if fields.get("model.qkv_bias") or fields.get("model.bias"):
        settings.note(say("linear layers have no biases, as picotron has them"))
    fields |= {"model.tied_embeddings": False, "model.qkv_bias": False, "model.bias": False, "model.head_dim": 0}
    for name in ("attention_bias", "mlp_bias", "head_bias"):
        fields.pop(f"model.{name}", None)
    if settings.flag("model.vocab_padding_en"):
        fields["model.vocab"] = padded_vocabulary(settings, fields, fields["model.vocab"])
    settings.ignore("model.use_flash_attention", "model.use_fused_adam", "model.fuse_qkv_en")


TABLE: Table = (
    degree("distributed.dp_size", "plan.dp", largest.RANKS),
    degree("distributed.tp_size", "plan.tp", largest.RANKS),
    degree("distributed.pp_size", "plan.pp", largest.PIPELINE_RANKS),
    degree("distributed.cp_size", "plan.cp", largest.RANKS),
    Rule(("model.num_hidden_layers",), _read_shape),
    count("training.seq_length", "model.sequence", 1024),
    degree("training.micro_batch_size", "plan.microbatch_size", largest.BATCH),
    Rule(("training.gradient_accumulation_steps",), _read_batch),
    Rule(("model.dtype",), _read_numbers),
    number("training.learning_rate training.learning_rate_adam", "optimizer.learning_rate", 3e-4),
    count("training.total_train_steps", "optimizer.steps", 1000),
)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a configuration, with the model's config.json, and the script that starts it, if there is one. Raises
    ShellFault."""
    started = started_configuration(texts, asked, _STARTED)
    data = [read_data(name, text) for name, text in started.files.items()]
    model = next((keys for keys in data if is_model(keys)), None)
    own = [keys for keys in data if not is_model(keys)]
    if len(own) != 1:
        raise ShellFault(
            say("{count} configurations of picotron; name one, and the config.json of its model", count=len(own))
        )
    settings = Settings(flat_keys(own[0]), notes=list(started.notes), overrides=asked.fields)
    fields = shape_fields(read_named_model(model, ("model.name",), asked, settings), asked)
    if "model.layers" not in fields:
        settings.ignore(*settings.given)
        return ReadResult(fields, settings, "megatron-core")
    for row in TABLE:
        read_row(row, settings, fields)
    settings.faults += ranks_faults(fields, asked, started)
    settings.note(priced_as("megatron-core"))
    return ReadResult(fields, settings, "megatron-core", *started.shape, known_in=("picotron",))


FACTS = SourceSystem(name="picotron", place=170, title="picotron", read=read, is_behind_scripts=True, signs=SIGNS)
