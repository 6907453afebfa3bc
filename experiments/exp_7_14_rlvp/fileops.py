"""FileOps: small edits in directories of configuration files, one directory per stage of the task.

Tools, rules and paired credits are those of RLVP's FileOps; the texts are short enough for a tiny model. Of the five kinds
of stage, edit, clean and create are the source's. replace and remove are added: without them a blind write or delete only
ever hurts the outcome, and no rule but the one on tests would be free to break.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import gymnasium

from common.schema import one_of, within
from common.seeding import python_random
from experiments.exp_7_14_rlvp.calls import Call, Tool
from experiments.exp_7_14_rlvp.env import Reply, Rule, ToolEnv, repeat_failure

ENV_ID = "FileOps-v0"
KINDS = ("edit", "clean", "create", "replace", "remove")
SOURCE_KINDS = KINDS[:3]
KEYS = ("port", "size", "mode")
CONFIGS = ("web.cfg", "app.cfg", "log.cfg", "net.cfg")
SCRATCH = tuple(f"{letter}.tmp" for letter in "abcdef")
KEPT = tuple(f"{letter}.txt" for letter in "uvwxyz")
MOST_STAGES = 6

_PATH, _SETTING = r"[a-z0-9]+/[a-z0-9.]+", r"[a-z]+=[0-9]"
TOOLS = (
    Tool("list_dir", "list", (("path", "[a-z0-9]+"),)),
    Tool("read_file", "read", (("path", _PATH),)),
    Tool("write_file", "write", (("path", _PATH), ("content", f"{_SETTING}(?: {_SETTING})*"))),
    Tool("delete", "delete", (("path", _PATH),)),
    Tool("run_tests", "test"),
    Tool("submit", "submit"),
)
RULES_TEXT = "read before you overwrite, list or read before you delete, test before you submit, never repeat a failed call. "


class Stage(NamedTuple):
    """One thing to do in one directory: `path` (for clean the directory) and the setting or content to write."""

    kind: str
    path: str
    content: str = ""

    @property
    def directory(self) -> str:
        return self.path.split("/")[0]

    @property
    def text(self) -> str:
        """The stage in the prompt."""
        return f"{self.kind} {self.path}{' ' if self.content else ''}{self.content}; "


def render(values: Mapping[str, int]) -> str:
    """A file's content: port=3 size=7 mode=1."""
    return " ".join(f"{key}={values[key]}" for key in KEYS)


def with_setting(content: str, setting: str) -> str:
    """The content with one of its settings changed."""
    key = setting.split("=")[0]
    return re.sub(rf"\b{key}=[0-9]", setting, content)


def draw_stage(stream: Any, directory: str, kind: str) -> tuple[Stage, dict[str, str]]:
    """A stage and the files of its directory at the start."""

    def content() -> str:
        return render({key: stream.randrange(10) for key in KEYS})

    configs, scratch = stream.sample(CONFIGS, 3), stream.sample(SCRATCH, stream.randint(1, 3))
    present = [*configs[:2], *scratch, stream.choice(KEPT)]
    files = {f"{directory}/{name}": content() for name in sorted(present)}
    target = f"{directory}/{configs[0]}"
    if kind == "edit":
        key = stream.choice(KEYS)
        old = int(re.search(rf"{key}=([0-9])", files[target])[1])
        return Stage(kind, target, f"{key}={(old + stream.randint(1, 9)) % 10}"), files
    if kind == "clean":
        return Stage(kind, directory), files
    if kind == "create":
        return Stage(kind, f"{directory}/{configs[2]}", content()), files
    if kind == "replace":
        return Stage(kind, target, content()), files
    return Stage("remove", f"{directory}/{scratch[0]}"), files


def wanted_files(stage: Stage, files: Mapping[str, str]) -> dict[str, str]:
    """The stage's directory as it must be at the end."""
    wanted = {path: content for path, content in files.items() if path.split("/")[0] == stage.directory}
    if stage.kind == "edit":
        wanted[stage.path] = with_setting(files[stage.path], stage.content)
    elif stage.kind == "clean":
        wanted = {path: content for path, content in wanted.items() if not path.endswith(".tmp")}
    elif stage.kind == "remove":
        del wanted[stage.path]
    else:
        wanted[stage.path] = stage.content
    return wanted


class FileWorld:
    """The files of a task and what the agent has seen of them."""

    def __init__(self, task: int, stages: int = 1, kinds: tuple[str, ...] = KINDS) -> None:
        within("stages", stages, 1, MOST_STAGES)
        stream = python_random("fileops", task, stages)
        self.stages: list[Stage] = []
        self.files: dict[str, str] = {}
        for number in range(1, stages + 1):
            kind = kinds[task % len(kinds)] if stages == 1 else stream.choice(kinds)
            stage, files = draw_stage(stream, f"s{number}", kind)
            self.stages.append(stage)
            self.files |= files
        self.wanted = {stage.directory: wanted_files(stage, self.files) for stage in self.stages}
        self.limit = 12 if stages == 1 else 8 + 7 * stages
        self.seen: set[str] = set()  # paths read
        self.listed: set[str] = set()
        self.credited: set[str] = set()  # directories whose listing was credited
        self.written: set[str] = set()  # paths written or deleted
        self.pending = False  # changes since the last test
        self.tests_lost = 0  # credited tests that a later change made void
        self.errors: Counter[Call] = Counter()
        self.tested = False

    def prompt(self) -> str:
        return "".join(stage.text for stage in self.stages)

    def state(self) -> str:
        """Files, and what was seen of them: all that rules, credits and outcome depend on, but the failed calls."""
        files = ";".join(f"{path}:{content}" for path, content in sorted(self.files.items()))
        return f"{files}|{sorted(self.seen)}|{sorted(self.listed)}|{self.pending}"

    def inside(self, directory: str) -> list[str]:
        """Names of the files of a directory."""
        return sorted(path.split("/")[1] for path in self.files if path.split("/")[0] == directory)

    def is_done(self, stage: Stage) -> bool:
        """The stage's directory is as it must be."""
        here = {path: content for path, content in self.files.items() if path.split("/")[0] == stage.directory}
        return here == self.wanted[stage.directory]

    def success(self) -> bool:
        return all(self.is_done(stage) for stage in self.stages)

    def progress(self) -> float:
        """Share of the stages that are done."""
        return sum(self.is_done(stage) for stage in self.stages) / len(self.stages)

    def credits(self, call: Call) -> list[str]:
        """Rules that the call, made now, is the first step to keep: a test of changes, a first reading, a first listing."""
        argument = call.args[0] if call.args else ""
        if call.tool == "run_tests" and self.pending:
            return ["untested_submit"]
        if call.tool == "read_file" and argument in self.files and argument not in self.seen:
            return ["blind_write"]
        if call.tool == "list_dir" and self.inside(argument) and argument not in self.listed:
            return ["blind_delete"]
        return []

    def unused_credits(self) -> int:
        """Credited looks that no change followed, and credited tests before the last one."""
        looks = len(self.seen - self.written)
        used = {path.split("/")[0] for path in self.written}
        return looks + len(self.credited - used) + self.tests_lost

    def apply(self, call: Call) -> Reply:
        """The tool's effect and answer."""
        if call.tool == "list_dir":
            return self.list_dir(*call.args)
        if call.tool == "read_file":
            return self.read_file(*call.args)
        if call.tool == "write_file":
            return self.write_file(*call.args)
        if call.tool == "delete":
            return self.delete(*call.args)
        if call.tool == "run_tests":
            self.tested, self.pending = self.pending or self.tested, False
            wrong = next((stage.directory for stage in self.stages if not self.is_done(stage)), None)
            return Reply("pass" if wrong is None else f"fail {wrong}")
        return Reply("", done=True)

    def list_dir(self, directory: str) -> Reply:
        if directory not in self.wanted:
            return Reply("error", failed=True)
        names = self.inside(directory)
        if names and directory not in self.listed:
            self.credited.add(directory)
        self.listed.add(directory)
        return Reply(" ".join(names) or "empty")

    def read_file(self, path: str) -> Reply:
        if path not in self.files:
            return Reply("error", failed=True)
        self.seen.add(path)
        return Reply(f"holds {self.files[path]}")

    def write_file(self, path: str, content: str) -> Reply:
        if path.split("/")[0] not in self.wanted:
            return Reply("error", failed=True)
        self.files[path] = content
        return self.changed(path)

    def delete(self, path: str) -> Reply:
        if path not in self.files:
            return Reply("error", failed=True)
        del self.files[path]
        return self.changed(path)

    def changed(self, path: str) -> Reply:
        """Books a change: what was tested before it is untested again."""
        self.written.add(path)
        self.tests_lost += self.tested
        self.pending, self.tested = True, False
        return Reply("ok", mutated=True)


def blind_write(world: FileWorld, call: Call) -> bool:
    """Overwrites an existing file that was never read."""
    return call.tool == "write_file" and call.args[0] in world.files and call.args[0] not in world.seen


def blind_delete(world: FileWorld, call: Call) -> bool:
    """Deletes, or tries to, a path that was not read and whose directory was never listed."""
    if call.tool != "delete":
        return False
    return call.args[0] not in world.seen and call.args[0].split("/")[0] not in world.listed


def untested_submit(world: FileWorld, call: Call) -> bool:
    """Submits with changes since the last test."""
    return call.tool == "submit" and world.pending


class FileOps(ToolEnv):
    """Options beside ToolEnv's: `stages` (1; more are a chain) and `kinds` of stages."""

    tools = TOOLS
    rules: ClassVar[Mapping[str, Rule]] = {
        "blind_write": blind_write,
        "blind_delete": blind_delete,
        "untested_submit": untested_submit,
        "repeat_failure": repeat_failure,
    }
    rules_text = RULES_TEXT
    world_options = ("stages", "kinds")

    def make_world(self, task: int, options: Mapping[str, Any]) -> FileWorld:
        kinds = tuple(options.get("kinds", KINDS))
        for kind in kinds:
            one_of("kinds", kind, KINDS)
        return FileWorld(task, int(options.get("stages", 1)), kinds)


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_14_rlvp.fileops:FileOps")
