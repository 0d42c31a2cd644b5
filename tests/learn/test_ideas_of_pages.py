"""The ideas that the pages must explain, each by its words in both languages."""

import pytest

from shardwright.learn.idea_pages import IDEAS, OTHERS, IdeaPage

# Of each page the words of its ideas, as English pages have them and, where they differ, Chinese ones.
WORDS = {
    "memory-wall": [("H100",), ("bytes per s", "带宽"), ("decades", "年")],
    "device-memory": [("18",), ("16",), ("activations", "激活值")],
    "collectives": [
        *[(name,) for name in ("broadcast", "scatter", "gather", "reduce", "all-gather", "reduce-scatter")],
        *[("all-reduce",), ("all-to-all",), ("hierarch", "分层")],
    ],
    "alpha-beta": [("latency", "延迟"), ("tree", "树")],
    "networks": [("NVLink",), ("PCIe",), ("InfiniBand",), ("RoCE",), ("EFA",), ("fat tree", "胖树"), ("torus", "环面")],
    "data-parallel": [("bucket", "桶"), ("replica", "副本")],
    "zero": [("75 %",), ("18 x",), ("microbatch", "微批次")],
    "offload": [("host", "主机")],
    "tensor-parallel": [("column", "列"), ("row", "行"), ("equence parallel", "序列并行"), ("vocabulary", "词表")],
    "context-parallel": [("Ulysses",), ("ring", "环")],
    "pipelines": [
        *[(name,) for name in ("GPipe", "1F1B", "DualPipe", "PipeDream", "(p - 1)")],
        *[("interleaved", "交错"), ("zero bubble", "零气泡"), ("tensor parallel", "张量并行")],
    ],
    "experts": [("gate", "门控"), ("capacity", "容量"), ("balance", "均衡")],
    "recomputation": [("selective",), ("full",)],
    "mixed-precision": [("scale", "缩放"), ("fp8",), ("fp4",), ("bf16",)],
    "compression": [("PowerSGD",)],
    "mesh": [("cube", "立方体"), ("pp-dp",)],
    "placements": [("DTensor",), ("SBP",), ("GSPMD",), ("Alpa",)],
    "batch-size": [("critical", "临界"), ("learning rate", "学习率")],
    "choosing": [("plan",)],
    "monitoring": [("NaN",), ("slow", "慢")],
    "failures": [("checkpoint", "检查点"), ("oodput", "goodput")],
    "troubleshooting": [("NaN",), ("hang", "卡住")],
}


@pytest.mark.parametrize("number", [0, 1], ids=["en", "zh"])
@pytest.mark.parametrize("name", WORDS)
def test_a_page_explains_its_ideas(name: str, number: int) -> None:
    text = IdeaPage(name, ("en", "zh")[number]).markdown
    assert [words for words in WORDS[name] if words[-1 if number else 0].lower() not in text.lower()] == []


def test_every_idea_has_its_words() -> None:
    assert {*IDEAS} - {*WORDS} == {"systems", "contradictions"} and {*WORDS} <= {*IDEAS, *OTHERS}
