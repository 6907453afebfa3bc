"""The first token decides the mode: the template's check, forced openings and their probabilities, presampled rates."""

import math

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common.checkpoints import save_model
from common.models import DecoderConfig, build_decoder
from common.modes import draw_openings, end_think_id, first_logprobs, play_modes, prompts_of, skips
from common.presample import presampled, read_rates, solve_rates
from common.schema import ConfigError
from common.seeding import generator
from common.tokenizers import CHAT_TEMPLATE, build_phrase_tokenizer

WORDS = [f"w{i}" for i in range(6)]
R1_TEMPLATE = (
    "{{bos_token}}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{m.content}}{% else %}<｜Assistant｜>{{m.content}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


def tokenizer_with(template, words=("<think>", "</think>")):
    tokenizer = build_phrase_tokenizer([*WORDS, "?", *words])
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = tokenizer_with(CHAT_TEMPLATE + "<think>")
END = end_think_id(TOKENIZER)


def build_model():
    return build_decoder(DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=32), TOKENIZER, 0)


class Words(gymnasium.Env):
    observation_space = action_space = Text(64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = WORDS[options["word"]]
        return f"{self.word}?" * options.get("times", 1), {}

    def step(self, action):
        return "", 1.0, True, False, {"success": action.startswith("</think>") == (self.word == "w0"), "reason": "mode"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "must end a prompt"),
        (CHAT_TEMPLATE, "must end a prompt"),
        (CHAT_TEMPLATE + "<think></think>", "must end a prompt"),
        (CHAT_TEMPLATE + "<think>\n\n</think>\n\n", "must end a prompt"),
        (CHAT_TEMPLATE + "<think> Alright,", "must end a prompt"),
        ("<think>" + CHAT_TEMPLATE, "must end a prompt"),
        ("{{ bos_token }}<think>", "drops the user's text"),
    ],
)
def test_a_template_that_splits_the_modes_elsewhere_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        end_think_id(tokenizer_with(template))


def test_templates_that_end_inside_the_thinking_pass():
    assert end_think_id(tokenizer_with(R1_TEMPLATE)) == TOKENIZER.convert_tokens_to_ids("</think>")


def test_an_end_tag_of_several_tokens_is_refused():
    with pytest.raises(ConfigError, match="one"):
        end_think_id(tokenizer_with(CHAT_TEMPLATE + "<think>", words=("<think>", "</", "think>")))
    with pytest.raises(ConfigError, match="one"):
        end_think_id(tokenizer_with(CHAT_TEMPLATE + "<think>", words=("<think>",)))


def test_first_probabilities_equal_the_models_own_forward():
    model, prompts = build_model(), [[1, 4, 5], [1, 6, 7, 8, 9], [1, 4]]
    found = first_logprobs(model, prompts, temperature=0.5)
    for row, prompt in zip(found, prompts, strict=True):
        logits = model(torch.tensor([prompt])).logits[0, -1] / 0.5
        torch.testing.assert_close(row, logits.log_softmax(-1), rtol=1e-4, atol=1e-5)


def test_forced_tokens_and_the_probability_of_the_rule_that_drew_them():
    logp = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.25, 0.75]]).log()
    modes = ["nothink", "think", "think", "nothink"]
    found = draw_openings(logp, 0, modes, generator(1, "x"))
    assert found.nothink_P.tolist() == pytest.approx([0.7, 0.0])
    within = {0: {1: 2 / 3, 2: 1 / 3}, 1: {1: 0.25, 2: 0.75}}
    for index, ((token,), old) in enumerate(zip(found.tokens, found.old_logps, strict=True)):
        prompt, mode = index // 4, modes[index % 4]
        assert (token == 0) == (mode == "nothink")
        assert old == pytest.approx(math.log(0.5 * (1.0 if token == 0 else within[prompt][token])), abs=1e-5)


def test_draws_follow_the_distribution_of_their_mode():
    logp = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for mode, wanted in (("think", [0, 0.6, 0.4]), ("free", [0.5, 0.3, 0.2])):
        found = draw_openings(logp, 0, [mode] * 20000, generator(2, mode))
        shares = torch.bincount(torch.tensor(found.tokens).flatten(), minlength=3) / 20000
        torch.testing.assert_close(shares, torch.tensor(wanted), atol=0.02, rtol=0)
    assert draw_openings(logp, 0, ["free"], generator(3)).old_logps[0] == pytest.approx(
        float(logp[0, draw_openings(logp, 0, ["free"], generator(3)).tokens[0][0]])
    )


def test_episodes_carry_mode_and_first_probability():
    tasks = [{"word": 1}, {"word": 2, "times": 3}]
    model = build_model()
    episodes, nothink = play_modes(
        model, TOKENIZER, Words, tasks, ["nothink", "think"], end=END, generator=generator(0, "play"), max_new_tokens=5
    )
    assert [skips(e, END) for e in episodes] == [True, False, True, False]
    assert [e.logps[e.prompt_length] == pytest.approx(math.log(0.5)) for e in episodes[::2]] == [True, True]
    exact = first_logprobs(model, prompts_of(TOKENIZER, Words, tasks))
    torch.testing.assert_close(nothink, exact[:, END].exp())
    thinking = episodes[1]
    share = exact[0, thinking.ids[thinking.prompt_length]].exp() / (1 - nothink[0])
    assert thinking.logps[thinking.prompt_length] == pytest.approx(math.log(0.5 * float(share)), abs=1e-4)
    assert all(len(e.ids) - e.prompt_length <= 5 for e in episodes)


def test_rates_of_a_forced_mode():
    tasks = [{"word": 0}, {"word": 1}]
    found = solve_rates(build_model(), TOKENIZER, Words, tasks, 6, seed=0, max_new_tokens=4, mode="nothink")
    assert (found["rates"], found["samples"]) == ([1.0, 0.0], 6)
    assert solve_rates(build_model(), TOKENIZER, Words, tasks, 6, seed=0, max_new_tokens=4, mode="think")["rates"] == [0.0, 1.0]
    free = solve_rates(build_model(), TOKENIZER, Words, tasks, 6, seed=0, max_new_tokens=4)
    assert free["tokens_forward"] > 0 and free["rates"][1] > 0


def test_presampling_is_a_stage_that_is_built_once(tmp_path):
    start = tmp_path / "start"
    save_model(build_model(), TOKENIZER, start / "model")
    places = {"seed": 0, "modules": ["common.modes"], "runs_dir": tmp_path, "max_new_tokens": 4, "mode": "nothink"}
    folder = presampled("rates", start, Words, [{"word": 0}], 4, **places)
    assert read_rates(folder)["rates"] == [1.0]
    assert presampled("rates", start, Words, [{"word": 0}], 4, **places) == folder
    assert presampled("rates", start, Words, [{"word": 1}], 4, **places) != folder
