"""The comparison's task, splits, measures and configuration, with values worked out by hand."""

import json
from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from common import tuning
from common.checkpoints import save_model
from common.config import ConfigError, compose
from common.episodes import Episode
from common.files import read_json_lines
from common.models import build_decoder
from common.pairs import step_pairs
from common.runlog import RunLog
from common.seeding import base_seed
from common.statistics import overlaps
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_algorithms import arms, chains, data, figures, stages, tune
from experiments.exp_7_algorithms.chains import Chain
from experiments.exp_7_algorithms.env import ENV_ID, ArithmeticChains, grade
from experiments.exp_7_algorithms.evaluate import Evaluator, episode_metrics, evaluation_chains
from experiments.exp_7_algorithms.settings import METHODS, Settings

CHAIN = Chain(37, (("+", 25), ("-", 13), ("*", 2)))
STEPS = "37+25=62; 62-13=49; 49*2=98"
NUMBER = "7-algorithms"


# The task ------------------------------------------------------------------------------------------------------------


def test_a_chain_its_text_and_its_worked_answer():
    assert CHAIN.results == [62, 49, 98]
    assert chains.prompt(CHAIN) == "Start with 37, then +25, then -13, then *2. Write down each step, then the answer.\n"
    assert chains.answer(CHAIN) == f"{STEPS}. Answer: 98"
    assert chains.answer(CHAIN, direct=True) == ". Answer: 98"
    hinted = f"Start with 37, then +25, then -13, then *2. A worked solution: {STEPS}. Write down each step, then the answer.\n"
    assert chains.prompt(CHAIN, hint=True) == hinted
    assert data.chain_of(data.task(CHAIN)) == CHAIN


@pytest.mark.parametrize(
    ("number", "op", "allowed"),
    [(37, "+", range(1, 63)), (37, "-", range(1, 38)), (37, "*", range(2, 3)), (11, "*", range(2, 10)), (50, "*", range(2, 2)),
     (99, "+", range(1, 1)), (0, "-", range(1, 1)), (0, "*", range(0))],
)  # fmt: skip
def test_operands_keep_the_result_in_0_to_99(number, op, allowed):
    assert list(chains.operands(number, op)) == list(allowed)
    assert all(0 <= chains.apply(number, op, operand) <= 99 for operand in allowed)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(f"{STEPS}. Answer: 98", "right"), (". Answer: 98", "no_steps"), ("37+25=61; 62-13=49; 49*2=98. Answer: 98", "arithmetic"),
     (f"{STEPS}; 98+0=98. Answer: 98", "misread")],
)  # fmt: skip
def test_answers_that_must_score(text, kind):
    found = grade(text, CHAIN)
    assert (found.success, found.kind) == (True, kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "no_answer"),
        (STEPS, "no_answer"),
        ("98", "no_answer"),
        (f"{STEPS}. Answer: ", "no_answer"),
        (f"{STEPS}. Answer: 98 98", "no_answer"),
        (f"{STEPS}. Answer: 098", "no_answer"),
        (f"{STEPS}. Answer: 98.", "no_answer"),
        (f"{STEPS}. Answer: +98", "no_answer"),
        (f"{STEPS}. Answer: ９８", "no_answer"),
        (f"{STEPS}. Answer: 97. Answer: 98", "no_answer"),  # several guesses are worth no more than none
        (f"{STEPS}. Answer: 97", "wrong_end"),
        ("37+25=62; 62-13=49; 49*2=97. Answer: 97", "arithmetic"),
        ("37+25=62; 62-13=48; 48*2=96. Answer: 96", "arithmetic"),
        ("37+25=62; 62-12=50; 50*2=99. Answer: 99", "misread"),
        ("37+25=62. Answer: 62", "misread"),
        (". Answer: 97", "no_steps"),
        ("25+37=62; 62-13=49; 49*2=97. Answer: 97", "misread"),
    ],
)
def test_answers_that_must_not_score(text, kind):
    found = grade(text, CHAIN)
    assert (found.success, found.kind) == (False, kind)
    assert found.reason


def test_every_gold_answer_scores_and_every_other_last_number_does_not():
    for chain in chains.items("train", 0, (*chains.ID_LENGTHS, *chains.OOD_LENGTHS), 300):
        assert grade(chains.answer(chain), chain) == (True, "right", "right")
        wrong = (chain.results[-1] + 1) % 100
        assert not grade(f"{chains.trace(chain)}{chains.ANSWER}{wrong}", chain).success
        assert len(chain.steps) == len(chain.results) and all(0 <= number <= 99 for number in chain.results)


def test_the_environment_keeps_to_gymnasiums_rules():
    env = gymnasium.make(ENV_ID)
    check_env(env.unwrapped, skip_render_check=True)
    first, again = (env.reset(seed=7)[0] for _ in range(2))
    assert first == again and first.startswith("Start with ")
    prompt, _ = env.reset(options=data.task(CHAIN))
    assert prompt == chains.prompt(CHAIN)
    observation, reward, terminated, truncated, info = env.step(chains.answer(CHAIN))
    assert (observation, reward, terminated, truncated, info["success"], info["lucky"]) == ("", 1.0, True, False, True, False)
    bare = ArithmeticChains()
    with pytest.raises(gymnasium.error.ResetNeeded):
        bare.step("x")
    bare.reset(options=data.task(CHAIN))
    with pytest.raises(TypeError):
        bare.step(98)


def test_a_right_number_behind_wrong_steps_is_lucky():
    env = ArithmeticChains()
    env.reset(options=data.task(CHAIN))
    _, reward, _, _, info = env.step("37+25=61; 62-13=49; 49*2=98. Answer: 98")
    assert (reward, info["success"], info["lucky"], info["class"]) == (1.0, True, True, "arithmetic")


# Splits --------------------------------------------------------------------------------------------------------------


def test_no_two_roles_share_a_chain():
    lengths = (*chains.ID_LENGTHS, *chains.OOD_LENGTHS)
    drawn = {name: chains.items(name, seed, lengths, 400) for seed, name in enumerate(chains.ROLES)}
    assert set(overlaps(drawn).values()) == {0}
    assert all(chains.role(chain) == name for name, some in drawn.items() for chain in some)
    assert sorted(bucket for buckets in chains.ROLES.values() for bucket in buckets) == list(range(chains.BUCKETS))


def test_what_models_learn_from_holds_no_test_or_validation_chain():
    settings = compose(NUMBER, Settings, [])
    seen = {chains.role(chain) for seed in (0, 100, 101, 199) for chain in stages.train_chains(settings, seed)}
    assert seen == {"train"}
    held_out = {chain for seed in (0, 100) for some in evaluation_chains(settings, seed).values() for chain in some}
    assert {chains.role(chain) for chain in held_out} == {"validation", "test"}
    encode = PhraseEncoder(tokenizer := data.build_tokenizer())
    corpus = data.Corpus(encode, settings.corpus, 100)
    prompts = {chains.prompt(chain) for chain in held_out}
    for step in range(20):
        ids_BT, _, _ = corpus.batch(step, 32)
        for row in tokenizer.batch_decode(ids_BT):
            shown = [f"{text.split(chains.ASK)[0]}{chains.ASK}" for text in row.split("<bos>") if chains.ASK in text]
            assert not prompts.intersection(shown)


def test_tuning_and_report_seeds_share_no_base_and_report_seeds_share_the_test_chains():
    settings = compose(NUMBER, Settings, [])
    assert [base_seed(seed, settings.bases) for seed in (0, 1, 2, 100, 101, 102)] == [0, 1, 0, 100, 101, 100]
    assert evaluation_chains(settings, 100) == evaluation_chains(settings, 102) != evaluation_chains(settings, 0)
    assert stages.train_chains(settings, 100) != stages.train_chains(settings, 102)
    lengths = {split: {len(chain.steps) for chain in some} for split, some in evaluation_chains(settings, 100).items()}
    assert lengths == {"id": {2, 3, 4}, "ood": {5, 6}}


# Texts ---------------------------------------------------------------------------------------------------------------


def test_the_encoder_writes_what_the_tokenizer_writes_one_token_a_piece():
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    for text in (chains.prompt(CHAIN), chains.prompt(CHAIN, hint=True), chains.answer(CHAIN)):
        assert encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    ids, mask = encode.row(chains.prompt(CHAIN), chains.answer(CHAIN))
    assert (len(ids), sum(mask), mask.index(1)) == (27, 17, 10)
    assert tokenizer.decode(ids) == f"<bos>{chains.prompt(CHAIN)}{chains.answer(CHAIN)}<eos>"
    numbers = number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)
    assert {tokenizer.decode([token]): number for token, number in numbers.items()}["=62"] == 62 and len(numbers) == 200


def test_facts_teach_their_results_alone():
    tokenizer = data.build_tokenizer()
    corpus = data.Corpus(PhraseEncoder(tokenizer), data.CorpusConfig(facts=1.0, row_tokens=12), 0)
    ids_BT, _, mask_BT = corpus.batch(0, 1)
    targets = [tokenizer.decode([token]) for token, mask in zip(ids_BT[0], mask_BT[0]) if mask]
    assert len(targets) == 2 and all(text.startswith("=") for text in targets)


def test_the_start_jumps_to_the_answer_as_often_as_asked_and_never_where_it_sees_the_solution():
    encode = PhraseEncoder(data.build_tokenizer())
    train = chains.items("train", 0, (2,), 8)
    texts = ["".join(encode_back(encode, row)) for row in data.Demonstrations(encode, train, hinted=0.5, direct=0.25).rows]
    wanted = [chains.answer(chain, i < 2) for i, chain in enumerate(train)] + [chains.answer(chain) for chain in train[:4]]
    assert [text.split(chains.ASK)[1] for text in texts] == [f"{text}<eos>" for text in wanted]
    assert sum(chains.HINT in text for text in texts) == 4


def encode_back(encode, row):
    pieces = {number: piece for piece, number in encode.ids.items()}
    return [pieces[number] for number in row[0]]


def test_training_tasks_use_every_chain_before_one_comes_again():
    train = chains.items("train", 0, (2,), 5)
    seven = data.training_tasks(train, 3, 0, 7)
    assert seven[:4] == data.training_tasks(train, 3, 0, 4)
    assert {json.dumps(task) for task in seven[:5]} == {json.dumps(data.task(chain)) for chain in train}
    assert seven[5:] == seven[:2]


# Measures ------------------------------------------------------------------------------------------------------------


def episode(kind, success, tokens=3, reward=0.0):
    info = {"class": kind, "success": success, "lucky": success and kind != "right", "reason": ""}
    return Episode([1] * (2 + tokens), [0, 0] + [1] * tokens, [0.0] * (2 + tokens), [-1, -1] + [0] * tokens, 2, {}, 0,
                   reward=reward, success=success, infos=[info], texts=[""])  # fmt: skip


def test_metrics_of_episodes():
    found = episode_metrics([episode("right", True), episode("arithmetic", True, 5), episode("arithmetic", False)])
    assert episode_metrics([episode("no_steps", True), episode("right", True)])["direct"] == [1.0, 0.0]
    assert found["success"] == [1.0, 1.0, 0.0] and found["lucky"] == [0.0, 1.0, 0.0] and found["length"] == [3.0, 5.0, 3.0]
    assert found["failure/arithmetic"] == [0.0, 0.0, 1.0] and found["failure/misread"] == [0.0, 0.0, 0.0]


LABELS = {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "grpo", "seed": 100}


def evaluator(tmp_path, **parts):
    settings = compose(NUMBER, Settings, ["scale=smoke"])
    log = RunLog(tmp_path, LABELS, quiet=True)
    made = Evaluator(settings, None, SimpleNamespace(pad_token_id=0), log, 100)
    for name, part in parts.items():
        setattr(made, name, part)
    return made, log


def records_of(log, tmp_path):
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    return {(row["split"], row["metric"]): row for row in rows}


def test_groups_without_spread_early_and_late(tmp_path):
    made, log = evaluator(tmp_path)
    for step, share in enumerate([0.1, 0.3, 0.5, 0.5, 0.5, 0.5, 0.7, 0.9], start=1):
        log.metrics(step, {"reward/zero_std_frac": share})
    made.group_records(tmp_path)
    rows = records_of(log, tmp_path)
    values = {metric: round(rows["train", metric]["value"], 6) for metric in ("zero_early", "zero_late", "zero_all")}
    assert values == {"zero_early": 0.2, "zero_late": 0.8, "zero_all": 0.5}


def test_best_of_n_takes_the_verifiers_pick_and_the_reward_models(tmp_path):
    groups = [episode("misread", False), episode("right", True), episode("misread", False), episode("misread", False)]
    made, log = evaluator(
        tmp_path,
        play=lambda model, split, count: groups,
        proxies=lambda episodes: [5.0, 1.0, 2.0, 3.0],
        keep_rollouts=lambda split, episodes: None,
        scorer=object(),
    )
    made.best_of(None, 2)
    rows = records_of(log, tmp_path)
    assert rows["id", "success"]["items"] == [1, 0] and rows["id", "success"]["value"] == 0.5
    assert rows["id", "success_proxy"]["value"] == 0.0 and rows["id", "proxy"]["value"] == 4.0
    assert rows["id", "length"]["value"] == 6.0  # both answers to a chain are paid for


def test_steps_end_behind_a_separator_and_the_final_number_is_a_step_of_its_own():
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    right, wrong = chains.answer(CHAIN), "37+25=62; 62-13=49; 49*2=97. Answer: 97"
    episodes = []
    for text, reward in ((right, 1.0), (wrong, 0.0)):
        ids, mask = encode.row(chains.prompt(CHAIN), text)
        episodes.append(Episode(ids, mask, [0.0] * len(ids), [0 if own else -1 for own in mask], mask.index(1), {}, 0,
                                reward=reward, success=reward > 0, infos=[{}], texts=[text]))  # fmt: skip
    ends = frozenset(tokenizer.convert_tokens_to_ids([chains.NEXT, chains.ANSWER]))
    (pair,) = step_pairs(episodes, per_prompt=3, separators=ends)
    written = [tokenizer.decode([i for i, own in zip(ids, mask) if own]) for ids, mask in pair]
    assert written == ["49*2=98. Answer: ", "49*2=97. Answer: "]


# Arms on answers of which some are right -----------------------------------------------------------------------------


def answered(settings, model, tokenizer, tasks, each, *stream):
    """In the start's place: a right answer to every task and one whose last result is off by one."""
    encode, episodes = PhraseEncoder(tokenizer), []
    for group, options in enumerate(tasks):
        chain = data.chain_of(options)
        steps, last = chains.trace(chain).rsplit("=", 1)[0], (chain.results[-1] + 1) % 100
        for text in (chains.answer(chain), f"{steps}={last}{chains.ANSWER}{last}"):
            ids, mask = encode.row(chains.prompt(chain), text)
            found = grade(text, chain)
            episodes.append(Episode(ids, mask, [0.0] * len(ids), [0 if own else -1 for own in mask], mask.index(1), options,
                                    group, reward=float(found.success), success=found.success, infos=[{}], texts=[text],
                                    tokens_forward=len(ids)))  # fmt: skip
    return episodes


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Settings, model, tokenizer and a folder for arms that learn from `answered`."""
    monkeypatch.setattr(stages, "sample_answers", answered)
    tiny = ["model.hidden=16", "model.layers=1", "model.feedforward=32"]
    steps = [f"branches.{arm}.changes={{prompts_per_step: 8}}" for arm in ("dpo", "step_dpo", "kto")]
    changes = [
        "reward_model.steps=40",
        "reward_model.training.batch_size=8",
        "reward_model.training.lr=1e-2",
        "branch_flops=2e9",
    ]
    settings = compose(NUMBER, Settings, ["scale=smoke", f"runs_dir={tmp_path}", *tiny, *steps, *changes])
    tokenizer = data.build_tokenizer()
    numbers = number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)
    return settings, build_decoder(settings.model, tokenizer, 0, numbers), tokenizer, tmp_path


@pytest.mark.parametrize("name", ["dpo", "step_dpo", "kto"])
def test_preference_arms_train_on_their_examples_and_pay_for_the_samples(small, name):
    settings, model, tokenizer, folder = small
    log = RunLog(folder / "cell", {**LABELS, "arm": name}, quiet=True)
    quiet = SimpleNamespace(curve=lambda model, percent: None)
    arm = arms.Arm(name, settings, model, tokenizer, 100, folder / "cell", log, quiet, {})
    meter = arms.train(arm)
    log.close()
    rows = [json.loads(line) for line in (folder / "cell" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 3 and rows[-1]["preference/margin"] > rows[0]["preference/margin"] - 1e-6
    assert meter.tokens_trained > 0 and settings.branch_flops <= meter.flops < 1.5 * settings.branch_flops


def test_the_reward_model_learns_its_pairs_and_its_cost_is_known(small):
    settings, model, tokenizer, folder = small
    save_model(model, tokenizer, folder / "start" / "model")
    built = stages.reward_stage(settings, folder / "start", 100)
    meter, accuracy = stages.reward_facts(built, 1000)
    assert accuracy["train"] == {"n": 12, "value": accuracy["train"]["value"]} and accuracy["train"]["value"] > 0.8
    assert meter.tokens_forward == sum(e.tokens_forward for e in answered(settings, None, tokenizer, [
        data.task(chain) for chain in stages.train_chains(settings, 100)[:12]], 2))  # fmt: skip
    assert meter.tokens_trained > 0 and stages.load_reward_model(built).config.num_labels == 1


# Configuration -------------------------------------------------------------------------------------------------------


def test_every_method_has_an_arm_and_every_arm_a_label_and_a_row():
    settings = compose(NUMBER, Settings, [])
    assert {branch.method for branch in settings.branches.values()} == set(METHODS) == set(arms.METHODS)
    assert set(settings.branches) <= set(figures.LABELS)
    assert {name for name in settings.branches if name != "start"} <= set(figures.NEEDS)
    rows = {row.variant for row in figures.CLAIMS.table if row.metric == "success" and row.split == "ood"}
    assert set(settings.branches) <= rows


def test_methods_that_sample_while_training_sample_the_same_number_per_step():
    settings = compose(NUMBER, Settings, [])
    for name, branch in settings.branches.items():
        config = settings.arm_config(name)
        if branch.method in ("policy_gradient", "rlhf", "online_dpo", "distill", "self_distill"):
            assert config.prompts_per_step * config.group_size == settings.episodes_per_step, name
            assert config.max_new_tokens == settings.max_new_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("branches.grpo.method=rl", "branches.grpo.method=rl: allowed are none, sft"),
        ("branches.grpo.algo=dpo", "branches.grpo.algo=dpo: does not fit method=policy_gradient"),
        ("branches.dft.changes.variant=dtf", "sft.variant=dtf: allowed are nll, dft"),
        ("branches.opsd.changes.objective=jds", "distill.objective=jds"),
        ("branches.best_of_2.changes.samples=0", "best_of.samples=0: must be at least 1"),
        ("branches.start.changes={lr: 1}", "branches.start.changes.lr=1: unknown key"),
        ("teacher.model.hidden=97", "teacher.model.hidden=97"),
        ("preference.prompts=900", "preference.prompts=900: must be at least 1 and at most 400"),
        ("branch_flops=0", "branch_flops=0.0: must be above 0"),
        ("arms=[grop]", "arms=grop: allowed are"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(change, message):
    with pytest.raises(ConfigError) as error:
        compose(NUMBER, Settings, [change])
    assert message in str(error.value)


# Tuning and tables ---------------------------------------------------------------------------------------------------


def test_the_try_to_take():
    def row(lr, success, kl, arm="sft", proxy=None):
        return {"arm": arm, "lr": lr, "id": success, "ood": success, "kl": kl, "proxy": proxy}

    assert tune.best([row(1, 0.50, 3.0), row(2, 0.52, 9.0), row(3, 0.516, 5.0)])["lr"] == 3
    assert tune.best([row(1, 0.9, 1.0, "rlhf", 2.0), row(2, 0.1, 9.0, "rlhf", 5.0)])["lr"] == 2


def test_the_readmes_table_of_tries_is_the_record_of_tries_and_all_arms_had_the_same_number():
    tries = read_json_lines(tune.TUNING.file)
    block = (tune.TUNING.folder / "README.md").read_text().split(tuning.BLOCK[0])[1].split(tuning.BLOCK[1])[0].strip()
    assert block == tuning.tuning_table(tune.TUNING, tries)
    counts = {arm: sum(row["arm"] == arm for row in tries) for arm in {row["arm"] for row in tries} - {"start"}}
    assert set(counts.values()) <= {3} and all(row["seed"] < 100 for row in tries)


def test_the_rates_of_the_arms_are_the_ones_that_were_taken():
    settings = compose(NUMBER, Settings, [])
    tries = read_json_lines(tune.TUNING.file)
    for arm in {row["arm"] for row in tries} - {"start"}:
        assert settings.branches[arm].lr == tune.best([row for row in tries if row["arm"] == arm])["lr"], arm


def test_the_comparison_table_means_over_seeds_and_costs():
    row = {"metric": "success", "n": 2, "step": 100, "final": True, "arm": "grpo"}
    values = {("id", 100): 0.4, ("id", 101): 0.6, ("ood", 100): 0.2, ("ood", 101): 0.2}
    records = [{**row, "split": split, "seed": seed, "value": v, "items": [v, v]} for (split, seed), v in values.items()]
    cost = {"arm": "grpo", "flops": 2e11, "tokens_forward": 500_000, "tokens_trained": 1_000_000}
    provenance = {"cells": [{**cost, "seed": 100, "cpu_s": 10.0}, {**cost, "seed": 101, "cpu_s": 14.0}]}
    (line,) = figures.comparison(records, provenance).rows
    assert line[0] == "GRPO" and line[1].startswith("50.0 % [") and line[2].startswith("20.0 % [")
    assert line[3:] == ["", "0.200", "0.50", "1.00", "12", "verifier"]
