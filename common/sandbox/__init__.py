"""Model-written code runs here, in processes that cannot harm or stall the suite. See docs/sandbox.md."""

from common.sandbox.data import Answer, Answers, Call, Limits, Program, Result, SandboxError, passes
from common.sandbox.pool import Episode, Isolation, Sandbox, isolation

__all__ = [
    "Answer",
    "Answers",
    "Call",
    "Episode",
    "Isolation",
    "Limits",
    "Program",
    "Result",
    "Sandbox",
    "SandboxError",
    "isolation",
    "passes",
]
