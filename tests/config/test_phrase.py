"""Phrases: English as str, other languages by catalogs that have every template, with the same fields and numbers."""

import ast
import copy
import json
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from shardwright.cli.usage_errors import CLICK_MESSAGES
from shardwright.config.base import PlanError, RunError, error_text
from shardwright.config.field_texts import field_faults
from shardwright.config.percent import percent_text
from shardwright.config.phrase import (
    LANGUAGES,
    Phrase,
    as_data,
    below,
    capitalized,
    catalog_of,
    either,
    field_names,
    fixed,
    in_language,
    of_data,
    read_catalog,
    say,
    sentences_of,
    spaced,
    with_changed_texts,
    without_period,
    without_way_out,
)
from shardwright.config.pydantic_messages import PYDANTIC_MESSAGES, message_phrase
from shardwright.report.page_document import templates_said
from shardwright.schedule.action import Action, Kind

SOURCE = Path(__file__).parents[2] / "src" / "shardwright"
OTHERS = [language for language in LANGUAGES if language != "en"]
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def templates_of(file: Path) -> set[str]:
    """The templates that a file says. `say` and `fixed` are those of phrases: nothing else may have these names."""
    text = file.read_text(encoding="utf-8")
    if "shardwright.config.phrase import" not in text:
        return set()
    nodes = list(ast.walk(ast.parse(text)))
    imported = {
        name.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "shardwright.config.phrase"
        for name in node.names
        if name.name in ("say", "fixed")
    }
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg | ast.keyword)]
    assert imported.isdisjoint(arguments), f"{file.name} has an argument with the name of a function of phrases"
    return {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in imported
        and isinstance(node.args[0], ast.Constant)
    }


@cache  # and not when tests are collected, which each process of the suite does
def all_templates() -> list[str]:
    """The templates of the whole source, and of the scripts of its pages."""
    templates = {template for file in SOURCE.rglob("*.py") for template in templates_of(file)}
    scripts = [file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.js")]
    return sorted(templates.union(*map(templates_said, scripts)))


@pytest.mark.parametrize("language", OTHERS)
def test_no_template_is_missing(language: str) -> None:
    templates = all_templates()
    assert len(templates) > 200
    catalog = catalog_of(language)
    assert not [
        template
        for template in templates
        if template not in catalog and template[:1].lower() + template[1:] not in catalog
    ]


# Folders with sentences that are no phrases yet, or that never will be: names of tensors, sources of numbers, and
# screens that are in English alone. In all others each sentence is a phrase.
NOT_YET = {
    *("api", "layers", "learn", "memory", "parallel/comm", "report", "report/launch", "report/timeline", "studio"),
}
TRANSLATED = sorted({str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("*.py")} - {".", *NOT_YET})
# Keywords of texts that are no faults: the meanings of fields and of names, for the help, whose test has them; and
# sources of numbers.
MEANINGS = {"description", "does", "text", "not_searched", "help", "examples", "source"}
SAYING = {
    "say",
    "fixed",
    "Field",
    "Registry",
    "PydanticCustomError",
    "NotImplementedError",  # an error of the program
    "info",  # a record for those who listen
}  # functions of templates, of defaults and of names
# Files whose other texts are errors of the program (as calls that no kernel takes), templates that are tested by
# themselves, sources, messages of libraries, words that names of settings have, names in files,
# and a notation.
NO_FAULTS = {
    *("array_math.py", "phrase.py", "pydantic_messages.py", "model_job.py", "python_values.py", "known_settings.py"),
    *("out_of_memory.py", "base_weights.py", "calibration.py", "placements.py"),
    *("kernel_demands.py", "rules.py", "cluster_fit.py", "device_file.py", "unstated_columns.py"),
    "package_call.py",
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
COMMENT = re.compile("^ *# |written by shardwright")  # of files that are written for other systems


@pytest.mark.parametrize("folder", TRANSLATED)
def test_each_fault_of_a_translated_folder_is_a_phrase(folder: str) -> None:
    files = [file for file in (SOURCE / folder).glob("*.py") if file.name not in NO_FAULTS]
    texts = {file.name: plain_texts(file) for file in files}
    assert texts and not {name: result for name, result in texts.items() if result}


def plain_texts(file: Path) -> list[str]:
    """The sentences of a file that are no phrases: texts in which words follow each other, but docstrings."""
    tree, catalog = ast.parse(file.read_text(encoding="utf-8")), catalog_of(OTHERS[0])
    nodes = list(ast.walk(tree))
    bodies = [node.body for node in nodes if isinstance(node, DOCUMENTED)]
    documents = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    saying = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) in SAYING]
    others = {id(part) for call in saying for text in call.args for part in ast.walk(text)}
    meanings = [keyword.value for call in calls for keyword in call.keywords if keyword.arg in MEANINGS]
    others |= {id(text) for meaning in meanings for text in ast.walk(meaning)}
    never = [node for node in nodes if isinstance(node, ast.Assert) or is_call(node, "AssertionError")]
    others |= {id(text) for node in never for text in ast.walk(node)}
    passed_over = others | documents
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in passed_over
        and re.search("[a-z]{2,} [a-z]{2,} [a-z]", words := node.value.partition("  [")[0])
        and not {words, fixed(words).template} & catalog.keys()  # a text of which a phrase is made, such as a help
        and not re.search(r"\bimport \w", node.value)  # a program
        and not COMMENT.search(node.value)
    ]


def is_call(node: ast.AST, name: str) -> bool:
    """True for a call of the function or class of a name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


@pytest.mark.parametrize("language", OTHERS)
def test_messages_about_single_fields_are_phrases(language: str) -> None:
    assert not [message for message in (*PYDANTIC_MESSAGES, *CLICK_MESSAGES) if message not in catalog_of(language)]
    fields = {
        "model.layers": 0,
        "model.norm": "x",
        "plan.tp": 1.5,
        "model.bias": 3,
        "run.port": 1e9,
        "plan.layout": "a",
    }
    for name, value in fields.items():
        section, _, field = name.partition(".")
        (fault,) = field_faults({section: {field: value}})
        assert isinstance(fault, Phrase) and isinstance(fault.values["message"], Phrase), fault
    (fault,) = field_faults({"model": {"layrs": 3}})
    assert in_language(fault, "zh") == "model.layrs 不是已知的字段；是不是指 layers 或 mtp_layers？"
    assert in_language(message_phrase("it should be 'a', 'b' or 'c'"), "zh") == "应是 'a'、'b' 或 'c'"
    assert message_phrase("it is new") == "it is new"


@pytest.mark.parametrize("language", OTHERS)
def test_a_translation_has_the_fields_and_numbers_of_its_template(language: str) -> None:
    for template, other in catalog_of(language).items():
        assert field_names(other) == field_names(template), template
        fields = sorted(re.findall(r"\{\w+(:[^}]*)?\}", template)), sorted(re.findall(r"\{\w+(:[^}]*)?\}", other))
        assert set(fields[0]) == set(fields[1]), template
        plain, plain_other = (re.sub(r"\{[^}]*\}", "", text) for text in (template, other))
        assert sorted(NUMBER.findall(plain)) == sorted(NUMBER.findall(plain_other)), template


def test_a_phrase_is_a_str_in_english() -> None:
    phrase = say("{number:,} ranks", number=4096)
    assert phrase == "4,096 ranks" and isinstance(phrase, str)
    assert in_language(phrase, "en") == phrase and in_language(phrase, "zh") == "4,096 个 rank"
    assert in_language("of nobody", "zh") == "of nobody"
    for other in (pickle.loads(pickle.dumps(phrase)), copy.deepcopy(phrase)):
        assert isinstance(other, Phrase) and in_language(other, "zh") == "4,096 个 rank"


def test_values_are_phrases_and_lists_of_them() -> None:
    nested = say("Links: {links}.", links=(say("its fast links"), "NVLink"))
    assert nested == "Links: its fast links, NVLink."
    assert in_language(nested, "zh") == "链路：高速链路、NVLink。"
    assert either(["1"]) == "1" and either(["1", "2", "4"]) == "1, 2 or 4"
    assert in_language(either(["1", "2", "4"]), "zh") == "1、2 或 4"


def test_a_capital_changes_no_translation() -> None:
    phrase = say("a layer")
    assert capitalized(phrase) == "A layer"
    assert in_language(capitalized(phrase), "zh") == in_language(phrase, "zh") == "一层"


def test_a_fault_without_its_way_out_is_one_in_each_language() -> None:
    fault = without_way_out(say("{first}; {other}", first=say("{name} is none", name="pq"), other="use tp"))
    assert fault == "pq is none" == without_way_out("pq is none; use tp") and without_way_out("plain") == "plain"
    fault = pickle.loads(pickle.dumps(without_way_out(say("use dp {dp}", dp=4))))
    assert in_language(fault, "zh") == "请用 dp 4"
    whole = say("{count} skipped steps in a row are always had; allow at least 1", count=0)
    assert in_language(without_way_out(whole), "zh") == "连续跳过 0 步总会发生"


def test_a_sentence_without_its_period_is_one_in_each_language() -> None:
    sentence = pickle.loads(pickle.dumps(without_period(say("Links: {links}.", links="a"))))
    assert sentence == "Links: a" == without_period("Links: a.") and in_language(sentence, "zh") == "链路：a"


def test_a_phrase_whose_values_change_stays_one() -> None:
    def capital(text: str) -> str:
        return text.replace("nvlink", "NVLink")

    changed = with_changed_texts(say("Links: {links}.", links=(say("its fast links"), "nvlink")), capital)
    assert changed == "Links: its fast links, NVLink." and in_language(changed, "zh") == "链路：高速链路、NVLink。"
    # Words of the template have no place in other languages.
    upper = with_changed_texts(say("a layer"), str.upper)
    assert upper == "A LAYER" and not isinstance(upper, Phrase)


def test_the_subject_of_an_error_is_in_its_language() -> None:
    error = PlanError(say("{number:,} ranks", number=8), [say("use dp {dp}", dp=4)])
    assert error.in_language("zh") == "8 个 rank：1 处错误\n  1. 请用 dp 4"


def test_an_address_leaves_a_fault_a_phrase_unless_it_has_a_secret() -> None:
    faults = [say("use dp {dp}", dp=f"http://{user}host") for user in ("", "me:word@")]
    first, second = PlanError("job", faults).faults
    assert isinstance(first, Phrase) and not isinstance(second, Phrase) and "word" not in second


def test_a_catalog_goes_on_in_further_lines() -> None:
    text = (
        '# why\nmsgid ""\nmsgstr "Language: zh\\n"\n\nmsgid "a "\n"\\"b\\""\nmsgstr "c"\n"d"\n\nmsgid "e"\nmsgstr "f"\n'
    )
    assert read_catalog(text) == {'a "b"': "cd", "e": "f"}


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(KeyError, match="use en, zh"):
        catalog_of("de")


def test_a_phrase_passes_as_data_and_a_strange_template_does_not() -> None:
    phrase = say("{first} and {second}", first=say("{number:,} ranks", number=4096), second="b")
    received = of_data(json.loads(json.dumps(as_data(phrase))))
    assert received == phrase and in_language(received, "zh") == "4,096 个 rank 和 b"
    assert of_data(as_data("plain")) == "plain" and not isinstance(of_data("plain"), Phrase)
    listed = of_data(json.loads(json.dumps(as_data(say("{listed}", listed=("a", say("{number:,} ranks", number=2)))))))
    assert in_language(listed, "zh") == "a、2 个 rank"
    for strange in (
        {"template": "{value.__class__}", "values": {"value": 1}},
        {"template": "{first} and {second}", "values": {"first": "a"}},
        {"template": "{first} and {second}", "values": {"first": {}, "second": "b"}},
        ["a"],
        None,
    ):
        with pytest.raises(ValueError, match="no text"):
            of_data(strange)


def test_a_failure_of_a_rank_keeps_its_phrase_on_its_way() -> None:
    error = RunError(say("{rank} failed: {reason}", rank="rank 1", reason=say("ran out of memory")))
    sent = pickle.loads(pickle.dumps((error, error_text(error))))
    for text in (error_text(sent[0]), sent[1]):
        assert text == "rank 1 failed: ran out of memory" and in_language(text, "zh") == "rank 1 失败：显存不足"
    assert sent[0].in_language("zh") == "失败：rank 1 失败：显存不足"
    assert str(error) == "rank 1 failed: ran out of memory" and error.in_language("en") == f"failed: {error}"
    assert error_text(KeyError("no such name")) == "no such name"


def test_texts_in_a_row_or_below_each_other() -> None:
    sentences = sentences_of([say("Runs of another model have none."), "Plain."])
    assert sentences == "Runs of another model have none. Plain."
    assert in_language(sentences, "zh") == "模型不同的运行没有这一项。Plain."
    assert below([say("a layer"), "b"]) == "a layer\nb" and in_language(below([say("a layer"), "b"]), "zh") == "一层\nb"
    assert sentences_of([]) == below([]) == ""


def test_a_space_of_a_template_is_none_between_chinese_words() -> None:
    assert in_language(say("no {part}", part=say("a layer")), "zh") == "不需要一层"
    assert in_language(say("no {part}", part="zero 1"), "zh") == "不需要 zero 1"
    assert in_language(spaced([say("a layer"), say("a layer")]), "zh") == "一层  一层"


def test_a_tuple_with_words_of_its_own_is_no_list() -> None:
    assert say("{action}", action=Action(Kind.FORWARD, 2, 5)) == "2F5"


def test_an_error_is_english_until_it_is_asked_for_another_language() -> None:
    error = PlanError("job a", [say("use dp {dp}", dp=4), "plain"])
    assert str(error) == "job a: 2 faults\n  1. use dp 4\n  2. plain"
    assert error.in_language("zh") == "job a：2 处错误\n  1. 请用 dp 4\n  2. plain"


def test_phrases_are_joined_by_functions() -> None:
    """An f-string of phrases with semicolons between them is a plain text, in English alone."""
    joined = re.compile(r"f[\"']\{[^{}\"']+\}; ?\{")
    assert not [file for file in SOURCE.rglob("*.py") if joined.search(file.read_text(encoding="utf-8"))]


def test_percentages_are_written_in_one_way() -> None:
    """A phrase writes a share with a space before the sign; other texts must take percent_text, and no literal."""
    assert say("{share:.1%} of it", share=0.585) == "58.5 % of it" and percent_text(-0.04, "+.0%") == "-4 %"
    assert in_language(say("{share:.1%} are", share=0.5), "zh") == "有 50.0 % "
    texts = [re.sub(r"\{[^}]*\}", "1", text) for text in [*all_templates(), *catalog_of("zh").values()]]
    assert [text for text in texts if re.search(r"\d%", text)] == []
    own_forms = re.compile(r"""\bf["'][^"'\n]*(:[^"'{}\n]*%\}|\}%["' ,.)])|%\}["']\.format""")
    wrong = {file.name: own_forms.findall(file.read_text(encoding="utf-8")) for file in SOURCE.rglob("*.py")}
    assert {name: hits for name, hits in wrong.items() if hits} == {}
