"""7-15: problems, programs, interpreter, grammar and reward, masks proved by gradient, what is measured, configuration."""

import json
import re

import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from common import episodes as episodes_module
from common import grpo, losses
from common.algo import load_algo
from common.config import compose
from common.episodes import collate, run_episodes
from common.models import DecoderConfig, build_decoder
from common.rollout import Completion
from common.sandbox import Isolation, Result, SandboxError, isolation
from common.schema import ConfigError
from common.seeding import python_random
from common.tokenizers import PhraseEncoder, encode_feedback, encode_prompt
from experiments.exp_7_15_retool import arms, audit, data, env, evaluate, figures, files, problems, programs, tune
from experiments.exp_7_15_retool.env import Calculations, EnvConfig, read_turn
from experiments.exp_7_15_retool.interpreter import Interpreter, InterpreterConfig, Reply, reply_text
from experiments.exp_7_15_retool.problems import Problem
from experiments.exp_7_15_retool.settings import Settings

CHAIN = Problem("large", (23, 47, 16, 5), ("*", "+", "-"))  # 23*47=1081, +16=1097, -5=1092; 1092 = 11*97 + 25
TOWER = Problem("tower", (23, 47, 61))
EQUATION = Problem("equation", (23, 16))
SUM = Problem("small", (23, 7, 5), ("+", "-"))
TOKENIZER = data.build_tokenizer()
ENCODE = PhraseEncoder(TOKENIZER)
CODE = "<code>print((23*47+16-5)%97)</code>"


def settings(*changes):
    return compose("7-15", Settings, ["scale=smoke", *changes])


@pytest.fixture(scope="module")
def interpreter():
    if not isolation().strong:
        pytest.skip(isolation().why)
    with Interpreter(InterpreterConfig()) as opened:
        yield opened


def written(code):
    """Stands in for the interpreter where what it says does not matter."""
    return Reply("25", "ok", False)


# --- problems and programs ------------------------------------------------------------------------------------------


def test_the_texts_of_the_docstring():
    assert problems.prompt(CHAIN) == "Start with 23, times 47, plus 16, minus 5. What is left modulo 97?"
    assert problems.working(CHAIN) == "23*47=14+16=30-5=25" and CHAIN.answer == 25
    assert problems.prompt(TOWER) == "Raise 23 to the power of 47 to the power of 61. What is left modulo 83?"
    assert problems.prompt(EQUATION) == "Which number times 23 leaves 16 modulo 97?"
    assert problems.working(TOWER) == problems.working(EQUATION) == ""
    assert problems.prompt(SUM) == "Start with 23, plus 7, minus 5. What is the result?" and SUM.answer == 25
    assert programs.write(SUM, "in_place").code == "x=23\nx+=7\nx-=5\nprint(x)"


def test_answers_by_another_way():
    assert 23 * EQUATION.answer % 97 == 16
    assert TOWER.answer == pow(23, 47**61 % 82, 83)  # Fermat: the exponent counts modulo 82
    assert Problem("large", (3, 10, 9), ("-", "*")).steps == [90, 34]  # 3 - 10 = -7 is 90 modulo 97, 810 = 8 * 97 + 34


def test_roles_are_disjoint_and_longer_chains_are_longer():
    assert list(audit.split_holes()) == []
    assert {len(p.operations) for p in problems.items("test", 0, "large", problems.LENGTHS, 9)} == {3, 4, 5}
    for kind, (operand, largest) in problems.SUMS.items():
        for problem in problems.items("train", 1, kind, problems.LONGER, 30):
            assert all(0 <= step <= largest for step in problem.steps) and max(problem.numbers[1:]) <= operand
    assert {len(p.operations) for p in problems.items("test", 0, "large", problems.LONGER, 9)} == {6, 7}
    assert problems.problem_of(json.loads(json.dumps(problems.options_of(CHAIN)))) == CHAIN


def test_programs_in_every_style():
    assert programs.write(CHAIN, "in_place").code == "x=23\nx*=47\nx+=16\nx-=5\nprint(x%97)"
    assert programs.write(CHAIN, "names").code == "a=23*47\nb=a+16\nc=b-5\nprint(c%97)"
    assert programs.write(TOWER, "pow").code == "print(pow(23,47**61,83))"
    assert programs.write(EQUATION, "inverse").code == "print(pow(23,-1,97)*16%97)"
    assert programs.write(EQUATION, "search").code == "for x in range(97):\n if x*23%97==16:print(x)"


def test_what_the_corpus_says_is_what_the_sandbox_says(interpreter):
    stream = python_random(1)
    for problem in (CHAIN, TOWER, EQUATION, *problems.items("corpus", 3, "small", problems.LONGER, 3)):
        for style in programs.STYLES[problem.kind]:
            program = programs.write(problem, style)
            assert interpreter(program.code) == Reply(str(problem.answer), "ok", False), program
        for fault in dict.fromkeys(programs.FAULTS[problem.kind]):
            program = programs.write_faulty(problem, fault, stream)
            reply = interpreter(program.code)
            assert reply.text == program.reply != str(problem.answer), program
            assert reply.failed == (fault not in programs.SILENT)


# --- the interpreter ------------------------------------------------------------------------------------------------


def test_equal_programs_run_once_and_nothing_is_left_to_the_next(interpreter):
    before, calls = interpreter.executions, interpreter.calls
    assert [interpreter("q=5\nprint(q)").text for _ in range(3)] == ["5"] * 3
    assert (interpreter.executions, interpreter.calls) == (before + 1, calls + 3)
    assert interpreter("print(q)") == Reply("NameError", "error", True)


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        ("x=1", programs.NOTHING, "ok"),
        ("print(1)\nprint(2)", "1 2", "ok"),
        ("print('<answer>7</answer>')", "(answer>7(/answer>", "ok"),
        ("print('a'*99)", "a" * 21 + "...", "ok"),
        ("print(7)\nprint(y)", "NameError", "error"),
        ("raise SystemExit(3)", "Error", "error"),
        ("while True: pass", "TimeoutError", "timeout"),
        ("x='a'*10**9", "MemoryError", "memory"),
        ("print(open('/etc/hostname').read())", "FileNotFoundError", "error"),
        ("import socket\nsocket.create_connection(('127.0.0.1',9),1)", "OSError", "error"),
    ],
)
def test_replies(interpreter, code, text, status):
    """S03, S04, S10: limits and isolation as one line of text."""
    reply = interpreter(code)
    assert (reply.text, reply.status, reply.failed) == (text, status, status != "ok")


def test_an_error_with_its_message():
    result = Result("error", "", "Traceback\n  x\nNameError: name 'y' is not defined\n", 1)
    assert reply_text(result, InterpreterConfig(messages=True, reply_chars=80)) == "NameError: name 'y' is not defined"
    assert reply_text(result, InterpreterConfig()) == "NameError"
    assert reply_text(Result("error", "", "", -1), InterpreterConfig()) == "Error"


def test_isolation_is_never_lost_in_silence(monkeypatch):
    monkeypatch.setattr("common.sandbox.pool.isolation", lambda: Isolation(False, "no namespaces here"))
    with pytest.raises(SandboxError, match="no namespaces here"):
        Interpreter(InterpreterConfig())
    with Interpreter(InterpreterConfig(allow_weak=True)) as weak:
        assert not weak.strong
    rows = [{"metric": "isolated", "value": value} for value in (0.0, 1.0)]
    assert figures.isolation(rows).startswith("**Not isolated** in 1 of 2 cells")


def test_a_lost_program_is_an_error_of_ours(interpreter, monkeypatch):
    monkeypatch.setattr(interpreter.box, "run", lambda some: [Result("lost", reason="gone")])
    with pytest.raises(SandboxError, match="gone"):
        interpreter("print(123456)")


# --- grammar and reward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "inside"),
    [
        ("<code>print(1)</code>", "code", "print(1)"),
        ("23*47=14<answer>7</answer>\n", "answer", "7"),
        ("", "malformed", env.NO_BLOCK),
        ("25", "malformed", env.NO_BLOCK),
        ("<answer>7", "malformed", env.NO_BLOCK),
        ("7</answer>", "malformed", env.STRAY),
        ("<answer>7</answer><answer>8</answer>", "malformed", env.TWO_BLOCKS),
        ("<code>x</code><answer>7</answer>", "malformed", env.TWO_BLOCKS),
        ("<answer>7</answer>8", "malformed", env.BEHIND),
        ("<code>1</answer>", "malformed", env.STRAY),
        ("<interpreter>7</interpreter><answer>7</answer>", "malformed", env.STRAY),
        ("<code>1</code><interpreter>7</interpreter>", "malformed", env.STRAY),
    ],
)
def test_turns_by_the_written_rule(text, kind, inside):
    """V20: exactly one block."""
    assert read_turn(text)[:2] == (kind, inside)


def play(turns, problem=CHAIN, run=written, **config):
    calculations = Calculations(run, EnvConfig(**config))
    calculations.reset(options=problems.options_of(problem))
    for turn in turns:
        last = calculations.step(turn)
    return last


@pytest.mark.parametrize(
    ("calls", "answer", "plain", "shaped"),
    [(0, "25", 1.0, 1.0), (0, "24", -1.0, -1.0), (1, "24", -1.0, -0.9), (3, "24", -1.0, -0.7), (3, "25", 1.0, 1.0),
     (7, "24", -1.0, -0.6)],
)  # fmt: skip
def test_rewards_with_and_without_the_published_recipes_shaping(calls, answer, plain, shaped):
    turns = [CODE] * calls + [f"<answer>{answer}</answer>"]
    for value, setting in ((plain, False), (shaped, True)):
        _, reward, terminated, _, info = play(turns, max_turns=8, shaped=setting)
        assert reward == pytest.approx(value) and terminated and info["success"] == (answer == "25")
        assert info["calls"] == calls


def test_code_is_run_and_the_reply_is_the_next_observation():
    seen = []

    def run(code):
        seen.append(code)
        return Reply("NameError", "error", True)

    text, reward, terminated, truncated, info = play(["23*47=" + CODE], run=run)
    assert (text, reward, terminated, truncated) == ("<interpreter>NameError</interpreter>", 0.0, False, False)
    assert seen == ["print((23*47+16-5)%97)"] and info["failed"] and info["before"] == 6 and not info["success"]


def test_the_limit_of_turns_is_no_success_and_costs_as_much_as_a_wrong_answer():
    """G07, and no end is cheaper than a wrong answer: terminated, so that PPO adds no value of what might have followed."""
    _, reward, terminated, truncated, info = play([CODE] * 4)
    assert (reward, terminated, truncated, info["reason"], info["calls"]) == (-1.0, True, False, env.LAST_TURN, 3)


def test_without_an_interpreter_code_ends_the_episode():
    _, reward, terminated, _, info = play([CODE], run=None, tool=False, max_turns=1)
    assert (reward, terminated, info["reason"]) == (-1.0, True, env.NO_TOOL)
    with pytest.raises(ValueError, match="needs an interpreter"):
        Calculations(None, EnvConfig())


def test_the_environment_keeps_gymnasiums_contract():
    check_env(Calculations(), skip_render_check=True)
    one, two = Calculations(), Calculations()
    assert one.reset(seed=4)[0] == two.reset(seed=4)[0]
    with pytest.raises(TypeError):
        one.step(12)
    one.step("x")
    with pytest.raises(ResetNeeded):
        one.step("x")


def test_the_audit_of_one_problem_finds_no_hole_and_can_fail(interpreter):
    for case in [*audit.gold(CHAIN), *audit.mutations(CHAIN), *audit.exploits(CHAIN)]:
        assert audit.judge(case, interpreter) is None, case
    assert audit.judge(audit.Case("x", CHAIN, ("<answer>25</answer>",), False), interpreter)
    assert audit.judge(audit.Case("x", CHAIN, ("<answer>24</answer>",), True), interpreter)


# --- texts as tokens, masks -----------------------------------------------------------------------------------------


def test_texts_survive_the_tokenizer_and_both_encoders_agree():
    assert list(audit.tokenizer_holes()) == []


def scripted(monkeypatch, *turns):
    """A policy that writes these turns, whatever it reads."""
    left = list(turns)

    def sample(model, prompts, **_):
        ids = [*ENCODE(left.pop(0)), ENCODE.eos]
        return [Completion(ids, [-0.5] * len(ids), True) for _ in prompts]

    monkeypatch.setattr(episodes_module, "sample", sample)


TINY = build_decoder(DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=256), TOKENIZER, 0)


@pytest.fixture
def episode(monkeypatch):
    scripted(monkeypatch, CODE, "<answer>25</answer>")
    (one,) = run_episodes(TINY, TOKENIZER, lambda: Calculations(written), [problems.options_of(CHAIN)], max_turns=4)
    return one


def test_an_episode_is_the_very_row_that_a_demonstration_is(episode):
    """T04, T08: pieces joined equal the whole; the reply is read, not written."""
    turns = [(CODE, True), ("<interpreter>25</interpreter>", False), ("<answer>25</answer>", True)]
    ids, mask = data.row(ENCODE, problems.prompt(CHAIN), turns)
    assert (episode.ids, episode.mask) == (ids, mask)
    assert ids == [
        *encode_prompt(TOKENIZER, problems.prompt(CHAIN)), *ENCODE(CODE), ENCODE.eos,
        *encode_feedback(TOKENIZER, "<interpreter>25</interpreter>", True), *ENCODE("<answer>25</answer>"), ENCODE.eos,
    ]  # fmt: skip
    assert episode.success and episode.reward == 1.0 and not episode.truncated


def gradient_of(episode, model=TINY):
    """The gradient that one GRPO micro-batch with advantage 1 gives the weights."""
    model.zero_grad()
    batch, algo = collate([episode], TOKENIZER.pad_token_id), load_algo("grpo")
    weights_B = losses.sequence_weights(batch.mask_BT.sum(1), algo.loss_agg)
    grpo.accumulate(
        model, batch, torch.tensor([0]), batch.mask_BT.float(), weights_B, None, algo,
        dict.fromkeys(("loss/policy", "entropy", "kl/old", "ratio/clip_low_frac", "ratio/clip_high_frac", "tokens"), 0.0),
    )  # fmt: skip
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_hand(episode, wanted, model=TINY):
    """The gradient of minus the mean log-probability of the tokens at these places, by a plain forward pass."""
    model.zero_grad()
    ids = torch.tensor([episode.ids])
    logp_TV = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    picked = torch.stack([logp_TV[place - 1, episode.ids[place]] for place in wanted])
    (-picked.mean()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_interpreters_tokens_have_no_gradient(episode):
    """Masked: the gradient is that of the policy's own tokens. Unmasked: of all behind the prompt."""
    own = [place for place, mask in enumerate(episode.mask) if mask]
    behind = range(episode.prompt_length, len(episode.ids))
    assert len(behind) - len(own) == 3  # <interpreter> 25 </interpreter>
    torch.testing.assert_close(gradient_of(episode), by_hand(episode, own), rtol=1e-4, atol=1e-6)
    forward = episode.tokens_forward
    arms.Unmasked(lambda: Calculations(written), TINY, TOKENIZER, 1.0).rescore([episode])
    assert all(episode.mask[place] for place in behind) and not any(episode.mask[: episode.prompt_length])
    assert episode.tokens_forward == forward + len(episode.ids)
    torch.testing.assert_close(gradient_of(episode), by_hand(episode, behind), rtol=1e-4, atol=1e-6)
    logps = torch.log_softmax(TINY(input_ids=torch.tensor([episode.ids])).logits[0].detach(), -1)
    for place in set(behind) - set(own):
        assert episode.logps[place] == pytest.approx(float(logps[place - 1, episode.ids[place]]), abs=1e-5)


def test_batches_are_functions_of_seed_and_step_and_replies_are_no_targets():
    corpus = data.Corpus(ENCODE, settings().corpus, 3)
    for a, b in zip(corpus.batch(5, 8), corpus.batch(5, 8)):
        assert torch.equal(a, b)
    assert not torch.equal(corpus.batch(5, 8)[0], corpus.batch(6, 8)[0])
    opened, closed = (TOKENIZER.convert_tokens_to_ids(tag) for tag in (env.INTERPRETER, env.END_INTERPRETER))
    for made in (corpus, data.Demonstrations(ENCODE, settings().demonstrations, 0, True)):
        ids, _, mask = made.batch(0, 64)
        places = (ids == opened).nonzero().tolist()
        assert places
        for row, begin in places:
            end = begin + ids[row, begin:].tolist().index(closed)
            assert not mask[row, begin : end + 1].any() and mask[row, begin - 1] == 1


def test_demonstrations_are_clean_and_of_their_protocol():
    for tool in (True, False):
        made = data.Demonstrations(ENCODE, settings().demonstrations, 0, tool)
        texts = TOKENIZER.batch_decode(made.batch(0, 128)[0])
        assert not any(error in text for text in texts for error in programs.ERRORS)
        calls = sum(env.CODE in text for text in texts)
        assert 90 < calls < 125 if tool else calls == 0  # 2 of 5 kinds always call, 3 of 5 in 75 %: 85 % of 128 are 109
        assert all(text.count(env.CODE) <= 1 and text.count(env.ANSWER) == 1 for text in texts)


def test_tasks_of_a_step_hold_every_kind_and_grow_at_the_end():
    pool = data.training_pool(0, 6)
    tasks = data.training_tasks(pool, 0, 5, 10)
    assert [task["kind"] for task in tasks] == [*problems.KINDS, *problems.KINDS]
    assert data.training_tasks(pool, 0, 5, 20)[:10] == tasks and data.training_tasks(pool, 0, 6, 10) != tasks
    assert {problems.role(problems.problem_of(task)) for task in pool} == {"train"}


# --- what is measured -----------------------------------------------------------------------------------------------


def info(code="", failed=False, turn="code"):
    return {"reply": "r" if code else "", "code": code, "failed": failed, "turn": turn}


def made(texts, infos, success, mask=(0, 1, 1, 0, 1)):
    shape = {"texts": texts, "infos": infos, "success": success, "mask": list(mask), "ids": [0] * len(mask)}
    return type("Made", (), {**shape, "prompt_length": 1, "truncated": False})()


def test_measures_of_calls_and_repair():
    ran, failed, answer = info("a"), info("b", True), info(turn="answer")
    found = evaluate.metrics(
        [
            made(["xx<code>a</code>", "<answer>1</answer>"], [ran, answer], True),
            made(["<code>b</code>", "<code>a</code>", "<answer>1</answer>"], [failed, ran, answer], True),
            made(["<code>b</code>", "<code>b</code>", "<answer>1</answer>"], [failed, failed, answer], True),
            made(["<code>b</code>", "<code>a</code>", "<answer>0</answer>"], [failed, ran, answer], False),
            made(["<answer>1"], [info(turn="malformed")], False),
        ]
    )
    assert found["calls"] == [1, 2, 2, 2, 0] and found["uses_tool"] == [1, 1, 1, 1, 0]
    assert found["code_ok"] == [1, 0, 1, 0, 0, 0, 1]
    assert found["retried"] == [1, 0, 1] and found["mended"] == [1, 0, 0]
    assert found["first_call"][0] == pytest.approx(2 / 34) and found["first_call"][1:] == [0, 0, 0]
    assert found["malformed"] == [0, 0, 0, 0, 1]
    assert found["length"] == [3] * 5 and found["tokens_read"] == [1] * 5


def test_tuning_seeds_see_validation_problems_alone():
    config = settings()
    for seed, wanted in ((5, "validation"), (105, "test")):
        splits = evaluate.Evaluator(config, config.branches["text_start"], TOKENIZER, None, seed, None).splits(4)
        assert set(splits) == {*problems.KINDS, "long"} and len(splits["long"]) == 12
        assert {problems.role(problems.problem_of(task)) for some in splits.values() for task in some} == {wanted}


def test_tables_from_records():
    base = {"n": 1, "seed": 100}
    rows = []
    for arm, end in (("text_rl", 0.4), ("tool_rl", 0.9)):
        for step, value in ((0, 0.2), (50, 0.5 if arm == "tool_rl" else 0.3), (100, end)):
            for metric in ("success", "calls", "length", "first_call"):
                row = {**base, "arm": arm, "split": "id", "metric": metric, "value": value, "step": step, "final": False}
                rows += [row, {**row, "final": True}] if step == 100 else [row]
    assert ("tool: SFT, then GRPO (ReTool)", "1 of 1", "33.3 %") in figures.speed(rows).rows  # 0.2 to 0.5 in 50: 0.4 at 33.3
    (first, second, third) = figures.phases(rows).rows
    assert first[1:3] == ("0 to 30 %", "+18.0 points") and third[2] == "+24.0 points" and second[2] == "+28.0 points"


# --- configuration and files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("branches.tool_rl.changes={clip_hi: 1}", "clip_hi"),
        ("branches.tool_rl.start=sft", "start"),
        ("branches.text_rl.shaped=true", "no"),
        ("branches.tool_sft.unmasked=true", "need method=rl"),
        ("branches.tool_ppo.unmasked=true", "algo=ppo"),
        ("branches.tool_start.changes={lr: 1}", "no keys"),
        ("model_path=some/model", "set both or neither"),
        ("max_new_tokens=200", "model.max_length=512"),
        ("demonstrations.early=0.9", "add up to 1"),
        ("corpus.documents={poem: 1}", "poem"),
        ("interpreter.cpu_s=-1", "cpu_s"),
        ("interpreter.reply_chars=2", "reply_chars"),
        ("max_turns=1", "max_turns"),
        ("arms=[nobody]", "arms"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings(change)


def test_arms_differ_in_what_they_say():
    config = compose("7-15", Settings, [])
    plain = config.arm_config("tool_rl")
    assert (plain.max_turns, plain.group_size, plain.prompts_per_step, plain.minibatches) == (4, 8, 16, 2)
    assert config.arm_config("text_rl").max_turns == 1 and config.arm_config("tool_ppo").prompts_per_step == 128
    assert config.arm_config("grpo") == plain
    for arm, change in {"clip_higher": ("clip_high", 0.28), "token_level": ("loss_agg", "token_mean"),
                        "dynamic": ("refill_rounds", 3), "overlong": ("overlong_buffer", 16)}.items():  # fmt: skip
        assert getattr(config.arm_config(arm), change[0]) == change[1] != getattr(plain, change[0])
        assert getattr(config.arm_config("tool_dapo"), change[0]) == change[1]
    shaped = config.branches["tool_shaped"]
    assert config.env_config(shaped, True).shaped and not config.env_config(shaped, False).shaped
    rates = {arm: branch.lr for arm, branch in config.branches.items() if branch.lr is not None}
    assert set(tune.RATES) <= set(rates) and len({len(tries) for tries in tune.RATES.values()}) == 1


def test_problems_from_files(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}},
        {"question": "Half?", "answer": r"\frac{1}{2}"},
        {"question": "bad", "answer": "\frac{1}{2}"},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = files.tasks(str(path), 5, "Box it. ")
    assert {(task["question"], task["answer"]) for task in found} == {("Box it. 1+1?", "2"), ("Box it. Half?", r"\frac{1}{2}")}
    calculations = Calculations(written)
    for answer, reward in ((r"\boxed{0.5}", 1.0), ("0.5", -1.0), (r"\boxed{2}", -1.0)):
        calculations.reset(options={"question": "Half?", "answer": r"\frac{1}{2}"})
        assert calculations.step(f"<answer>{answer}</answer>")[1] == reward
    (tmp_path / "none.jsonl").write_text(json.dumps({"question": "q"}) + "\n")
    with pytest.raises(ConfigError, match="needs a column"):
        files.tasks(str(tmp_path / "none.jsonl"), 5, "")
    with pytest.raises(ConfigError, match="no file"):
        files.tasks(str(tmp_path / "other.jsonl"), 5, "")


def test_the_gpu_configuration_follows_the_published_recipe():
    config = compose("7-15", Settings, ["scale=gpu"])
    algo = config.arm_config("tool_rl")
    assert (algo.prompts_per_step, algo.group_size, algo.minibatches) == (32, 16, 8)
    assert (algo.clip_low, algo.clip_high, algo.kl_coef, algo.max_turns) == (0.2, 0.28, 0.0, 8)
    assert algo.lr == pytest.approx(1e-6 * config.lora.rate_factor)
    with pytest.raises(ConfigError, match="demonstrations"):
        compose("7-15", Settings, ["scale=gpu", "arms=[tool_sft]"])
