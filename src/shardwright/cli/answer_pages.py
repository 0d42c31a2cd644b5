"""The option `--html` of commands that answer with `--json`: the same answer as a page, by one mechanism for all."""

import io
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from shardwright.cli.command_language import LANGUAGE, tell
from shardwright.cli.job_options import NamedFile
from shardwright.config.phrase import language_of_locale, say

_KEY, _TEXT, _LINES, _VALUES = (f"{__name__}.{name}" for name in ("file", "text", "lines", "values"))
_HELP = "Write the answer as a page, one file that loads nothing."


def with_page(command: click.Command) -> click.Command:
    """The command with the option `--html FILE`. It answers in JSON, of which the page is made."""
    option = click.Option(
        ["--html"],
        type=NamedFile(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=_HELP,
        expose_value=False,
        callback=lambda context, _, file: context.meta.__setitem__(_KEY, file),
    )
    command.params.append(option)
    assert command.callback is not None, "every command of this program has one"
    command.callback = _paged(command.callback)
    return command


def _paged(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A command's function, which writes the page if one was asked for."""

    def paged(*args: Any, as_json: bool, **options: Any) -> Any:
        context = click.get_current_context()
        file = context.meta.get(_KEY)
        if file is None:
            return answer(*args, as_json=as_json, **options)
        _refuse_page(file)
        printed, status = io.StringIO(), 0
        try:
            with redirect_stdout(printed):
                answer(*args, as_json=True, **options)
        except SystemExit as end:  # an answer may be a bad one, and is printed all the same
            status = int(end.code or 0)
        _write(file, context, printed.getvalue())
        if as_json:
            click.echo(printed.getvalue().rstrip("\n"))
        else:
            tell(say("the answer is in {file}", file=str(file)))
        sys.exit(status)

    return paged


def tell_answer(as_json: bool, values: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print an answer: its values as JSON, or its text. A page has both."""
    context = click.get_current_context()
    if context.meta.get(_KEY) is not None:
        from shardwright.config.text_columns import unbroken_lines

        context.meta[_TEXT], context.meta[_VALUES] = text(), (answer := values())
        with unbroken_lines():
            context.meta[_LINES] = text()
        click.echo(json.dumps(answer))
        return
    click.echo(json.dumps(values()) if as_json else text())


def _refuse_page(file: Path) -> None:
    """Raise PlanError if no page can be written to the file: before an answer that may take minutes, not after it."""
    from shardwright.report.output import replace_output
    from shardwright.report.page_document import BEGINNING

    replace_output(file, BEGINNING, "--html", dry_run=True)


def _write(file: Path, context: click.Context, printed: str) -> None:
    from shardwright.report.answer_page import answer_page
    from shardwright.report.output import replace_output

    name, language = context.info_name or "", context.find_root().meta.get(LANGUAGE) or language_of_locale()
    subject = next((str(value) for key, value in context.params.items() if key in ("job", "name", "runs")), "")
    command = shlex.join(["shardwright", *sys.argv[1:]]) if sys.argv[1:2] == [name] else f"shardwright {name}"
    answer = context.meta.get(_VALUES, None)  # whose sentences are phrases, which a page tells in its language
    answer = json.loads(printed) if answer is None else answer
    text, lines = context.meta.get(_TEXT, ""), context.meta.get(_LINES, "")
    page = answer_page(f"{name} {subject}".strip(), command, answer, language, text=text, lines=lines)
    replace_output(file, page, "--html")
