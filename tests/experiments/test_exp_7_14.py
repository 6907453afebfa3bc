"""RLVP's vocabulary, rows, splits, configuration and measures, with values worked out by hand."""

import json
from pathlib import Path

import pytest

from common.claims import load_claims
from common.config import ConfigError, compose
from common.episodes import Episode
from common.jobs import Cell
from common.runlog import RunLog
from common.tokenizers import PhraseEncoder, encode_feedback, encode_prompt
from experiments.exp_7_14_rlvp import data, run
from experiments.exp_7_14_rlvp.audit import WORLDS
from experiments.exp_7_14_rlvp.data import DOMAINS, SPLITS
from experiments.exp_7_14_rlvp.evaluate import Evaluator, all_of, episode_metrics
from experiments.exp_7_14_rlvp.figures import family
from experiments.exp_7_14_rlvp.scripts import FAILING, PERFECT, Mix, script
from experiments.exp_7_14_rlvp.settings import Settings

NUMBER = "7-14"
BASE = compose(NUMBER, Settings, [])


# Vocabulary and rows ---------------------------------------------------------------------------------------------------


def played(domain, task, mix):
    """All texts of a scripted episode: the prompt, then answers and replies in turn."""
    env = DOMAINS[domain].make_env()
    texts = [env.reset(options=dict(task))[0]]
    for text in script(env.world, mix, data.python_random(0, "start", task["task"])):
        reply, _, terminated, truncated, _ = env.step(text)
        texts += [text, reply]
        if terminated or truncated:
            break
    return texts


@pytest.mark.parametrize(("domain", "options"), WORLDS)
def test_every_text_is_made_of_words_that_the_tokenizer_knows(domain, options):
    tokenizer = data.build_tokenizer(domain)
    encode, longest = PhraseEncoder(tokenizer), 0
    for number in range(60):
        texts = played(domain, {"task": number, **options, "rules": number % 2 == 0}, Mix())
        for text in [*texts, "bad call", "blocked"]:
            assert tokenizer.decode(encode(text)) == text
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == encode(text)
        longest = max(longest, *(len(encode(text)) + 1 for text in texts[1::2]))
    assert longest <= DOMAINS[domain].max_new_tokens


@pytest.mark.parametrize(("domain", "options"), WORLDS)
def test_a_scripted_row_is_what_an_episode_would_be(domain, options):
    tokenizer, task = data.build_tokenizer(domain), {"task": 11, **options}
    env = DOMAINS[domain].make_env()
    ids, mask = data.scripted_row(env, task, PERFECT, PhraseEncoder(tokenizer), 0, "start")
    texts = played(domain, task, PERFECT)
    wanted = Episode([], [], [], [], prompt_length=0, task={}, group=0)
    wanted.append(encode_prompt(tokenizer, texts[0]), None, -1)
    for turn, text in enumerate(texts[1::2]):
        own = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        wanted.append(own, [0.0] * len(own), turn)
        if turn < len(texts) // 2 - 1:
            wanted.append(encode_feedback(tokenizer, texts[2 * turn + 2], True), None, -1)
    assert (ids, mask) == (wanted.ids, wanted.mask)


def test_a_scripted_episode_knows_what_it_did():
    env, encode = DOMAINS["fileops"].make_env(), PhraseEncoder(data.build_tokenizer("fileops"))
    perfect = data.scripted_episode(env, {"task": 10}, PERFECT, encode, 0)  # an edit: read, write, test, submit
    assert [text.split(" ")[0] for text in perfect.texts] == ["read", "write", "test", "submit"]
    assert perfect.success and perfect.reward == 1.0 and perfect.terminated and len(perfect.infos) == 4
    assert sorted(set(perfect.turns)) == [-1, 0, 1, 2, 3] and perfect.tokens_forward == 0
    failing = data.scripted_episode(env, {"task": 10}, FAILING, encode, 0)
    assert not failing.success and failing.reward == 0.0 and not any(info["violations"] for info in failing.infos)


def test_start_rows_are_their_seeds_and_a_share_reads_the_rules():
    tokenizer = data.build_tokenizer("fileops")
    encode = PhraseEncoder(tokenizer)

    def rows(seed):
        return data.start_rows("fileops", encode, ({"stages": 1}, {"stages": 2}), Mix(), 0.3, PERFECT, 200, seed)

    assert rows(0) == rows(0) != rows(1)
    rules = tokenizer.get_vocab()[f"Rules: {DOMAINS['fileops'].make_env().rules_text}"]
    assert 40 < sum(ids[1] == rules for ids, _ in rows(0)) < 80
    assert all(mask[-1] == 1 and len(ids) == len(mask) for ids, mask in rows(0))


def test_splits_share_no_number_and_steps_draw_from_training_alone():
    numbers = [set(split) for split in SPLITS.values()]
    assert sum(map(len, numbers)) == len(set().union(*numbers))
    assert (SPLITS["train"], min(SPLITS["test"])) == (range(500), 1000)
    drawn = data.training_tasks({"stages": 2}, 0, 3, 20)
    assert data.training_tasks({"stages": 2}, 0, 3, 50)[:20] == drawn != data.training_tasks({"stages": 2}, 0, 4, 20)
    assert len({task["task"] for task in drawn}) == 20 and all(task["task"] < 500 and task["stages"] == 2 for task in drawn)
    assert [task["task"] for task in data.tasks("validation", {}, 3)] == [500, 501, 502]


# Configuration ---------------------------------------------------------------------------------------------------------


def test_an_arm_in_full():
    rlvp, credits = BASE.arm_config("rlvp"), BASE.credit_config("rlvp")
    assert (rlvp.name, rlvp.prompts_per_step, rlvp.group_size, rlvp.max_turns, rlvp.max_new_tokens) == (
        "dr_grpo",
        16,
        8,
        12,
        10,
    )
    assert (rlvp.loss_agg, rlvp.drop_zero_variance) == ("token_mean", False)
    assert (credits.channel, credits.penalty, credits.credit) == ("both", 0.1, 0.1)
    assert BASE.arm_config("chain_rlvp").max_turns == 22
    for arm in ("c1", "c2", "c3", "c3_own", "c4", "step_groups", "rlvp_mixed", "rlvp_judged", "rlvp_fade"):
        other = BASE.credit_config(arm)
        assert (other.penalty, other.credit, BASE.arm_config(arm).lr) == (credits.penalty, credits.credit, rlvp.lr), arm
    for arm in ("chain_c1", "chain_c3"):
        other, chain = BASE.credit_config(arm), BASE.credit_config("chain_rlvp")
        assert (other.penalty, other.credit) == (chain.penalty, chain.credit) and chain.baseline == "group" != other.baseline
    assert BASE.credit_config("dapo") is None and BASE.arm_config("dapo").drop_zero_variance
    assert BASE.credit_config("outcome").channel == "none" and BASE.credit_config("penalties").outcome == 0
    assert BASE.credit_config("sft_perfect") is None and BASE.arm_config("sft_perfect").batch_size == 32
    assert compose(NUMBER, Settings, ["algo.lr=1e-5", "arms=[rlvp]"]).arm_config("rlvp").lr == 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("branches.rlvp.credits.chanel=both", "chanel"),
        ("branches.rlvp.credits.penalty=-0.5", "penalty"),
        ("branches.rlvp.credits.channel=turns", "channel"),
        ("branches.rlvp_held_out.credits.drop_rules=[blind_reed]", "blind_reed"),
        ("branches.rlvp.world=desks", "desks"),
        ("branches.rlvp.method=ppo", "method"),
        ("branches.sft_failing.scripts=lazy", "scripts"),
        ("worlds.files.options.stages=9", "stages"),
        ("worlds.files.start=file", "start"),
        ("starts.files.mix.wrong=2.0", "wrong"),
        ("starts.files.choices=[]", "choices"),
        ("starts.files.choices=[{stage: 1}]", "stage"),
        ("worlds.files.options.stage=1", "stage"),
        ("starts.desk.domain=desk", "domain"),
        ("sft_scripts=501", "sft_scripts"),
        ("arms=[rlpv]", "rlpv"),
        ("branches.rlvp.guests=some", "guests"),
        ("branches.start.views=[hidden]", "views"),
        ("max_new_tokens=64", "model_path"),
        ("arms=[terminal_rlvp]", "model_path"),
    ],
)
def test_bad_settings_are_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        compose(NUMBER, Settings, [change])


def test_start_models_come_before_their_cells_once_per_base():
    jobs = [job.name for job in run.plan(BASE, [100, 101, 102], ["wide_start", "start", "rlvp"])]
    assert jobs == [
        *(f"start proofs of seed {seed}" for seed in (100, 101)),
        *(Cell("wide_start", seed).name for seed in (100, 101, 102)),
        *(f"start files of seed {seed}" for seed in (100, 101)),
        *(Cell(arm, seed).name for seed in (100, 101, 102) for arm in ("start", "rlvp")),
    ]


def test_the_gpu_configuration_is_the_published_one():
    settings = compose(NUMBER, Settings, ["scale=gpu"])
    config, credits = settings.arm_config("rlvp"), settings.credit_config("rlvp")
    assert settings.model_path == "Qwen/Qwen3-4B" and settings.make_env("files")().syntax == "json"
    assert (config.prompts_per_step, config.group_size, config.epochs, config.temperature) == (16, 8, 3, 1.1)
    assert (config.lr, config.max_new_tokens, credits.penalty, credits.credit) == (pytest.approx(6e-5), 512, 0.25, 0.25)
    terminal = compose(NUMBER, Settings, ["scale=gpu", "arms=[terminal_rlvp]"]).arm_config("terminal_rlvp")
    assert (terminal.lr, terminal.max_turns, terminal.prompts_per_step) == (pytest.approx(2e-5), 15, 4)
    with pytest.raises(ConfigError, match="scripts"):
        compose(NUMBER, Settings, ["scale=gpu", "arms=[sft_perfect]"])


def test_claims_speak_of_arms_and_rules_that_are_there():
    claims = load_claims(Path(run.CLAIMS))
    assert set(claims.labels) == set(BASE.branches)
    points = [(point, claim.study) for claim in claims.claims for point in claim.test.points]
    points += [(row.point, row.study) for row in claims.table]
    points += [(point, item.study) for item in claims.discrepancies for point in item.ours]
    for point, study in points:
        branch = BASE.branches[point.arm]
        assert branch.study in (study, "both"), (point, study)
        if point.metric.startswith("rule/"):
            assert point.metric.removeprefix("rule/") in DOMAINS[BASE.domain(branch.world)].make_env().rules
        assert point.split in ("hidden", "train", *branch.views)
        assert point.split != "train" or branch.method == "policy_gradient"
    assert {family(arm) for arm in BASE.branches} == {"files", "chain", "desk", "proofs", "terminal"}


# Measures --------------------------------------------------------------------------------------------------------------


def episode(success, turns, **last):
    """An episode of turns given as (violations, mutated)."""
    made = Episode([], [], [], [], prompt_length=0, task={}, group=0, success=success, terminated=success)
    for violations, mutated in turns:
        parts = {"violations": len(violations), "credits": 1, "malformed": 0, "blocked": 0}
        made.infos.append({"violations": violations, "parts": parts, "mutated": mutated, "progress": 0.0})
    made.infos[-1] |= last
    return made


def test_measures_of_episodes():
    episodes = [
        episode(True, [([], True), (["a", "b"], False)], progress=1.0, unused_credits=1),
        episode(True, [([], True)], progress=1.0),
        episode(False, [(["a"], False), ([], False), (["a"], False)]),
        episode(True, [([], False)]),
    ]
    found = episode_metrics(episodes, ["a", "b"])
    assert found["success"] == [1, 1, 0, 1] and found["clean"] == [0, 1, 0, 1] and found["perfect"] == [0, 1, 0, 1]
    assert found["violations"] == [2, 0, 2, 0] and found["rule/a"] == [1, 0, 2, 0] and found["rule/b"] == [1, 0, 0, 0]
    assert found["calls"] == [2, 1, 3, 1] and found["changes"] == [1, 1, 0, 0] and found["inactive"] == [0, 0, 1, 1]
    assert found["credits"] == [2, 1, 3, 1] and found["unused_credits"] == [1, 0, 0, 0] and found["unended"] == [0, 0, 1, 0]
    assert all_of(found["success"], 2) == [1, 0] and all_of(found["perfect"], 2) == [0, 0] and all_of([1, 1, 1, 0], 4) == [0]


def test_how_training_went(tmp_path):
    rates = [0.5, 0.7, 0.9, 0.97, 0.85, 1.0, 0.9, 0.4]
    rows = [{"step": i + 1, "success/mean": rate, "dead/outcome": i / 10, "dead/path": None} for i, rate in enumerate(rates)]
    labels = {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "outcome", "seed": 0}
    with RunLog(tmp_path, labels) as log:
        log.resume(0)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Evaluator(BASE, "files", None, None, log, 0).training_records(tmp_path)
    found = {row["metric"]: row["value"] for row in map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())}
    # .9, .97, .85 is the first window of three with a mean of .9 or more: it ends with the fifth step
    assert found["steps_to_90"] == 5 and found["training_steps"] == 8
    assert found["success_area"] == pytest.approx(sum(rates) / 8)
    assert (found["dead_outcome_early"], found["dead_outcome_late"]) == (pytest.approx(0.05), pytest.approx(0.65))
    assert "dead_path_early" not in found
