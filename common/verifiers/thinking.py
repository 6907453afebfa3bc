"""Thinking and answer of a completion, told apart by one written rule.

The written rule
----------------
1. Only the completion is read. Whether the prompt already opened the thinking (`<think>` is its end) is said by the caller
   and never guessed: the same text means another thing in the two cases.
2. Prompt opened it (`opened=True`): the completion holds exactly one `</think>` and no `<think>`. What stands before is the
   thought, empty for a completion that begins with `</think>` (NoThinking).
3. Prompt did not (`opened=False`): either no tag at all, and the whole completion is the answer (thought None), or exactly
   one `<think>`, with nothing but white space in front of it, and exactly one `</think>` behind it.
4. The answer is what stands behind `</think>`, as written. It must hold more than white space.

Anything else has a fault and the empty answer, so that a caller who overlooks the fault grades nothing. An answer that
stands only inside the thinking is no answer. Tags count wherever they stand, inside code fences too.
"""

from __future__ import annotations

from typing import NamedTuple

THINK = "<think>"
END_THINK = "</think>"

UNFINISHED = "thinking not finished"
SEVERAL_ENDS = "more than one end of thinking"
REOPENED = "thinking opened again"
NEVER_OPENED = "end of a thinking that was never opened"
TEXT_BEFORE = "text before the thinking"
NO_ANSWER = "no answer behind the thinking"
FAULTS = (UNFINISHED, SEVERAL_ENDS, REOPENED, NEVER_OPENED, TEXT_BEFORE, NO_ANSWER)


class Thinking(NamedTuple):
    """``thought``: None if the completion has no thinking, "" for an empty one. ``fault``: one of FAULTS, or None."""

    thought: str | None
    answer: str
    fault: str | None

    @property
    def skipped(self) -> bool:
        """NoThinking: the block is there and holds nothing."""
        return self.thought is not None and not self.thought.strip()


def split_thinking(text: str, opened: bool) -> Thinking:
    """Thought and answer of a completion under the module's rule; never raises on any text.

    opened: the prompt ends inside the thinking, so that the completion begins there.
    """
    thought, end, rest = text.partition(END_THINK)
    if not end:
        return _without_end(text, opened)
    if not opened:
        before, start, thought = thought.partition(THINK)
        if not start:
            return Thinking(before, "", REOPENED if THINK in rest else NEVER_OPENED)
        if before.strip():
            return Thinking(thought, "", TEXT_BEFORE)
    if THINK in thought or THINK in rest:
        return Thinking(thought, "", REOPENED)
    if END_THINK in rest:
        return Thinking(thought, "", SEVERAL_ENDS)
    if not rest.strip():
        return Thinking(thought, "", NO_ANSWER)
    return Thinking(thought, rest, None)


def _without_end(text: str, opened: bool) -> Thinking:
    if opened:
        return Thinking(text, "", REOPENED if THINK in text else UNFINISHED)
    before, start, thought = text.partition(THINK)
    if start:
        return Thinking(thought, "", TEXT_BEFORE if before.strip() else UNFINISHED)
    return Thinking(None, text, None) if text.strip() else Thinking(None, "", NO_ANSWER)
