"""Chat templates of strangers: the sandbox they run in is one that holds, and so is the process around it."""

import tomllib
from pathlib import Path

import pytest

from shardwright.config.base import PlanError, RunError
from shardwright.config.data import DataSpec
from shardwright.train.data import encoding_pool, template_sandbox
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, TemplateError
from shardwright.train.data.encoding_pool import EncodingPool
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.template_sandbox import LOWEST_JINJA, UnsafeJinjaError, refuse_unsafe

CHAT = Chat("line 1", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
ROOT = Path(__file__).parents[2]


def template_of(text: str) -> TemplateFiles:
    return TemplateFiles(text, Path("t.jinja"), {})


@pytest.mark.parametrize("version", ["3.1.5", "3.1.0", "3.0.3", "2.11"])
def test_a_sandbox_that_can_be_left_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that has an older Jinja than the package asks for."""
    with pytest.raises(UnsafeJinjaError, match=r"pip install 'jinja2>=3\.1\.6'$"):
        refuse_unsafe(version)
    monkeypatch.setattr(template_sandbox, "version", lambda name: version)
    with pytest.raises(TemplateError, match=f"Jinja2 {version} is installed"):
        ChatTemplate(template_of("a"))


@pytest.mark.parametrize("version", ["3.1.6", "3.1.10", "3.2.0", "4.0.dev1", "10.0"])
def test_later_sandboxes_are_taken(version: str) -> None:
    refuse_unsafe(version)


def test_the_package_asks_for_the_sandbox_that_it_takes() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert f"jinja2>={LOWEST_JINJA}" in asked


@pytest.mark.parametrize(
    "text",
    [
        '{{ ("{0.__globals__[json].codecs.sys.modules[os].environ[HOME]}" | attr("format"))(raise_exception) }}',
        '{{ ("{0.__globals__}" | attr("format_map"))({"0": raise_exception}) }}',
        '{{ [raise_exception] | map(attribute="__globals__") | list | first | tojson }}',
    ],
)
def test_no_function_leads_out(text: str) -> None:
    with pytest.raises(TemplateError, match="line 1: the chat template refuses it"):
        ChatTemplate(template_of(text)).write(CHAT)


@pytest.mark.parametrize(
    ("text", "written"), [("{{ 2 ** 10 * 3 }}", "3072"), ("{{ 'ab' * 3 }}", "ababab"), ("{{ 4 ** -1 }}", "0.25")]
)
def test_usual_arithmetic_is_done(text: str, written: str) -> None:
    assert ChatTemplate(template_of(text)).write(CHAT).text == written


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
        "{{ (2 ** 65000) * (2 ** 65000) > 1 }}",
    ],
)
def test_numbers_that_never_end_are_refused(text: str) -> None:
    """Of constants, too, which are computed while the template is compiled."""
    with EncodingPool(EncodingSetup(DataSpec(), template_of(text)), 1) as pool:  # a process of its own ends in time
        future = pool.submit([CHAT])
        with pytest.raises(PlanError, match=r"a number of more than 65,536 bits .*data\.chat_template"):
            future.result()


@pytest.mark.processes
def test_a_process_that_ends_at_its_files_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = "import sys; sys.path[:] = {path!r}\nimport os; sys.stdin.buffer.read(8); os.abort()"
    monkeypatch.setattr(encoding_pool, "_MAIN", ending)
    with EncodingPool(EncodingSetup(DataSpec(), template_of("a")), 1) as pool:
        future = pool.submit([CHAT])
        with pytest.raises(
            RunError, match=r"while it read bytes and the chat template t\.jinja, has ended \(signal 6\): .*name"
        ):
            future.result()


def test_the_process_of_a_template_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_SECRET", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    passed = encoding_pool._environment()
    assert "secret" not in passed.values()
    assert {"PATH", "LC_ALL"} <= {*passed}


@pytest.mark.processes
def test_what_a_library_says_of_its_end_is_not_for_the_user(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """But for the last line, where Python ended by an error."""
    ending = "import sys; sys.path[:] = {path!r}\nsys.stdin.buffer.read(8)\nraise SystemError('much')"
    monkeypatch.setattr(encoding_pool, "_MAIN", ending)
    with EncodingPool(EncodingSetup(DataSpec(), None), 1) as pool:
        future = pool.submit(["a text"])
        with pytest.raises(RunError, match=r"while it read bytes, has ended \(exit status 1: SystemError: much\): "):
            future.result()
    assert capfd.readouterr().err == ""
