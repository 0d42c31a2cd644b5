"""Usage errors of click in the language of the command, recognised by their English text."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import IO, Any

import click
from click.core import iter_params_for_processing

from shardwright.cli.cluster_option_names import CLUSTER_OPTIONS
from shardwright.cli.command_language import command_language
from shardwright.cli.meant_words import field_meant, too_many_words
from shardwright.config.phrase import Phrase, both, in_language, say
from shardwright.config.recognised_phrases import recognised
from shardwright.config.text_columns import fitting_errors

# The messages of click, the more special ones first. Releases before 8.4 say "No such option: --x".
CLICK_MESSAGES = (
    "No such option {text}. Did you mean {name}?",
    "No such option {text}. (Did you mean one of: {listed}?)",
    "No such option {text}.",
    "No such option: {text} Did you mean {name}?",
    "No such option: {text} (Possible options: {listed})",
    "No such option: {text}",
    "No such command {text}. Did you mean {name}?",
    "No such command {text}. (Did you mean one of: {listed}?)",
    "No such command {text}.",
    "Invalid value for {text}: {reason}",
    "Invalid value: {reason}",
    "Missing command.",
    "Missing argument {name}.",
    "Missing option {name}. Choose from:{text}",
    "Missing option {text}.",
    "Got unexpected extra argument ({text})",
    "Got unexpected extra arguments ({text})",
    "Option {name} requires an argument.",
    "Option {name} does not take a value.",
    "{text} is not one of {listed}.",
    "{text} is not a valid integer.",
    "{text} is not a valid integer range.",
    "{text} is not a valid float.",
    "{text} is not a valid float range.",
    "{text} is not in the range {range}.",
    "File {text} does not exist.",
    "File {text} is a directory.",
    "File {text} is not readable.",
    "Directory {text} does not exist.",
    "Directory {text} is a file.",
    "Directory {text} is not readable.",
    "Path {text} does not exist.",
    "Path {text} is not readable.",
)

# Messages that name types of click.
_NO_WHOLE_NUMBER = ("{text} is not a valid integer.", "{text} is not a valid integer range.")
_NO_NUMBER = ("{text} is not a valid float.", "{text} is not a valid float range.")


def message_of(error: click.UsageError) -> str:
    """The message of an error, as a phrase if its words are ours or known ones of click."""
    if isinstance(error.message, Phrase) and not isinstance(error, click.BadParameter):
        return error.message
    phrase = recognised(error.format_message(), CLICK_MESSAGES)
    if not isinstance(phrase, Phrase) or "reason" not in phrase.values:
        return phrase
    return Phrase(phrase.template, phrase.values | {"reason": _reason_of(error)})


def _reason_of(error: click.UsageError) -> str:
    """The reason why a value is invalid."""
    if isinstance(error.message, Phrase):
        return error.message
    reason = recognised(error.message, CLICK_MESSAGES)
    if isinstance(reason, Phrase) and reason.template in _NO_WHOLE_NUMBER:
        return say("{text} is no whole number.", **reason.values)
    if isinstance(reason, Phrase) and reason.template in _NO_NUMBER:
        return say("{text} is no number.", **reason.values)
    return reason


class BadWordsError(click.UsageError):
    """Several options of one command line that are unknown, or values that are wrong or missing: `errors`, in the order
    of the line, the unknown options first."""

    def __init__(self, errors: Sequence[click.UsageError], ctx: click.Context) -> None:
        super().__init__("\n".join(error.format_message() for error in errors), ctx)
        self.errors = tuple(errors)


def bad_words(
    command: click.Command, ctx: click.Context, words: Sequence[str], first: click.UsageError
) -> click.UsageError:
    """The error of all unknown options of these words and of all values that a command refuses, of which click tells
    the `first`. Beside an unknown option, which may take the word behind it, only values of options are told."""
    unknown, known_words = _without_unknown(command, ctx, words)
    errors = [_explained(command, error, value) for error, value in unknown]
    try:
        given, _, order = command.make_parser(ctx).parse_args(known_words)
    except click.UsageError as error:
        errors.append(error)
        order = []
    for parameter in iter_params_for_processing(order, command.get_params(ctx) if order else []):
        if unknown and isinstance(parameter, click.Argument):
            continue
        try:
            parameter.process_value(ctx, parameter.consume_value(ctx, given)[0])
        except click.BadParameter as error:
            errors.append(error)
    errors = [_with_ways(command, error, words) for error in errors or [first]]
    return BadWordsError(errors, ctx) if len(errors) > 1 else errors[0]


def _without_unknown(
    command: click.Command, ctx: click.Context, words: Sequence[str]
) -> tuple[list[tuple[click.NoSuchOption, str]], list[str]]:
    """The errors of the unknown options of these words, each with the value that stands with it, which may be empty;
    and the words without these options."""
    errors, left = list[tuple[click.NoSuchOption, str]](), list(words)
    while True:
        try:
            command.make_parser(ctx).parse_args(list(left))
        except click.NoSuchOption as error:
            place = next((place for place, word in enumerate(left) if _is_option(word, error.option_name)), None)
            errors.append((error, "" if place is None else _value_at(left, place)))
            if place is not None:
                del left[place]
                continue
        except click.UsageError:
            pass
        return errors, left


def _value_at(words: Sequence[str], place: int) -> str:
    """The value that stands with the option at a place of some words: behind its sign of equality, or as the next word
    if that is no option."""
    _, sign, value = words[place].partition("=")
    following = words[place + 1] if place + 1 < len(words) else ""
    return value if sign else "" if following.startswith("-") else following


def _is_option(word: str, option: str) -> bool:
    """True if a word is an option, with or without a value, or a group of short ones that has it."""
    is_group = word[:1] == "-" != word[1:2] and len(option) == len("-x")
    return word.partition("=")[0] == option or (is_group and option[1] in word)


_LEAST_LIKE = 0.75  # the likeness of the option that was meant; of words alike by chance it is 0.6 to 0.7


def _explained(command: click.Command, error: click.NoSuchOption, value: str) -> click.UsageError:
    """The error of an unknown option, with the field that it names, what is like it, or with the commands that have
    it. `value` stands with it."""
    if (of_cluster := without_cluster(command, error)) is not None:
        return of_cluster
    name = error.option_name
    if way := getattr(command, "unneeded", {}).get(name):
        return click.UsageError(say("No such option '{option}'; {way}.", option=name, way=way), error.ctx)
    if meant := field_meant(command, name, value):
        return click.UsageError(meant, error.ctx)
    if any(SequenceMatcher(None, option, name).ratio() > _LEAST_LIKE for option in error.possibilities or ()):
        return error
    root = error.ctx.find_root().command if error.ctx is not None else None
    others = root.commands.items() if isinstance(root, click.Group) and name not in _ANYWHERE else ()
    having = [word for word, other in others if any(name in parameter.opts for parameter in other.params)]
    if not having:
        meant = field_meant(command, name, value, is_alike=True)
        return click.UsageError(meant, error.ctx) if meant else click.NoSuchOption(name, ctx=error.ctx)
    message = say("No such option '{option}'; it is an option of {commands}.", option=name, commands=both(having))
    return click.UsageError(message, error.ctx)


_EXTRA = ("Got unexpected extra argument ({text})", "Got unexpected extra arguments ({text})")


def _with_ways(command: click.Command, error: click.UsageError, words: Sequence[str]) -> click.UsageError:
    """The error of arguments that a command does not take, or of one that is missing, with ways out; others as they
    are."""
    phrase = recognised(error.format_message(), CLICK_MESSAGES)
    examples = getattr(command, "examples", ())
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument) and examples:
        message = say("{error} For example: shardwright {example}", error=phrase, example=examples[0])
        return click.UsageError(message, error.ctx)
    if not isinstance(phrase, Phrase) or phrase.template not in _EXTRA:
        return error
    ways = too_many_words(command, words, str(phrase.values["text"]).split())
    message = say("{error}; {ways}", error=phrase, ways=ways)
    return click.UsageError(message, error.ctx) if ways else error


_ANYWHERE = ("--json", "--html", "--set", "--lang")  # of so many commands that their names say nothing


def without_cluster(command: click.Command, error: click.NoSuchOption) -> click.UsageError | None:
    """The error of an option that makes a cluster, in a command that takes the cluster of its JOB, or several
    by --on; None for others."""
    takes_job = any(parameter.name == "job" for parameter in command.params)
    if not takes_job or all(error.option_name not in names for names in CLUSTER_OPTIONS.values()):
        return None
    if any("--on" in parameter.opts for parameter in command.params):
        message = say(
            "No such option '{option}': {command} takes its clusters by --on, such as shardwright {example}.",
            option=error.option_name,
            command=command.name,
            example=getattr(command, "examples", [""])[0],
        )
        return click.UsageError(message, error.ctx)
    message = say(
        "No such option '{option}': {command} takes the cluster of its JOB. Write a job for yours first: shardwright "
        "plan JOB --devices N --device NAME --toml chosen.toml, then shardwright {command} chosen.toml.",
        option=error.option_name,
        command=command.name,
    )
    return click.UsageError(message, error.ctx)


def text_of(error: click.UsageError, language: str) -> str:
    """The messages of an error in a language, a line each."""
    errors = error.errors if isinstance(error, BadWordsError) else (error,)
    return "\n".join(in_language(message_of(one), language) for one in errors)


class LocalizedUsageError(click.UsageError):
    """A usage error, with the usage and the way to the help, in a language."""

    def __init__(self, error: click.UsageError, language: str) -> None:
        super().__init__(error.message, error.ctx)
        self._text, self._language = text_of(error, language), language

    def format_message(self) -> str:
        """The message."""
        return self._text

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the usage, the command that prints the help, and the message."""
        if self.ctx is not None:
            help_words = f"{self.ctx.command_path} --help"
            hint = say("Try '{command}' for help.", command=help_words)
            click.echo(f"{self.ctx.get_usage()}\n{in_language(hint, self._language)}\n", file=file, err=True)
        message = say("Error: {message}", message=self._text)
        click.echo(fitting_errors(in_language(message, self._language)), file=file, err=True)


def localized(error: click.UsageError) -> click.UsageError:
    """The error in the language of its command; one that is shown in a way of its own, such as a help, as it is."""
    language = command_language(error.ctx)
    is_usual = type(error).show is click.UsageError.show
    return LocalizedUsageError(error, language) if is_usual else error
