"""The pages show what their commands print and what their figures compute, in both languages alike."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.gate_facts import GATES
from shardwright.config.text_columns import num_columns
from shardwright.learn.computed_answers import questions_of
from shardwright.learn.idea_figures import FIGURES
from shardwright.learn.idea_pages import IDEAS, LANGUAGES, OTHERS, PAGES, QUESTIONS, SYSTEMS, TERMS, IdeaPage, page_of
from support.languages import num_chinese, words_of_picture
from support.learn_pages import BLOCK, commands, figure_file, filled, output_of, pictures, renewed

ROOT = Path(__file__).parents[2]
NAMES = (*IDEAS, *OTHERS, "index")
ALIKE = [name for name in NAMES if name != QUESTIONS]
ANSWER = re.compile(r"^\*\*(?:Answer:|答：)\*\*(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
ASKED = {"en": "**Question {}.**", "zh": "**问题 {}.**"}
NUMBER = re.compile(r"(?<![a-zA-Z\d.-])\d+(?:\.\d+)?")
AMOUNT = re.compile(r"\d[\d,]*(?:\.\d+)? (?:[KMGT]iB)")
OF_THE_PROCESS = re.compile(r"\([^()]* for the process itself\)")
NUMBERED = re.compile(r"^\*\*(?:Question|问题) (\d+)\.", re.MULTILINE)
DECIDES = {"en": "**Decides:** `", "zh": "**判据：** `"}
# Terms as the field writes them, on the pages that teach them.
TERM_BY_PAGE = {
    "device-memory": "显存", "collectives": "集合通信", "data-parallel": "数据并行", "tensor-parallel": "张量并行",
    "context-parallel": "上下文并行", "pipelines": "流水线并行", "experts": "专家并行", "recomputation": "重计算",
    "mixed-precision": "混合精度",
}  # fmt: skip


def page(name: str, language: str) -> str:
    return IdeaPage(name, language).markdown


def programs(command: str) -> list[str]:
    """Our command without a language, and the names of the programs after it, whose words are of a language."""
    own, *filters = re.split(r" \| (?=[a-z])", command.replace("\\\n", " "))
    return [" ".join(re.sub(r" --lang (en|zh)\b", "", own).split()), *(each.split()[0] for each in filters)]


def numbers_in(output: str) -> set[str]:
    return set(NUMBER.findall(output.replace(",", "")))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_shows_is_what_is_printed(name: str) -> None:
    for language in LANGUAGES:
        text = page(name, language)
        assert filled(text) == text, "run tests/support/learn_pages.py"
        assert all(output_of(command).strip() for command in commands(text))


@pytest.mark.parametrize("name", ALIKE)
def test_both_languages_have_the_same_commands_and_figures(name: str) -> None:
    english, chinese = page(name, "en"), page(name, "zh")
    pairs = list(zip(BLOCK.finditer(english), BLOCK.finditer(chinese), strict=True))
    assert pairs
    for one, other in pairs:
        assert programs(one["command"]) == programs(other["command"])
        assert numbers_in(one["output"]) == numbers_in(other["output"]), other["command"]
    others = [BLOCK.sub("", text) for text in (english, chinese)]  # such as commands that a reader is told to type
    assert re.findall(r"^```sh\n.*?^```", others[0], re.M | re.S) == re.findall(
        r"^```sh\n.*?^```", others[1], re.M | re.S
    )
    assert pictures(english) == pictures(chinese)
    assert english.count("\n## ") == chinese.count("\n## ")
    assert set(re.findall(r"`(src/[^`]+)`", english)) == set(re.findall(r"`(src/[^`]+)`", chinese))
    assert re.findall(r"\]\(([^)]+\.md)\)", english) == re.findall(r"\]\(([^)]+\.md)\)", chinese)


@pytest.mark.parametrize("name", [*IDEAS, *SYSTEMS])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_page_has_all_its_parts(name: str, language: str) -> None:
    text = page(name, language)
    assert text.count(DECIDES[language]) == 1 and pictures(text)
    answers = [match[1] for match in ANSWER.finditer(text)]
    assert len(answers) == 2 and all(ASKED[language].format(number) in text for number in (1, 2))
    files = re.findall(r"`(src/[^`]+)`", text)
    assert files and all((ROOT / file).exists() for file in files), files
    shown = " ".join(block["command"] + block["output"] for block in BLOCK.finditer(text))
    numbers = set(re.findall(r"\d+(?:\.\d+)?", shown.replace(",", "")))
    for number in re.findall(r"(?<![a-zA-Z\d.-])\d+(?:\.\d+)?", " ".join(answers).replace(",", "")):
        assert number in numbers, f"the answer says {number}, and no command of the page does"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_amounts_of_memory_in_answers_are_printed_with_their_unit(name: str, language: str) -> None:
    """An answer takes what a plan needs, not what the process itself adds to it."""
    text = page(name, language)
    outputs = " ".join(" ".join(block["output"].split()) for block in BLOCK.finditer(text))
    printed = set(AMOUNT.findall(OF_THE_PROCESS.sub("", outputs)))
    output = set(AMOUNT.findall(" ".join(match[1] for match in ANSWER.finditer(text))))
    assert output <= printed, output - printed


def test_a_number_of_an_answer_follows_its_place_only_if_the_words_around_it_stay() -> None:
    old = "needs 114.8 GiB (2.8 GiB for it), which is 38.5 GiB too much."
    assert renewed("114.8", [(old, "needs 117.6 GiB (2.9 GiB for it),\nwhich is  38.5 GiB too much.")]) == "117.6"
    shorter = "needs\n117.6 GiB (2.8 GiB for the process itself), which is 38.5 GiB too much."
    assert renewed("114.8", [(old, shorter)]) == "114.8"


@pytest.mark.parametrize("language", LANGUAGES)
def test_thirty_questions_have_answers_that_their_commands_print(language: str) -> None:
    """A number of an answer is one of its command, of its output or of the question, or stands in a formula."""
    questions = questions_of(language)
    assert [question.number for question in questions] == list(range(1, 31))
    assert len(set(NUMBERED.findall(page(QUESTIONS, language)))) == 30
    for question in questions:
        assert question.idea in IDEAS and question.output == output_of(question.command), question
        known = " ".join((question.question, question.command, question.output)).replace(",", "")
        printed = re.sub(r"`[^`]*`", "", question.answer).replace(",", "")
        unknown = set(NUMBER.findall(printed)) - set(NUMBER.findall(known))
        assert not unknown, (question.number, unknown, question.answer)
    asked = json.loads(learned(QUESTIONS, "--lang", language, "--json"))["questions"]
    assert [row["command"] for row in asked] == [question.command for question in questions]


def test_questions_ask_for_most_pages_and_each_language_its_own() -> None:
    english, chinese = (questions_of(language) for language in LANGUAGES)
    about = {question.idea for question in (*english, *chinese)}
    assert set(IDEAS) - about <= {"systems", "contradictions", "troubleshooting"}
    both = {question.command for question in english} & {question.command for question in chinese}
    assert len(both) < 3, both


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_pages(name: str) -> None:
    for language in LANGUAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page(name, language)):
            assert (PAGES / language / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_printed_is_of_the_page_in_every_locale(name: str, language: str) -> None:
    """A command states the page's language or asks for JSON, or writes a file of another system, which has none. So
    filters find the words, or the lines, that they look for. Of an English page a whole output may be of the locale."""
    for command in commands(page(name, language)):
        if language == "en" and " | " not in command:
            continue
        own = command.replace("\\\n", " ").partition(" | ")[0]
        if f"--lang {language}" not in own and "--json" not in own:
            assert own.startswith("shardwright export "), command
            assert output_of(command, "zh_CN.UTF-8") == output_of(command), command


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_fit_the_terminal(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = next(part for part in page_of("TroubleShooting", language).text.split("\n\n") if "JOB" in part)
    assert table.count("\n") > 10 and max(map(num_columns, table.split("\n"))) <= 80


def test_the_list_is_all_pages_and_the_index_links_them() -> None:
    for language in LANGUAGES:
        assert {file.stem for file in (PAGES / language).glob("*.md")} == set(NAMES)
        linked = re.findall(r"\(([a-z-]+)\.md\)", page("index", language))
        assert sorted(linked) == sorted((*IDEAS, *OTHERS))
    used = {name for idea in NAMES for name in pictures(page(idea, "en"))}
    for language in LANGUAGES:
        assert used == set(FIGURES) == {file.stem for file in (PAGES / language / "figures").glob("*.svg")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_as_its_code_draws_it_in_both_languages(name: str) -> None:
    drawing = FIGURES[name]()
    for language in LANGUAGES:
        assert figure_file(name, language).read_text(encoding="utf-8") == drawing(language)


@pytest.mark.parametrize("name", FIGURES)
def test_a_chinese_figure_has_the_numbers_of_the_english_one_and_no_english_sentence(name: str) -> None:
    english, chinese = (
        words_of_picture(figure_file(name, language).read_text(encoding="utf-8")) for language in LANGUAGES
    )
    assert sorted(NUMBER.findall(english)) == sorted(NUMBER.findall(chinese))
    assert num_chinese(chinese) > 0 == num_chinese(english)
    assert not re.findall("[a-z]{3,} [a-z]{3,}", chinese)


def test_chinese_pages_use_the_terms_of_the_field() -> None:
    for name, term in TERM_BY_PAGE.items():
        assert term in page(name, "zh"), name


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_on_experts_names_every_gate(language: str) -> None:
    assert all(f"`{gate}`" in page("experts", language) for gate in GATES)


def test_terms_are_the_same_pairs_in_both_languages() -> None:
    english, chinese = (
        [line.strip("| ").split(" | ") for line in page(TERMS, language).splitlines() if line.startswith("| ")]
        for language in LANGUAGES
    )
    pairs = [row[:2] for row in english if row[0] != "English"]
    assert len(pairs) > 40
    assert pairs == [row[1::-1] for row in chinese if row[1] != "English"]


def test_a_first_run_is_one_of_the_readme() -> None:
    """The README's commands are run by its own test."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    without_output = BLOCK.sub("", page("index", "en"))
    for block in re.findall(r"^```sh\n(.*?)^```", without_output, re.M | re.S):
        assert all(line in readme for line in block.splitlines())


def learned(*words: str, **environment: str) -> str:
    result = CliRunner(env=environment).invoke(cli, ["learn", *words], catch_exceptions=False)
    return result.stdout


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_terminal_shows_a_page(language: str) -> None:
    text, markdown = learned("zero", "--lang", language), page("zero", language)
    assert text.startswith(IdeaPage("zero", language).title)
    for block in BLOCK.finditer(markdown):
        assert "    " + block["output"].splitlines()[0] in text
    assert "**" not in text and "](" not in text and "```" not in text
    assert "|---" not in text
    assert json.loads(learned("zero", "--lang", language, "--json"))["markdown"] == markdown


def test_the_list_and_the_locale() -> None:
    assert [line.split()[0] for line in learned(LC_ALL="C.UTF-8").splitlines()] == [*IDEAS, *OTHERS]
    assert "集合通信" in learned(LC_ALL="zh_CN.UTF-8")
    assert "Collectives" in learned("--lang", "en", LC_ALL="zh_CN.UTF-8")


@pytest.mark.parametrize(
    ("question", "answer", "language"),
    [
        ("why is 1F1B not interleaved", "Why is 1F1B not interleaved?", "en"),
        ("which link carries tp", "How many bytes does tensor parallelism (tp) send, over which link?", "en"),
        ("气泡率怎么算", "气泡率怎么算？", "zh"),
        ("显存不够", "显存不够（OOM、爆显存）怎么办？", "zh"),
        ("why is it slow", "Why is it slow, with a low MFU?", "en"),
        ("训练卡住了", "训练卡住、不动了怎么办？", "zh"),
        ("which ZeRO stage for 7B on 8 x 24 GB", "Which plan for a 7B on 8 GPUs?", "en"),
        ("why does my pipeline idle 30 %", "How large is the bubble, and why does a pipeline idle?", "en"),
        ("does fp8 help me", "Does fp8 help?", "en"),
        ("difference of ZeRO-3 and FSDP", "What is the difference of ZeRO-3 and FSDP?", "en"),
        ("how do I resume a run", "How does a run resume?", "en"),
        ("张量并行和流水线并行怎么选", "张量并行和流水线并行怎么选？", "zh"),
        ("MoE 的 all-to-all 要多久", "MoE 的 all-to-all 要多久？", "zh"),
        ("断点怎么恢复", "断点怎么恢复（断点续训）？", "zh"),
    ],
)
def test_a_question_gets_the_section_that_answers_it(question: str, answer: str, language: str) -> None:
    text = learned(*question.split(), "--lang", language)
    assert text.startswith(f"{answer}\n---") and "](" not in text and "shardwright learn first-questions" in text


@pytest.mark.parametrize(
    ("question", "name", "language"),
    [
        ("what is offload", "offload", "en"),
        ("how often checkpoint", "failures", "en"),
        ("what is FSDP", "fsdp", "en"),
        ("what is all-to-all", "collectives", "en"),
        ("检查点多久存一次", "failures", "zh"),
        ("什么是专家容量", "experts", "zh"),
    ],
)
def test_a_question_that_no_short_answer_has_gets_its_page(question: str, name: str, language: str) -> None:
    text = learned(*question.split(), "--lang", language)
    assert text.startswith(f"{IdeaPage(name, language).title}\n===")
    assert text.rstrip().endswith(f"shardwright learn {name}")


def test_words_that_no_page_has_are_refused_with_the_names_of_all() -> None:
    with pytest.raises(PlanError, match=r"no page on 'xyzzy'; use memory-wall, .*questions"):
        learned("xyzzy", LC_ALL="C.UTF-8")


def test_an_unknown_idea_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="use pipelines"):
        page_of("pipeline", "en")


def test_the_chinese_readme_has_the_same_commands_files_and_numbers() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    block = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert block.findall(english) == block.findall(chinese)
    assert english.count("\n## ") == chinese.count("\n## ")
    files = r"`(docs/[\w./-]+)`"
    assert sorted(re.findall(files, english)) == sorted(re.findall(files, chinese))
    numbers = r"(?<![\w.])\d[\d.]*(?= %| published| 次公开| cases| 种模型)"
    assert sorted(re.findall(numbers, block.sub("", english))) == sorted(re.findall(numbers, block.sub("", chinese)))
