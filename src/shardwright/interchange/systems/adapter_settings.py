"""Settings of adapters (LoRA), and of bases in NF4 (QLoRA), of programs over transformers and peft: TRL, LLaMA-Factory,
axolotl, ms-swift, Firefly, and the QLoRA paper's.

Bases in 8 bits or FP4 and other kinds of adapters stay unread, and are refused by their names (unread_settings.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardwright.config.adapter import TARGETS, Target
from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.systems import alpaca_lora, recipe_adapters

_ALL = ("all-linear", "all", "all_linear")
# Modules of models that are none of a layer: peft gives them adapters by their names alone.
_BESIDE_LAYERS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "output_layer")
_MODULES: dict[str, tuple[Target, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("out",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "linear_qkv": ("query", "key", "value"),
    "linear_proj": ("out",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
    # One map for several, and those of MLPs without a gate: GPT-2, GPT-NeoX, BLOOM, Falcon, GPT-J, Phi, InternLM 2.
    **dict.fromkeys(("query_key_value", "qkv_proj", "Wqkv", "wqkv", "c_attn"), ("query", "key", "value")),
    **dict.fromkeys(("dense_h_to_4h", "c_fc", "fc_in", "fc1", "gate_up_proj"), ("gate", "up")),
    **dict.fromkeys(("dense_4h_to_h", "fc_out", "fc2", "w2"), ("down",)),
    **dict.fromkeys(("dense", "out_proj", "wo"), ("out",)),
    "c_proj": ("out", "down"),
    "w1": ("gate",),
    "w3": ("up",),
}
_NUM_USUAL = 11  # of these, at the beginning, are said where another one is not known


@dataclass(frozen=True)
class _Program:
    """The way in which one program says that it trains adapters, by a setting with one of some values; its defaults of
    rank, of alpha (0: twice the rank) and of targets; and if scales of NF4 are quantised by default. `nf4_words` say
    that the base is in NF4, too: alone if `loads_by_word`, else beside a setting that loads it in 4 bits, which alone
    says so where there are none."""

    switch: str
    words: tuple[str, ...]
    rank: int  # 0 if programs with this setting have different defaults, so that the files have to say them
    alpha: float
    targets: tuple[Target, ...]
    is_double: bool = False
    nf4_words: tuple[str, ...] = ()
    loads_by_word: bool = False


_PLAIN_SWITCHES = ("use_lora", "lora", "enable_lora", "peft_enabled", "low_rank_training")  # of people's own programs
_NF4_SWITCHES = (
    "qlora",
    "use_qlora",
    "enable_qlora",
    "q_lora",
)  # of such programs alone: other bases of MindSpeed-LLM's
_PEFT_TARGETS: tuple[Target, ...] = ("query", "value")
_PROGRAMS = (
    _Program("use_peft_lora", ("true", "1"), 64, 16.0, ("query", "key", "value", "gate", "up", "down")),
    _Program("peft_scheme", ("lora",), 0, 0.0, ("query", "key", "value")),  # NeMo's
    # Of the flags of MindSpeed-LLM that name modules. Its weights of 4 bits are made before, in one type or another.
    _Program("mindspeed_lora", ("true",), 16, 32.0, (), nf4_words=("nf4",)),
    _Program("training_mode", ("lora",), 0, 0.0, ()),  # of people's own programs, too
    _Program(recipe_adapters.SWITCH, ("1",), 32, 32.0, ()),  # which name modules
    _Program(alpaca_lora.SWITCH, ("true",), 8, 16.0, _PEFT_TARGETS),
    *(
        _Program(switch, ("true", "1"), 0, 0.0, (), nf4_words=("true", "1"), loads_by_word=True)
        for switch in _NF4_SWITCHES
    ),
    *(_Program(switch, ("true", "1"), 0, 0.0, ()) for switch in _PLAIN_SWITCHES),
    _Program("finetuning_type", ("lora",), 8, 0.0, TARGETS, is_double=True),
    _Program("adapter", ("lora", "qlora"), 8, 16.0, _PEFT_TARGETS, is_double=True, nf4_words=("qlora",)),
    _Program("tuner_type", ("lora",), 8, 32.0, TARGETS),
    _Program("train_type", ("lora",), 8, 32.0, TARGETS),
    _Program("use_peft", ("true", "1", "yes"), 16, 32.0, _PEFT_TARGETS),
    # Firefly, and programs made of it, load in NF4 with quantised scales (load_model in its train.py).
    _Program("trains_qlora", ("true",), 64, 16.0, TARGETS, is_double=True),  # of _QLORA_DEFAULTS alone
    _Program(
        "train_mode", ("lora", "qlora"), 64, 16.0, TARGETS, is_double=True, nf4_words=("qlora",), loads_by_word=True
    ),
)
_SWITCHES = frozenset(f"--{program.switch}" for program in _PROGRAMS)
# Settings of a base in 4 bits, with the words that mean NF4 by bitsandbytes; other words stay unread.
_TRUE = ("true", "1", "yes")
_FOUR_BITS = (
    ("load_in_4bit", _TRUE),
    ("use_4bit", _TRUE),
    ("load_4bit", _TRUE),
    ("use_4bit_quantization", _TRUE),
    ("quantization_bit", ("4",)),
    ("load_in_bits", ("4",)),
    ("bits", ("4",)),
    ("qlora", _TRUE),  # beside the modules of MindSpeed-LLM; alone it is a switch
)
# Beginnings of options, and the words of a switch that has no adapters.
_OF_ADAPTERS = (
    *("lora_", "loraplus_", "bnb_4bit_", "pissa_", "use_rslora", "use_dora"),
    *("additional_target", "create_new_adapter", "target_modules", "modules_to_save"),
)
_WITHOUT = ("false", "0", "no", "full")
_NO_BITS = ("16", "32")
_NF4_SETTINGS = (
    ("bnb_4bit_quant_type", ("nf4",)),
    ("quantization_type", ("nf4",)),
    ("quant_type", ("nf4",)),
    ("full_finetune", ("false", "0", "no")),
    ("quantization_method", ("bnb", "bitsandbytes")),
    ("bnb_4bit_compute_dtype", ("bfloat16", "bf16", "torch.bfloat16", "auto")),
)
_DOUBLE = (
    "use_bnb_nested_quant",
    "use_nested_quant",
    "bnb_4bit_use_double_quant",
    "double_quantization",
    "double_quant",
)
_STORAGE = ("bnb_4bit_quant_storage", "bnb_4bit_quant_storage_dtype")  # the same bytes, seen as another type
_OF_EXPERTS = "quantize_moe_experts"  # axolotl's: the tensor of experts is in 4 bits, too
_TARGETS = ("lora_target_modules", "lora_target", "target_modules", "trainable", "lora_modules")
# Options that the QLoRA paper's program has where nothing is said.
_QLORA_DEFAULTS: dict[str, str | bool] = {
    "--trains_qlora": "true",
    "--bits": "4",
    "--source_max_len": "1024",
    "--target_max_len": "256",
    "--per_device_train_batch_size": "1",
    "--gradient_accumulation_steps": "16",
    "--gradient_checkpointing": True,
    "--optim": "paged_adamw_32bit",
    "--learning_rate": "2e-4",
    "--lr_scheduler_type": "constant",
    "--max_steps": "10000",
    "--max_grad_norm": "0.3",
}


_NAMES = re.compile(r"(?i)(?<![a-z])(q?lora|peft)(?![a-z])")  # in the name of a program that trains them always


def with_adapters_by_name(program: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a command, with those that the name of its program means."""
    if PurePath(program).stem == "qlora":
        return options if str(options.get("--full_finetune")).lower() == "true" else _QLORA_DEFAULTS | options
    is_said = bool(_SWITCHES & options.keys())
    return {"--use_lora": True} | options if _NAMES.search(program) and not is_said else options


_SECTIONS = ("--lora_config", "--peft_config", "--lora", "--peft")
_OF_SECTIONS = {
    **dict.fromkeys(("r", "rank", "lora_r", "lora_rank"), "--lora_r"),
    **dict.fromkeys(("alpha", "lora_alpha"), "--lora_alpha"),
    **dict.fromkeys(("dropout", "lora_dropout"), "--lora_dropout"),
    "target_modules": "--lora_target_modules",
}


def without_sections(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a file, with those of a section for adapters (lora_config: {r: 8}) as options of their own."""
    sections = {name: value for name, value in options.items() if name in _SECTIONS and isinstance(value, dict)}
    own = {
        _OF_SECTIONS.get(key, f"{name}.{key}"): value
        for name, section in sections.items()
        for key, value in section.items()
        if not (key == "task_type" or (key == "bias" and value == "none"))
    }
    return {name: value for name, value in options.items() if name not in sections} | own


_NEGATED = re.compile(
    rf"--no_((?:{'|'.join((*_PLAIN_SWITCHES, *_NF4_SWITCHES, 'use_peft', 'load_in_4bit', 'use_4bit'))}))"
)


def without_negations(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a command, with --no_qlora as --qlora false: switches of argparse have both names."""
    names = {name: f"--{match[1]}" for name in options if (match := _NEGATED.fullmatch(name))}
    return {names.get(name, name): "false" if name in names else value for name, value in options.items()}


def read_adapter(settings: Settings, fields: Flat, spelled: Callable[[str], str] = "--{}".format) -> None:
    """Set the fields of [model.adapter], if the settings ask for adapters. `spelled` gives the name of a setting."""
    known = [p for p in _PROGRAMS if p.switch not in _NF4_SWITCHES or spelled(p.switch).startswith("--")]
    program = next((p for p in known if _switch(settings, spelled(p.switch)) in p.words), None)
    if program is None and "model.adapter.rank" in settings.overrides:
        program = _Program("", (), 0, 0.0, ())  # the user says that there are adapters
    if _switch(settings, spelled("bits")) in _NO_BITS:
        settings.ignore(spelled("bits"))
    settings.ignore(*(spelled(name) for name, _ in _FOUR_BITS if _switch(settings, spelled(name)) in _WITHOUT))
    if program is None:
        _ignore_without_adapters(settings, spelled)
        if _NAMES.search(str(settings.given.get(spelled("output_dir"), ""))):
            settings.note(
                say(
                    "{setting} names adapters, and no option does: all weights are trained here (--set "
                    "model.adapter.rank=N for adapters)",
                    setting=settings.setting_text(spelled("output_dir")),
                )
            )
        return
    is_in_4_bits = any(_switch(settings, spelled(name)) in words for name, words in _FOUR_BITS)
    is_in_nf4 = _switch(settings, spelled(program.switch)) in program.nf4_words
    if is_in_nf4 and not (is_in_4_bits or program.loads_by_word):
        return
    # Releases of axolotl and MindSpeed-LLM differ in the type of 4 bits.
    if is_in_nf4 or (is_in_4_bits and (program.loads_by_word or not program.nf4_words)):
        _read_nf4(settings, fields, program, spelled)
    elif is_in_4_bits:
        _read_asked_base(settings, fields, program, spelled)
    # Now they are read: files say it in the words of several programs.
    settings.ignore(*(spelled(p.switch) for p in known if _switch(settings, spelled(p.switch)) in p.words))
    if program.loads_by_word:
        settings.ignore(*map(spelled, _PLAIN_SWITCHES))
    ranks = (spelled("lora_r"), spelled("lora_rank"), *([] if program.rank else [spelled("r")]))
    if not program.rank and not settings.has(*ranks) and "model.adapter.rank" not in settings.overrides:
        settings.faults.append(
            say(
                "{setting}: nothing says the rank; --set model.adapter.rank=N",
                setting=settings.setting_text(spelled(program.switch)),
            )
        )
    rank = settings.count(ranks, program.rank or 1, least=1)
    rank = whole(str(settings.overrides.get("model.adapter.rank", rank))) or rank
    alpha = settings.number((spelled("lora_alpha"),), program.alpha or 2.0 * rank)
    if not program.rank and not settings.has(spelled("lora_alpha")) and "model.adapter.alpha" not in settings.overrides:
        settings.note(
            say("nothing says alpha of the adapters; {alpha} is taken (--set model.adapter.alpha=NUMBER)", alpha=alpha)
        )
    targets = _targets(settings, program, spelled)
    fields |= {"model.adapter.rank": rank, "model.adapter.alpha": alpha, "model.adapter.targets": list(targets)}
    fields["precision.master"] = "float32"  # peft trains adapters in float32
    if settings.has(spelled("lora_dropout")):
        settings.lose(spelled("lora_dropout"), say("adapters have no dropout here"))


def _ignore_without_adapters(settings: Settings, spelled: Callable[[str], str]) -> None:
    """Mark as read what adapters would be like, where a switch says that there are none."""
    off = [p.switch for p in _PROGRAMS if _switch(settings, spelled(p.switch)) in _WITHOUT]
    settings.ignore(*map(spelled, off))
    if off:
        beginnings = tuple(map(spelled, _OF_ADAPTERS))
        settings.ignore(*(name for name in settings.given if name.startswith(beginnings)))


def _read_nf4(settings: Settings, fields: Flat, program: _Program, spelled: Callable[[str], str]) -> None:
    """Set the fields of a base in NF4. A setting of another type of 4 bits stays unread, and is refused."""
    for name, words in (*_FOUR_BITS, *_NF4_SETTINGS):
        if _switch(settings, spelled(name)) in words:
            settings.ignore(spelled(name))  # now it is read
    settings.ignore(*map(spelled, _STORAGE))
    names = [
        spelled(name)
        for name, words in (*_FOUR_BITS, (program.switch, program.nf4_words))
        if _switch(settings, spelled(name)) in words
    ]
    if not (settings.has(spelled(_OF_EXPERTS)) and settings.flag(spelled(_OF_EXPERTS))) and names:
        settings.four_bits = settings.setting_text(names[0])
    is_double = settings.flag(tuple(map(spelled, _DOUBLE)), program.is_double)
    fields |= {"model.adapter.base": "nf4", "model.adapter.double_quantization": is_double}


def _read_asked_base(settings: Settings, fields: Flat, program: _Program, spelled: Callable[[str], str]) -> None:
    """Read a base in 4 bits whose type releases differ in, if the user says it; else a fault asks for it."""
    if "model.adapter.base" in settings.overrides:
        _read_nf4(settings, fields, program, spelled)
        return
    names = [spelled(name) for name, words in _FOUR_BITS if _switch(settings, spelled(name)) in words]
    settings.ignore(*names, *(spelled(n) for n, words in _NF4_SETTINGS if _switch(settings, spelled(n)) in words))
    settings.faults.append(
        say(
            "{setting} beside {switch}: releases differ in the type of 4 bits; say --set model.adapter.base=nf4, or "
            "--set model.adapter.base=compute --set model.adapter.double_quantization=false for 16 bits",
            setting=settings.setting_text(names[0]),
            switch=settings.setting_text(spelled(program.switch)),
        )
    )


def _switch(settings: Settings, name: str) -> str:
    """The value of a setting, without noting that it is read."""
    return str(settings.given.get(name, "")).strip("'\"").lower()


def _targets(settings: Settings, program: _Program, spelled: Callable[[str], str]) -> tuple[Target, ...]:
    """The maps with an adapter, in their order; a fault for each module that is no map of a layer here."""
    linear, switch = spelled("lora_target_linear"), spelled(program.switch)
    is_all = settings.has(linear) and settings.flag(linear)
    present = tuple(spelled(name) for name in _TARGETS if settings.has(spelled(name)))
    words = [word for name in present for word in settings.words(name)]
    parts = [part.strip("[]'\"") for word in words for part in word.split(",")]
    modules = [part for part in parts if part]
    is_all |= any(module in _ALL for module in modules)
    settings.adapted_modules = tuple(modules)
    if is_all or (not modules and program.targets == TARGETS):
        settings.all_linear = settings.setting_text(next(iter([*present, linear] if is_all else []), switch))
    if not modules and is_all:
        return TARGETS
    if not modules and not program.targets and "model.adapter.targets" not in settings.overrides:
        settings.faults.append(say("nothing says which maps have adapters; --set model.adapter.targets=[query,value]"))
        return TARGETS
    if not modules:
        settings.note(
            say(
                "nothing says which maps have adapters; {names} are taken (--set model.adapter.targets=[...])",
                names=tuple(program.targets),
            )
        )
        return program.targets
    # beside all linear maps of the layers a further one adds nothing, unless it is none of a layer
    unknown = [module for module in modules if module in _BESIDE_LAYERS or not (is_all or module in _MODULES)]
    if unknown and "model.adapter.targets" not in settings.overrides:
        settings.faults.append(
            say(
                "{setting} names {modules}, and adapters are of {known} here; say them with --set "
                "model.adapter.targets=[...], such as [query,value]",
                setting=present[0],
                modules=tuple(map(shortened, unknown)),
                known=tuple(_MODULES)[:_NUM_USUAL],
            )
        )
    if is_all:
        return TARGETS
    chosen = {target for module in modules for target in _MODULES.get(module, ())}
    return tuple(target for target in TARGETS if target in chosen) or TARGETS
