"""The words of a question, as the search of pages takes them: what counts, what counts less, and what means the same.

A browser reads the same tables, see `site_search`.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from shardwright.learn.idea_pages import TERMS, IdeaPage

UNKNOWN = 0.25  # two neighbours that are no known word
CHARACTER = 0.2  # one Chinese character counts as a part of two neighbours, which mostly are a word
PART = 0.6  # "zero" of "zero-3"
OF_A_CASE = 0.15  # the number, the model or the device that a question is asked for; its answer may name others
SAME = 0.6  # another word for what was asked
ENDINGS = ("ing", "ed", "er", "est", "es", "s", "e")
SHORT_WORD = 3  # letters of a word that keeps its ending
# Words that make a question one, and do not say about what.
_ASKING_WORDS = """
a an the of in on to for with and or is are be am was were do does did done can could should would will shall must i
my me we our us you your it its this that these those there what which who why when where how much many so not no than
then at by from as if between about over per each one given use used using need get take takes happen happens please
explain
"""
ASKING = frozenset(_ASKING_WORDS.split())
ASKING_CHINESE = (
    "为什么|什么|怎么办|怎么样|怎么|怎样|如何|多少|多大|几个|哪个|哪种|哪些|是不是|能不能|会不会|可不可以|要不要|"
    "应该|一般|几乎|请问|吗|呢|的|了|我|你|和|与|在|用|要|是|会|有|把|到|里|上|下|合适|最好"
)
CASE = (
    r"[\d.,^]+(?:[kmbtgw]|[kmgt]i?b|gbit|gbps)?|[abhlv]\d{2,4}s?x?|mi\d{3}x?|gb\d{3}|rtx|\d{4}|sxm|gpus?|cards?|"
    r"devices?|llama|gpt|qwen|deepseek|mixtral|mistral|gemma|yi"
)
DEFINITION = r"^what (?:is|are)\b(?! the (?:difference|best))|什么是|是什么"
# One way to say it in each place, between commas; a row means the same. Terms of the page of terms are such rows, too.
_SAME = """
activation memory, activations, 激活值, 激活
save, checkpoint, ckpt, 检查点, 存盘
all-to-all, all-reduce, all-gather, reduce-scatter, collectives, 集合通信
resume, restart, 恢复, 断点续训, 续训
gpu hours, gpu-hours, device-hours, how long, how much does it cost, days, 卡时, 训练多久, 多少钱, 多少天
ethernet, roce, network, 以太网, 互联
infiniband, network, links, ib, ib 网
node, server, machine, 节点, 机器, 机内, 单机
across nodes, leaves a node, 跨节点, 跨机, 跨机器
pcie, links, nvlink
expert parallel, ep, experts, moe, 专家并行, 专家
tensor parallel, tp, 张量并行
pipeline parallel, pp, pipeline, 流水线并行, 流水线
data parallel, dp, ddp, 数据并行
context parallel, cp, ring attention, long sequences, 上下文并行, 长序列, 长文本
sequence length, long sequences, sequence, 序列长度, 序列长
recomputation, recompute, gradient checkpointing, activation checkpointing, checkpointing, 重计算, 重算, 激活检查点
gradient accumulation, microbatches, accumulation, 梯度累积, 微批次
loss scale, loss scaling, 损失缩放, 损失放大
offload, host memory, cpu memory, 卸载, 主机内存
slow rank, straggler, gpu is slow, device is slow, slow one, 慢卡, 慢节点, 掉队
fits, fit, out of memory, oom, can i train, can be trained, 放得下, 够不够, 显存不够, 能训练
compression, compress, powersgd, 压缩
bubble, idle, 气泡, 空闲
hang, stuck, deadlock, nccl timeout, 卡住, 挂起, 不动, 死锁
nan, diverge, spike, jump, 发散, 不收敛, 跑飞, 尖峰
mfu, utilization, 利用率, 算力利用率
time, seconds, how long, 时间, 多久, 多长时间
bytes, send, sends, traffic, volume, 字节, 通信量, 传
difference, compare, beside, versus, vs, 区别, 差别, 不同, 对比, 好在哪里
free, costs nothing, price, cost, 代价, 免费, 开销
optimizer, adam, adamw, 优化器
memory, vram, 显存
fail, failure, failures, crash, 故障, 坏, 挂掉
goodput, 有效训练时间
learning rate, lr, 学习率
"""
_LATIN = r"[a-z0-9][a-z0-9.+/^-]*"
_HAN = "[\u4e00-\u9fff]+"


@dataclass(frozen=True)
class QuestionWords:
    """The words of a question with their weights; and the words that say the same as some of them."""

    weights: dict[str, float]
    same: list[tuple[tuple[str, ...], list[list[str]]]]  # the words of a phrase, those of each other phrase
    is_definition: bool  # it asks what something is


def counted(text: str) -> dict[str, int]:
    """The number of times that a text has each word: of Latin letters without endings, of Chinese two neighbours and
    one character."""
    return Counter(word for word, _ in _words(text.lower()))


def num_words(text: str) -> float:
    """The words of a heading that say about what it is; a Chinese one has mostly two characters."""
    about = _about(text.lower())
    return len(re.findall(_LATIN, about)) + len(re.findall(_HAN[:-1], about)) / 2


def asked(question: str) -> QuestionWords:
    """A question as the search takes it. Words of asking count where there are no others."""
    question = question.lower()
    weights = dict[str, float]()
    about = _about(question) or question
    known = {pair for phrase in _chinese_words() if phrase in about for pair in _named(phrase)}
    for word, weight in _words(about):
        share = UNKNOWN if re.fullmatch(_HAN, word) and len(word) > 1 and word not in known else 1.0
        weights[word] = max(weights.get(word, 0.0), share * weight)
    same = [
        (tuple(_named(phrase)), [_named(other) for other in row if other != phrase])
        for row in same_words()
        for phrase in sorted((one for one in row if _has(question, one)), key=len)[-1:]
    ]
    return QuestionWords(weights, same, bool(re.search(DEFINITION, question)))


@cache
def same_words() -> tuple[tuple[str, ...], ...]:
    """Phrases that mean the same, in both languages."""
    terms = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", IdeaPage(TERMS, "en").markdown, re.MULTILINE)[1:]
    pairs = [
        tuple(part for part in re.split(r"\s*[(（,，、)）]\s*", f"{english.lower()}, {chinese.lower()}") if part)
        for english, chinese in terms
        if not english.startswith("---") and english != "English"
    ]
    rows = [tuple(part.strip() for part in line.split(",")) for line in _SAME.strip().split("\n")]
    return (*rows, *pairs)


@cache
def _chinese_words() -> tuple[str, ...]:
    return tuple(phrase for row in same_words() for phrase in row if re.fullmatch(_HAN, phrase))


def _about(question: str) -> str:
    """A question without the words that make it one; "" if nothing is left."""
    chinese = re.sub(ASKING_CHINESE, " ", question)
    return " ".join(part for part in re.findall(f"{_LATIN}|{_HAN}", chinese) if _plain(part) not in ASKING)


def _named(phrase: str) -> list[str]:
    """The words of a phrase; of Chinese the pairs, if it has any."""
    return [word for word, share in _words(phrase) if share > CHARACTER]


def _has(question: str, phrase: str) -> bool:
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(phrase)}(?![a-z0-9])", question))


def _words(text: str) -> list[tuple[str, float]]:
    words = list[tuple[str, float]]()
    for latin in re.findall(_LATIN, text):
        word = _plain(latin)
        share = OF_A_CASE if re.fullmatch(CASE, word) else 1.0
        words.append((stem(word), share))
        parts = re.split("[-/]", word)
        words += [(stem(part), PART * share) for part in parts if len(parts) > 1 and part and part not in ASKING]
    for run in re.findall(_HAN, text):
        words += [(run[at : at + 2], 1.0) for at in range(len(run) - 1)]
        words += [(one, CHARACTER if len(run) > 1 else 1.0) for one in run]
    return words


def _plain(word: str) -> str:
    return word.rstrip(".+/^-")


def stem(word: str) -> str:
    """An English word without its ending: "gradients" is "gradient", "trained" and "training" are "train"."""
    if len(word) <= SHORT_WORD or not word.isalpha():
        return word
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= SHORT_WORD and not word.endswith("ss"):
            return word.removesuffix(ending)
    return word
