"""Hooks of mkdocs: each language searches its own pages, from files as well, and Chinese has words.

The search plugin has one index for all languages, and takes for a word what stands between two spaces. The words of
Chinese are those of the page of terms, and some that questions are made of.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

from shardwright.learn.idea_pages import LANGUAGES, TERMS, IdeaPage, language_of

_INDEX = Path("search", "search_index.json")
_LAST = -1000  # after the plugin of languages, which joins the indices of all
_BREAK = "\u200b"  # between two words: it has no width
_SEPARATOR = "[\\s\u200b\\-,:;!?=()\\[\\]\"'/`，。：；、（）“”？！]+"  # as a browser reads it
_HAN = "[\u4e00-\u9fff]+"
# A reader's question is cut where the index has its words; one that it lacks ends the cutting.
_OF_QUESTIONS = """
为什么 什么 怎么办 怎么 怎样 如何 多少 几个 哪个 哪种 哪条 哪些 选择 选 用 我的 是 的 和 在 算 率 传
不够 不足 不了 放不下 爆 太慢 慢 卡住 挂起 不动 报错 出错 故障 恢复 训练 微调 模型 大模型 参数 权重
单卡 多卡 张卡 节点 机器 集群 链路 网络 发送 通信 通信量 字节 每层 每步 方案 放置 并行 策略 批次 临界
序列 长序列 张量放置 损失 速度 时间 成本 电费 公式 计算 比例 交错 专家 内存 显存占用 学习率
"""


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """A page in another language than the first, which looks for the index in the folder of its language."""
    return output if language_of(page.url) == LANGUAGES[0] else output.replace('"base": ".."', '"base": "."', 1)


@event_priority(_LAST)
def on_post_build(*, config: Any, **_: Any) -> None:
    """Divide the index by languages, each as JSON and as a script."""
    site = Path(config["site_dir"])
    index = json.loads((site / _INDEX).read_text(encoding="utf-8"))
    for language in LANGUAGES:
        folder = "" if language == LANGUAGES[0] else f"{language}/"
        pages = [
            page | {"location": page["location"].removeprefix(folder)}
            for page in index["docs"]
            if language_of(page["location"]) == language
        ]
        options = index["config"] | {"lang": [language], "separator": _SEPARATOR}
        text = json.dumps({"config": options, "docs": pages}, ensure_ascii=False, separators=(",", ":"))
        file = site / folder / _INDEX
        file.parent.mkdir(exist_ok=True)
        content = _cut(text) if language == "zh" else text
        file.write_text(content, encoding="utf-8")
        file.with_suffix(".js").write_text(f"var __index = {content};\n", encoding="utf-8")  # for pages opened as files
        sitemap = site / folder / "sitemap.xml"
        if not sitemap.exists():  # the theme asks for one in the folder of each language
            sitemap.write_text("<urlset/>\n", encoding="utf-8")


def _cut(text: str) -> str:
    """A text with breaks around the Chinese words in it."""
    known = sorted(_words(), key=len, reverse=True)
    word = re.compile("|".join(known))
    return re.sub(_HAN, lambda run: word.sub(rf"{_BREAK}\g<0>{_BREAK}", run[0]), text)


def _words() -> set[str]:
    """The Chinese words that are searched for."""
    rows = re.findall(r"^\| ([^|]+) \|", IdeaPage(TERMS, "zh").markdown, re.MULTILINE)
    return {word for row in rows for word in re.findall(_HAN, row)} | set(re.findall(_HAN, _OF_QUESTIONS))
