"""Chinese texts: one term for a meaning, marks of full width, and a space between Chinese and Latin words."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from shardwright.config.phrase import catalog_of
from shardwright.learn.idea_pages import PAGES, TERMS
from support.languages import words_of_picture

ROOT = Path(__file__).parents[2]
TABLE_OF_TERMS = f"{TERMS}.md"  # which has Chinese names of collectives beside the usual ones
HAN = "[\u4e00-\u9fff]"
# Patterns of variants, each with the term that all texts have in its place (zh/terms.md has the most usual ones).
ONE_TERM = {
    "规约": "归约",
    "词汇表": "词表",
    "令牌": "token",
    "快照": "检查点",
    "验证集": "留出集",
    "校准": "标定",
    "批大小|批量大小|批尺寸": "批次大小",
    "GPU 内存|设备内存|工作内存": "显存，临时显存",
    "隐藏宽度|隐层|隐藏维(?!度)": "隐藏维度",
    "内部宽度|中间宽度|内层宽度": "中间维度",
    "完全重计算|全部重计算|重计算全部": "全量重计算",
    "参数表|数据手册": "规格书",
    "放法|摆放": "放置",
    "路由器|路由为|专家的路由": "门控",
    "账本": "账目",
    "闭式": "解析式",
    "尖峰": "突刺",
    "丢失的工作|丢工作": "丢失的进度",
    "归约散射|全收集|全归约|全交换|散发|散开": "reduce-scatter, all-gather, all-reduce, all-to-all",
    "混合切分": "混合分片",
    "分担": "分摊",
    "模型家族": "模型系列",
    "阶段划分 \\{|层分布": "层分配",
    "预测更多 token|额外预测的 token": "多 token 预测",
    "剖析": "profiler 记录",
    "跟踪文件": "trace",
    "越出": "超出",
    "读不了|建不了": "无法读取，无法创建",
    "无法表达|表示不了": "无法表示",
    "(?<!分组)查询(?!注意力)和键|查询换成": "query 和 key",
    "加速器|(?<!消费级)显卡": "卡",
    "目录下": "文件夹下",
    "有限的数": "有限数",
    f"个序列|个卡(?!{HAN})|台卡|块卡": "条序列，张卡",
}
# Marks of half width beside a Chinese character, and words that touch one without a space.
HALF_WIDTH = re.compile(
    rf"{HAN}[,;:!?()]|[,;!?()]{HAN}|{HAN}\.(?!\w)|[：，。；、（）] +{HAN}|{HAN}: |: {HAN}|\): {HAN}"
)
TOUCHING = re.compile(rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9%]{HAN}|{HAN}`|`{HAN}")


@cache
def chinese_texts() -> Mapping[str, str]:
    """All Chinese texts, by the file and, of the catalog, the template."""
    texts = {f"zh.po: {template}": text for template, text in catalog_of("zh").items()}
    for file in (*sorted((PAGES / "zh").glob("*.md")), ROOT / "README.zh-CN.md"):
        texts[file.name] = file.read_text(encoding="utf-8")
    for file in sorted((PAGES / "zh" / "figures").glob("*.svg")):
        texts[file.name] = words_of_picture(file.read_text(encoding="utf-8"))
    return texts


def prose(markdown: str) -> str:
    """A page without its blocks and the targets of its links; what stands in backticks becomes `x`."""
    without_blocks = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    without_code = re.sub(r"`[^`\n]*`", "`x`", without_blocks)
    return re.sub(r"\]\([^)]*\)", "]", without_code)


def cells_of_outputs(markdown: str) -> list[str]:
    """The output of the commands of a page, a text for each cell of a row."""
    blocks = re.findall(r"^```text\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [cell for block in blocks for line in block.splitlines() for cell in re.split("  +", line)]


def around(match: re.Match[str], text: str) -> str:
    """A match in its text, with the characters beside it."""
    return text[max(match.start() - 12, 0) : match.end() + 12]


@pytest.mark.parametrize("variant", ONE_TERM)
def test_a_meaning_has_one_term(variant: str) -> None:
    places = {
        name: around(match, text)
        for name, text in chinese_texts().items()
        if name != TABLE_OF_TERMS and (match := re.search(variant, text))
    }
    assert not places, f"write {ONE_TERM[variant]}"


def test_stages_of_zero_are_spelled_in_one_way() -> None:
    """With a hyphen, as ZeRO-1, where sentences name them; screens show `ZeRO 1` as the English ones do."""
    pages = {name: prose(text) for name, text in chinese_texts().items() if name.endswith(".md")}
    places = {name: around(match, text) for name, text in pages.items() if (match := re.search("ZeRO [0-3]", text))}
    assert len(pages) > 30 and not places


@pytest.mark.parametrize("rule", [HALF_WIDTH, TOUCHING], ids=["half-width marks", "no space"])
def test_chinese_and_latin_meet_in_one_way(rule: re.Pattern[str]) -> None:
    places = {}
    for name, text in chinese_texts().items():
        words = "\n".join([prose(text), *cells_of_outputs(text)]) if name.endswith(".md") else text
        if faults := [around(match, words) for match in rule.finditer(words)]:
            places[name] = faults
    assert not places


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, HALF_WIDTH) for text in ("气泡(bubble)", "显存,时间", "一步: 3 s", "3 s: 一步", "一步.")),
        *((text, TOUCHING) for text in ("8张卡", "用ZeRO", "占 5 %的", "设`plan.tp`")),
    ],
)
def test_each_rule_meets_its_fault(text: str, rule: re.Pattern[str]) -> None:
    assert rule.search(text)
    assert not rule.search("气泡（bubble）占 5 %，用 `x` 看：8 张卡。")
