"""Programs by what they train, which their names say; those that train no decoder of text are refused."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings

# The kind of training of a program -> words of its name.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    say("an encoder (BERT)"): ("bert", "mlm", "roberta", "electra", "glue", "ner", "swag", "biencoder", "qa"),
    say("an encoder and a decoder (T5)"): (
        "t5",
        "mt5",
        "bart",
        "ul2",
        "seq2seq",
        "summarization",
        "translation",
        "whisper",
    ),
    say("state spaces (Mamba)"): ("mamba", "mamba2", "jamba", "hybrid", "griffin", "recurrentgemma", "rwkv", "hyena"),
    say("images or sound"): (
        "vision",
        "vlm",
        "vit",
        "clip",
        "dino",
        "multimodal",
        "mimo",
        "llava",
        "vl",
        "inpaint",
        "mae",
        "sd3",
        "flux",
        "dit",
        "diffusion",
        "lora_dreambooth",
        "dreambooth",
        "text_to_image",
        "speech",
        "audio",
        "asr",
        "neva",
        "video",
        "gan",
        "cifar",
        "cifar10",
        "imagenet",
        "resnet",
    ),
    say("labels, not tokens (classification)"): (
        "classification",
        "classifier",
        "classify",
        "cls",
        "clf",
        "regression",
        "ner",
    ),
    say("retrieval"): ("retro", "ict", "retriever", "retrieval", "embedding", "reranker"),
    say("a reward"): ("reward", "rm", "prm"),
    say("a model by preferences, beside a copy of it (DPO and the like)"): (
        "dpo",
        "kto",
        "orpo",
        "cpo",
        "ipo",
        "simpo",
        "online_dpo",
    ),
    say("a model by rewards, with sampling (PPO, GRPO and the like)"): (
        "ppo",
        "grpo",
        "rloo",
        "rlhf",
        "rl",
        "reinforce",
    ),
    say("a small model by a large one (distillation)"): ("distill", "distillation", "gkd", "kd"),
}

# Words of programs that generate, evaluate, serve or change weights, if none of the others is there.
_NOT_TRAINING = (
    "generate",
    "embed",
    "generation",
    "inference",
    "infer",
    "evaluate",
    "evaluation",
    "eval",
    "server",
    "serve",
    "convert",
    "converter",
    "conversion",
    "convertor",
    "inf",
    "merge",
    "checkpoint",
    "card",
)
_BETWEEN_FORMATS = re.compile(r"(?:hf|mg|meg[a-z]*|mcore|ckpt|nemo|neox)2[a-z]+")  # such as hf2mcore
# Words of names that say less than what the program stands in.
_PLAIN_WORDS = ("main", "run", "cli", "train", "trainer", "pre", "start", "launch", "mem", "lora", "ds", "deepspeed")
_TRAINING = ("train", "pretrain", "posttrain", "finetune", "tune", "sft", "pretraining", "training", "finetuning")


def _words_in(name: str) -> set[str]:
    """The words of a program's name, with those of what it stands in if it has a plain one."""
    parts = name.removesuffix(".py").lower().replace("/", ".").split(".")  # of a module such as tools.dpo_qwen, too
    is_plain = len(parts) > 1 and {*re.split(r"[^a-z0-9]+", parts[-1])} <= {*_PLAIN_WORDS, ""}
    stem = ".".join(parts[-2:]) if is_plain else parts[-1]
    return {*re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9]+b\b|cls(?![a-z]))", stem)}


def trains_nothing(name: str) -> bool:
    """True if a program's name says that it generates, evaluates, serves or changes weights, and not that it trains."""
    words = _words_in(name)
    is_other = bool(words & {*_NOT_TRAINING}) or any(map(_BETWEEN_FORMATS.fullmatch, words))
    return is_other and not words & {*_TRAINING}


TRAINS = "TRAINS"  # the variable by which --set says that a program trains a decoder, whatever its name
_TOKENS = "tokens"
_SETTLED = f"--set {TRAINS}={_TOKENS}"


def program_fault(name: str, variables: Mapping[str, str]) -> str:
    """The fault of a program that trains no decoder of text by next tokens; empty if its name says none of it, or if
    the user's variables say that it trains one."""
    if variables.get(TRAINS) == _TOKENS:
        return ""
    words = _words_in(name)
    kind = next((kind for kind, known in _OTHERS.items() if words & {*known}), "")
    if not kind and trains_nothing(name):
        return say(
            "{program} trains nothing by its name; name a script that starts training, or if this one trains a decoder "
            "by next tokens, {settled}",
            program=shortened(name, 60),
            settled=_SETTLED,
        )
    if not kind:
        return ""
    return say(
        "{program} trains {kind} by its name, and decoders that learn next tokens are counted here; name a script that "
        "trains one, or if this one does, {settled}",
        program=shortened(name, 60),
        kind=kind,
        settled=_SETTLED,
    )


def class_fault(name: str, variables: Mapping[str, str]) -> str:
    """The fault of a model of a class that is no decoder of text by the words of its name, such as MambaModel."""
    return program_fault("_".join(re.findall(r"[A-Z][a-z0-9]+|[A-Z]+(?![a-z])|[a-z0-9]+", name)), variables)


# Words of names of programs that train a decoder of text, and beginnings of names of models that are one.
_OF_PROGRAMS = {
    *(*_TRAINING, "main", "run", "cli", "trainer", "gpt", "gpt2", "gpt3", "llm", "lm", "core", "mcore", "megatron"),
    *("moe", "continue"),
    *("cpt", "distributed", "model", "text", "py", "legacy", "entry", "start", "ds", "deepspeed", "causal", "dense"),
}
_MODELS = (
    *("llama", "qwen", "mixtral", "mistral", "deepseek", "gemma", "falcon", "baichuan", "chatglm", "glm", "yi", "phi"),
    *("internlm", "aquila", "bloom", "opt", "starcoder", "kimi", "minimax", "grok", "yuan", "nemotron", "olmo"),
    "hunyuan",
)


def _words_of(name: str) -> list[str]:
    """The words of the last part of a program's name, of a path or of a module."""
    stem = name.rpartition("/")[2].removesuffix(".py").rpartition(".")[2].lower()
    return re.findall(r"[a-z]+", stem)


_SAYS_TRAINING = re.compile(r"--do[_-]train(?:=(.*))?")
_SAYS_ANOTHER = re.compile(r"--do[_-](?:eval|predict)(?:=.*)?")


def without_evaluations(commands: Sequence[Sequence[str]]) -> list[int]:
    """The places of the commands that train, where some of them say so (--do_train): not of those that say that they do
    not, nor of those that say that they evaluate or predict, alone. All places where none says that it trains."""
    answers = [_says_training(words) for words in commands]
    if True not in answers:
        return [*range(len(commands))]
    return [
        place
        for place, words in enumerate(commands)
        if answers[place] or (answers[place] is None and not any(map(_SAYS_ANOTHER.fullmatch, words)))
    ]


def _says_training(words: Sequence[str]) -> bool | None:
    """True or False if a command says that it trains or that it does not, by --do_train; None if it says nothing."""
    for word, value in pairwise([*words, ""]):
        if match := _SAYS_TRAINING.fullmatch(word):
            text = match[1] if match[1] is not None else "" if value.startswith("-") else value
            return text.strip("'\"").lower() not in ("false", "0", "no")
    return None


def trains_by_name(name: str) -> bool:
    """True if a word of a program's name says that it trains."""
    return bool({*_words_of(name)} & {*_TRAINING})


def taken_for_gpt(name: str) -> list[str]:
    """A note on a program of Megatron-LM's kind whose name is that of another model: its flags are read as they are
    meant for GPT."""
    words = [word for word in _words_of(name) if len(word) > 1 and word not in _OF_PROGRAMS]
    if all(word.startswith(_MODELS) for word in words):
        return []
    return [say("{program} is taken for a program that trains the decoder of its flags", program=shortened(name, 60))]


_WITH_LEARNED_POSITIONS = ("opt", "starcoder")  # the one of BigCode's first release


def own_layers_fault(name: str) -> str:
    """The fault of a program of Megatron-LM's kind whose name is that of a model without learned positions, where no
    flag says other positions than GPT-2's: such a program makes layers of its own. Empty for any other name."""
    without = tuple(model for model in _MODELS if model not in _WITH_LEARNED_POSITIONS)
    if not any(word.startswith(without) for word in _words_of(name)):
        return ""
    return say(
        "{program} is called after a model without learned positions, and no flag says which positions there are: its "
        "layers may be its own. Say them with --set model.positions=rotary --set model.norm=rmsnorm --set "
        "model.gated_mlp=true --set model.activation=silu --set model.bias=false --set model.tied_embeddings=false, or "
        "those of GPT-2 with --set model.positions=learned",
        program=shortened(name, 60),
    )


def told_by_names(names: Sequence[str]) -> list[str]:
    """A line on the first of some names, of files or of outputs, that says training of a reward, by preferences or by
    rewards, for programs whose options need not say it; none if no name says so, or one says next tokens too."""
    for name in names:
        words = {*re.split(r"[^a-z0-9]+", name.lower())}
        kinds = [kind for kind, known in _OTHERS.items() if words & {*known} and known[0] in _FIRST_OF_PREFERENCES]
        if kinds and not words & {*_OF_TOKENS, "pretrain"}:
            return [
                say(
                    "{name} trains {kind} by its name, and no option does: next tokens are counted here",
                    name=shortened(name, 60),
                    kind=kinds[0],
                )
            ]
    return []


def told_of_vocabulary(name: str) -> list[str]:
    """A line on a program that trains a decoder of sound by its name: it adds tokens to those of the model."""
    if not _words_in(name) & {"tts", "voice"}:
        return []
    return [
        say(
            "{program} learns sound by its name, for which such programs add tokens: the vocabulary is the model's "
            "here (--set model.vocab=N)",
            program=shortened(name, 60),
        )
    ]


_OF_OWN_PARSER = re.compile(r"--[a-z0-9]+(?:-[a-z0-9]+)+(?:=.*)?", re.DOTALL)
_OF_TRAINER = re.compile(r"--\w*_\w*(?:=.*)?", re.DOTALL)  # of HfArgumentParser: options are names of fields


def taken_for_trainer(name: str, words: Sequence[str]) -> list[str]:
    """A note on a program whose options are the Trainer's with dashes in all of them, as an own parser spells them: its
    loop may be its own, too, and what that does stands in no option."""
    if not name or any(map(_OF_TRAINER.fullmatch, words)) or not any(map(_OF_OWN_PARSER.fullmatch, words)):
        return []
    return [
        say(
            "{program} has options with dashes, as a parser of its own: it is taken for a program of transformers' "
            "Trainer, and what it sets itself, such as recomputation, shards or the type of weights, is not seen "
            "(--set plan.recompute=full, --set plan.zero=N)",
            program=shortened(name, 60),
        )
    ]


def told_by_path(path: str) -> list[str]:
    """A line on a folder of a configuration's path, or its file, that is called after another kind of training, which
    the program that takes it would say; none if a folder says next tokens, too. Folders above the working one, or of a
    path from the root, say where it is kept."""
    whole = PurePath(path)
    parts = [*(() if whole.is_absolute() else whole.parts[:-1]), whole.stem]
    words = {part: {*re.split(r"[^a-z0-9]+", part.lower())} for part in parts}
    if any(of_part & {*_OF_TOKENS, *_TRAINING} - {"train", "training"} for of_part in words.values()):
        return []
    for part, of_part in words.items():
        kind = next((kind for kind, known in _OTHERS.items() if of_part & {*known} - {*_SHORT}), "")
        if kind:
            return [
                say(
                    "{name} trains {kind} by its name, and no option does: next tokens are counted here",
                    name=shortened(part, 60),
                    kind=kind,
                )
            ]
    return []


_SHORT = ("qa", "ner", "hybrid", "mae", "gan", "dit", "cls", "clf", "ict", "rm", "rl", "kd", "clip", "translation")
_FIRST_OF_PREFERENCES = ("reward", "dpo", "ppo")
# Options of transformers' Trainer for training by preferences, rewards or noise.
_PREFERENCES = (
    "--use_asft_loss",
    "--reward_model",
    "--process_reward_model",
    "--diffusion",
    "--ebft",
    "--beta",
    "--pref_beta",
    "--max_prompt_length",
    "--max_completion_length",
    "--num_generations",
)
# Beginnings of further ones, which no release of a program for next tokens has.
_PREFERRED = (
    "--ref_model",
    "--reference_model",
    "--reward_",
    "--dpo_",
    "--kto_",
    "--orpo_",
    "--simpo_",
    "--cpo_",
    "--rpo_",
    "--precompute_ref",
    "--kl_",
)
# Options of classification.
_LABELS = ("--label_column_name", "--label_column_names", "--label_column", "--text_column_names", "--do_regression")
_OFF = ("false", "0", "no", "none", "null", "")
_OF_TOKENS = ("sft", "pt", "pretrain", "cpt")
_KINDS = ("--stage", "--training_stage", "--train_stage", "--rlhf_type", "--rl", "--algorithm")
# Options that mean nothing beside a word of training by next tokens.
_OF_STAGES = {"--stage": ("--pref_beta", "--reward_model"), "--algorithm": ("--beta",)}


def other_loss_fault(settings: Sequence[str]) -> str:
    """The fault of settings, with their values, that train by preferences, rewards or noise."""
    return say(
        "{settings}: training by preferences, rewards or noise (DPO, GRPO, diffusion) keeps further models or "
        "samples, or has another loss, and is not counted here",
        settings=tuple(settings),
    )


def read_kind(settings: Settings, _: Flat) -> None:
    """Refuse stages that train no decoder by next tokens, and options of training by preferences or rewards. Where no
    option says the kind, the name of the output may."""
    if settings.given.get("--finetuning_type") == "full":
        settings.ignore("--finetuning_type")
    of_stages = tuple(
        option
        for kind, options in _OF_STAGES.items()
        for option in options
        if settings.has(kind) and settings.text(kind) in _OF_TOKENS
    )
    of_tokens = of_stages or any(settings.text(kind) in _OF_TOKENS for kind in _KINDS if settings.has(kind))
    preferences = [name for name in _PREFERENCES if name not in of_stages and settings.has(name)]
    if not of_tokens:
        preferred = [name for name in settings.given if name.startswith(_PREFERRED)]
        preferences += [name for name in preferred if settings.text(name).lower() not in _OFF]
    if preferences:
        settings.faults.append(other_loss_fault([*map(settings.setting_text, dict.fromkeys(preferences))]))
    labels = [name for name in _LABELS if settings.has(name) and settings.text(name).lower() not in _OFF]
    if labels:
        setting = settings.setting_text(labels[0])
        settings.faults.append(say("{setting}: training by next tokens is counted here", setting=setting))
    if settings.has("--mlm_probability") and settings.text("--mlm", "true").lower() == "true":
        setting = settings.setting_text("--mlm_probability")  # of masked tokens
        settings.faults.append(say("{setting}: training by next tokens is counted here", setting=setting))
    if not preferences and not any(settings.has(name) for name in _KINDS):
        settings.lost += told_by_names([PurePath(str(settings.given.get("--output_dir", ""))).name])
    for name in _KINDS:
        if settings.text(name, "sft") in _OF_TOKENS:
            continue
        fault = program_fault(settings.text(name), {})
        setting = settings.setting_text(name)
        settings.faults.append(fault or say("{setting} is not counted here; use sft or pt", setting=setting))
