"""Asking a model about texts: with the long prompt or without, thinking or not; replies as rows that can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.rollout import Completion, sample
from common.seeding import generator
from common.teacher import Ask, collect
from common.teacher_server import ServerConfig, ServerTeacher
from common.tokenizers import encode_prompt
from common.verifiers.thinking import THINK
from experiments.exp_7_08_prompt_distillation.env import grade
from experiments.exp_7_08_prompt_distillation.settings import SamplingConfig
from experiments.exp_7_08_prompt_distillation.source import Item, Source


class Mode(NamedTuple):
    """How a model is asked: ``prompted`` shows the rules, ``think`` asks for the look-ups."""

    prompted: bool
    think: bool


@dataclass(frozen=True)
class Reply:
    """``label``: the one label given, None where there is none; ``kind``: see env.Grade; ``finished``: not cut off."""

    text: str
    label: str | None
    kind: str
    reason: str
    tokens_in: int
    tokens_out: int
    finished: bool

    @property
    def tokens(self) -> int:
        """Tokens that the model had to process for it."""
        return self.tokens_in + self.tokens_out

    @property
    def success(self) -> bool:
        """The gold label was given."""
        return self.kind == "right"

    @property
    def row(self) -> dict[str, Any]:
        """What a file keeps."""
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Reply:
        return cls(**row)


def opens_thinking(tokenizer: Any) -> bool:
    """Whether the tokenizer's prompts end inside the thinking, as the templates of some thinking models do."""
    return str(tokenizer.decode(encode_prompt(tokenizer, "x"))).rstrip().endswith(THINK)


def reply_of(item: Item, text: str, finished: bool, tokens: tuple[int, int], source: Source, opened: bool) -> Reply:
    """A reply with its grade; an answer that the token limit cut off is graded as it stands."""
    found = grade(text, item.gold, source.labels, opened)
    return Reply(text, found.label, found.kind, found.reason, *tokens, finished)


def regraded(reply: Reply, item: Item, source: Source) -> Reply:
    """The same reply judged by other rules."""
    return reply_of(item, reply.text, reply.finished, (reply.tokens_in, reply.tokens_out), source, opened=False)


def complete(
    model: Any, tokenizer: Any, prompts: list[list[int]], sampling: SamplingConfig, *stream: int | str
) -> list[Completion]:
    """One answer to each prompt, `batch_size` at a time."""
    found: list[Completion] = []
    for begin in range(0, len(prompts), sampling.batch_size):
        found += sample(
            model,
            prompts[begin : begin + sampling.batch_size],
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=[tokenizer.eos_token_id],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            generator=generator(*stream, begin),
        )
    return found


def ask(
    model: Any,
    tokenizer: Any,
    source: Source,
    items: Sequence[Item],
    mode: Mode,
    sampling: SamplingConfig,
    *stream: int | str,
) -> list[Reply]:
    """A reply to each text, in order. `stream` names the random numbers, the same for all models that are compared."""
    encode, opened = source.encoder(tokenizer), opens_thinking(tokenizer)
    prompts = [encode(item, mode.prompted, mode.think) for item in items]
    replies = []
    for item, prompt, found in zip(items, prompts, complete(model, tokenizer, prompts, sampling, *stream), strict=True):
        text = str(tokenizer.decode(found.ids, skip_special_tokens=True))
        replies.append(reply_of(item, text, found.finished, (len(prompt), len(found.ids)), source, opened))
    return replies


def ask_server(config: ServerConfig, source: Source, items: Sequence[Item], file: Path) -> list[Reply]:
    """A reply to each text from an OpenAI-compatible server (its address and key come from the environment).

    Every answer lies in `file` as soon as it is there. A text without an answer, after all tries, has a reply without text.
    """
    asks = [Ask(item.text, source.prompt(item, prompted=True, think=True)) for item in items]
    rows = {row["key"]: row for row in collect(ServerTeacher.from_environment(config), asks, file)}
    replies = []
    for item in items:
        row = rows.get(item.text, {"text": "", "finished": False, "tokens_in": 0, "tokens_out": 0})
        replies.append(
            reply_of(item, row["text"], row["finished"], (row["tokens_in"], row["tokens_out"]), source, opened=False)
        )
    return replies
