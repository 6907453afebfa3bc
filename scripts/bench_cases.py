"""What `make bench` and scripts/device_check.sh measure: models, prompts, and one run of each side.

Both sides get the same weights, prompts and numbers of tokens. Times are read from the clock that the caller gives: CPU
seconds of this process, or wall seconds around a synchronised GPU.
"""

import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from common import kernels, policy
from common.algo import AlgoConfig
from common.compute import Budget
from common.decoding import make_decoder
from common.episodes import collate, run_episodes
from common.grpo import train_grpo
from common.loop import make_optimizer
from common.models import DecoderConfig, build_decoder, parameter_count
from common.rollout import sample
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import build_phrase_tokenizer, encode_prompt

SPECIALS = 4  # the tokenizer's special tokens have the first ids; an untrained model is kept from writing them
STOP_SHARE = 0.03  # of the ordinary tokens: the ragged completions end with about this probability at each token
SMOLLM2 = LlamaConfig(  # the shape of SmolLM2-135M with random weights: nothing is downloaded
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    tie_word_embeddings=True,
)


def qwen(hidden: int, layers: int, heads: int, kv_heads: int) -> DecoderConfig:
    """A tied Qwen3-like decoder whose feed-forward layer is twice as wide as the model."""
    return DecoderConfig(hidden, layers, heads, kv_heads, feedforward=2 * hidden, tied=True)


@dataclass(frozen=True)
class Size:
    """A model and what is measured on it.

    ``grpo``: prompts, group size and new tokens of a training step, and how many steps count in each round.
    ``rounds``: at most so many. ``batches``: rows of the fixed-length sampling cases; ``groups`` of 8: of the ragged
    ones; ``new_tokens``: of both.
    """

    name: str
    shape: Any
    grpo: tuple[int, int, int]
    steps: int
    rounds: int
    batches: tuple[int, ...]
    groups: tuple[int, ...]
    new_tokens: int = 64


SIZES = [
    Size("0.3 M", qwen(96, 3, 3, 3), (8, 8, 64), 3, 2, (64, 256), (8,)),
    Size("0.6 M", qwen(128, 4, 4, 2), (8, 8, 64), 3, 3, (1, 8, 64, 256), (1, 8, 32)),
    Size("1 M", qwen(160, 4, 5, 5), (8, 8, 64), 3, 2, (64, 256), (8,)),
    Size("3 M", qwen(224, 6, 7, 7), (8, 8, 64), 1, 2, (64, 256), (8,)),
    Size("10 M", qwen(384, 7, 6, 6), (8, 8, 64), 1, 1, (64, 256), (8,)),
    Size("135 M", SMOLLM2, (2, 4, 16), 1, 1, (8,), (4,), new_tokens=32),
]
Run = tuple[float, int]  # seconds and tokens written
Clock = Callable[[], float]


@dataclass
class Case:
    """The model and prompts of both sides. ``stops``: token ids that end the ragged completions."""

    model: Any
    tokenizer: Any
    texts: list[str]
    stops: list[int]

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first prompts, with the start token."""
        return [encode_prompt(self.tokenizer, text) for text in self.texts[:count]]


def build_case(shape: DecoderConfig | LlamaConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Case:
    """A random model and 256 prompts of 16 to 32 tokens."""
    words = [f"{chr(97 + i % 26)}{i} " for i in range(256)]
    tokenizer = build_phrase_tokenizer(words)
    stream = generator("bench", "prompts")
    texts = ["".join(words[i] for i in torch.randint(256, (15 + n % 17,), generator=stream).tolist()) for n in range(256)]
    if isinstance(shape, DecoderConfig):
        model: Any = build_decoder(shape, tokenizer, seed=0)
    else:
        model = LlamaForCausalLM(copy.deepcopy(shape))
        model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        stream = generator("bench", "weights")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=stream)
    keep_from_specials(model)
    case = Case(model.eval().to(device, dtype), tokenizer, texts, list(range(SPECIALS, SPECIALS + round(STOP_SHARE * 256))))
    if tokenizer(tokenizer.bos_token + texts[0])["input_ids"] != case.prompts(1)[0]:
        raise RuntimeError("the two sides would read different prompt tokens")
    return case


@torch.no_grad()
def keep_from_specials(model: Any) -> None:
    """Makes special tokens improbable, so that no completion ends early: the first number of the residual stream is
    1 after every ordinary token, no layer changes it, and the special tokens' output weights there are far below 0."""
    weight_VD = model.get_input_embeddings().weight
    weight_VD[:, 0] = 1.0
    weight_VD[:SPECIALS, 0] = -100.0
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[0] = 0.0


def reward_of(text: str) -> float:
    """Share of ones among the characters: cheap, and different for every completion."""
    return text.count("1") / max(1, len(text))


class CountTask(gymnasium.Env):
    """One turn: the task's text is the observation, the reward that of the answer."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return (options or {})["text"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", reward_of(action), True, False, {"success": False, "reason": "counted"}


def algorithm(size: Size) -> AlgoConfig:
    prompts, group, new_tokens = size.grpo
    return AlgoConfig(
        name="grpo", prompts_per_step=prompts, group_size=group, max_new_tokens=new_tokens, lr=1e-5, drop_zero_variance=False
    )


def grpo_ours(case: Case, size: Size, clock: Clock = time.process_time) -> tuple[list[float], float]:
    """Seconds of each counted step of common.grpo (the first is a warm-up), and FLOPs per step."""
    marks: list[float] = []

    def task_at(step: int, count: int) -> list[dict]:
        marks.append(clock())
        return [{"text": text} for text in case.texts[:count]]

    labels = {"experiment": "bench", "scale": "bench", "variant": None, "arm": "grpo", "seed": 0}
    steps = size.steps + 2  # a warm-up, and a last one that also saves the state and only closes the one before
    with tempfile.TemporaryDirectory() as name, RunLog(Path(name), labels, quiet=True) as log:
        meter = train_grpo(
            copy.deepcopy(case.model),
            case.tokenizer,
            CountTask,
            task_at,
            algorithm(size),
            seed=0,
            budget=Budget(steps=steps),
            log=log,
            folder=Path(name),
            checkpoint_every=steps,
        )
    return differences(marks), meter.flops / steps


def grpo_trl(
    case: Case, size: Size, checkpointing: bool, clock: Clock = time.process_time, **options: Any
) -> tuple[list[float], float]:
    """Seconds of each counted step of TRL's GRPOTrainer, with or without gradient checkpointing (its default); and 0."""
    import datasets
    import transformers
    import trl

    marks: list[float] = []
    lengths: list[int] = []
    (prompts, group, new_tokens), steps = size.grpo, size.steps + 2

    class Marks(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(clock())

    def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward_of(text) for text in completions]

    with tempfile.TemporaryDirectory() as name:
        arguments = trl.GRPOConfig(
            **{"use_cpu": True, "bf16": False} | options,
            output_dir=name,
            gradient_checkpointing=checkpointing,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            temperature=1.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        rows = [{"prompt": case.tokenizer.bos_token + text} for text in case.texts[:prompts]] * steps
        trainer = trl.GRPOTrainer(
            model=copy.deepcopy(case.model),
            reward_funcs=reward,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=copy.deepcopy(case.tokenizer),
            callbacks=[Marks()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if set(lengths) != {new_tokens}:
        raise RuntimeError(f"TRL's completions have {min(lengths)} to {max(lengths)} tokens, ours {new_tokens}")
    return differences(marks), 0.0


def differences(marks: list[float]) -> list[float]:
    """Seconds between marks, the first interval (warm-up) left out."""
    return [later - earlier for earlier, later in itertools.pairwise(marks[1:])]


def sampler_ours(case: Case, rows: int, group: int, stops: list[int], new_tokens: int, clock: Clock = time.process_time) -> Run:
    """Seconds and tokens written by common.rollout.sample."""
    prompts, stream = case.prompts(rows // group), generator("bench", "sample", rows)
    start = clock()
    completions = sample(case.model, prompts, group_size=group, max_new_tokens=new_tokens, stop_ids=stops, generator=stream)
    return clock() - start, sum(len(completion.ids) for completion in completions)


def sampler_generate(
    case: Case, rows: int, group: int, stops: list[int], new_tokens: int, clock: Clock = time.process_time, **options: Any
) -> Run:
    """Seconds and tokens written, up to each row's first stop id, by transformers.generate."""
    prompts = [prompt for prompt in case.prompts(rows // group) for _ in range(group)]
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=case.model.device)
    attention_BT = (ids_BT != 0).long()  # id 0 is the pad token, which no prompt holds
    ending = {"eos_token_id": stops} if stops else {"min_new_tokens": new_tokens}
    torch.manual_seed(rows)
    start = clock()
    out_BT = case.model.generate(
        input_ids=ids_BT,
        attention_mask=attention_BT,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        max_new_tokens=new_tokens,
        **ending,
        **options,
    )
    seconds = clock() - start
    ends = [[i + 1 for i, token in enumerate(row) if token in stops] for row in out_BT[:, width:].tolist()]
    return seconds, sum(end[0] if end else out_BT.shape[1] - width for end in ends)


def split_step(case: Case, size: Size) -> dict[str, float]:
    """CPU seconds of the parts of one of our GRPO steps, each part run on its own on the same episodes.

    ``in attention``, ``in norms and gates``: what the compiled loops (common.kernels) take of all the parts.
    """
    parts: dict[str, float] = {}

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        parts[name] = parts.get(name, 0.0) + time.process_time() - start

    def timed(name: str, function: Callable) -> Callable:
        def run(*arguments: Any) -> None:
            with clock(name):
                function(*arguments)

        return run

    prompts, group, new_tokens = size.grpo
    model, tasks = copy.deepcopy(case.model), [{"text": text} for text in case.texts[:prompts]]
    settings: dict[str, Any] = {"group_size": group, "max_new_tokens": new_tokens}
    kinds = {"in attention": ("attend", "attend_back", "attend_step"), "in norms and gates": ("normalise", "normalise_back")}
    kinds["in norms and gates"] += ("rotate", "rotate_back", "gate", "gate_back")
    patches = {name: timed(kind, getattr(kernels, name)) for kind, names in kinds.items() for name in names}
    with mock.patch.multiple(kernels, **patches):
        with clock("prefill"), torch.inference_mode():
            make_decoder(model, list(map(tuple, case.prompts(prompts))), new_tokens)
        with clock("decode"):
            completions = sample(model, case.prompts(prompts), stop_ids=[], generator=generator("bench", "split"), **settings)
        parts["decode"] -= parts["prefill"]
        with clock("environment"), mock.patch("common.episodes.sample", return_value=completions):
            episodes = run_episodes(model, case.tokenizer, CountTask, tasks, **settings)
            batch = collate(episodes, case.tokenizer.pad_token_id)
        optimizer = make_optimizer(list(model.parameters()), [], algorithm(size))
        for rows in policy.micro_batches(batch, torch.arange(len(episodes))):
            part = policy.select(batch, rows)
            with clock("forward"):
                logp_N = policy.score_tokens(model, part, 1.0).logp_N
                ratio_N = (logp_N - part.logp_BT[part.mask_BT]).exp()
            with clock("backward"):
                ratio_N.mean().backward()
        with clock("optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return parts


def product_rate(model: nn.Module, rows: int, seconds: float = 0.5, clock: Clock = time.process_time) -> float:
    """FLOP/s of this model's matrix products alone, rows by every weight matrix in turn: its roofline at that shape."""
    weights = [parameter.detach() for parameter in model.parameters() if parameter.ndim == 2]
    inputs = {width: weights[0].new_ones(rows, width) for width in {weight.shape[1] for weight in weights}}
    best, spent = 0.0, 0.0
    while spent < seconds or best == 0:
        start = clock()
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.T)
        took = clock() - start
        best, spent = max(best, 2 * rows * parameter_count(model) / took), spent + took
    return best
