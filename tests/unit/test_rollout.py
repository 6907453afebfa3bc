"""The sampler against transformers.generate and against full forward passes, on both of its decoders."""

import math

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from common import decoding, rollout
from common.episodes import token_logprobs
from common.rollout import sample
from common.tokenizers import build_phrase_tokenizer

VOCABULARY = 90
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = [[5, 6, 7, 8, 9], [20], [30, 31, 32, 33, 34, 35, 36, 37, 38], [5, 6, 7, 8, 9], [40, 41]]


def sharpened(model):
    """Random weights made larger, so that the next token is far from a coin toss, and norms that are not all one."""
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.35, generator=stream)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=stream))
    return model.eval()


def build(kind):
    if kind == "gpt2":
        return sharpened(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4)))
    if kind == "llama":
        return sharpened(LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False)))
    config = Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    model = sharpened(Qwen3ForCausalLM(config))
    if kind == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.fixture(scope="module", params=["qwen3", "qwen3-own-forward", "llama", "lora", "gpt2"])
def model(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "qwen3-own-forward":
            patch.setattr(decoding, "can_fuse", lambda model: False)
        yield build(request.param.split("-")[0])


def network(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def full_logps(model, prompt, completion, temperature=1.0):
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + completion])).logits[0].float() / temperature
    logp_TV = torch.log_softmax(logits_TV, -1)
    return [logp_TV[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]


def generated(model, prompts, stop_ids, limit):
    """transformers.generate on the left-padded batch; each row cut behind its first stop id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    rows = model.generate(
        input_ids=ids,
        attention_mask=attention,
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def test_which_models_are_fused():
    assert {kind: decoding.can_fuse(network(build(kind))) for kind in ("qwen3", "llama", "lora", "gpt2")} == {
        "qwen3": True,
        "llama": True,
        "lora": True,
        "gpt2": False,
    }


def test_greedy_is_generate_for_ragged_prompts(model):
    plain = sample(model, PROMPTS, max_new_tokens=24, stop_ids=[], temperature=0)
    stops = sorted({completion.ids[5] for completion in plain})[:2]
    completions = sample(model, PROMPTS, max_new_tokens=24, stop_ids=stops, temperature=0)
    assert [c.ids for c in completions] == generated(model, PROMPTS, stops, 24)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.logps == pytest.approx(full_logps(model, prompt, completion.ids), abs=1e-4)
        assert completion.finished == (completion.ids[-1] in stops)
    assert {c.finished for c in completions} == {True, False}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_l15_sampled_logps_are_those_of_the_trainer(model, temperature):
    completions = sample(
        model, PROMPTS, group_size=3, max_new_tokens=12, stop_ids=[2], temperature=temperature, generator=stream()
    )
    assert len(completions) == 3 * len(PROMPTS)
    for row, completion in enumerate(completions):
        prompt = PROMPTS[row // 3]
        assert completion.logps == pytest.approx(full_logps(model, prompt, completion.ids, temperature), abs=1e-4)
        ids_BT = torch.tensor([prompt + completion.ids])
        with torch.no_grad():
            logp_BT, _ = token_logprobs(model, ids_BT, torch.ones_like(ids_BT), temperature)
        ratio = (logp_BT[0, len(prompt) :] - torch.tensor(completion.logps)).exp()
        assert ratio.numpy() == pytest.approx(1.0, abs=1e-4)


def test_l15_temperature_divides_logits():
    rule = rollout._Rule(0.6, 1.0, 0, torch.tensor([]), (), None)
    tokens_B, logp_B = rollout.choose(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0]), rule)
    assert tokens_B.tolist() == [0]
    assert logp_B.item() == pytest.approx(-0.2025731, abs=1e-6)


def test_groups_share_their_prefill(model, monkeypatch):
    seen = []
    make = rollout.make_decoder
    monkeypatch.setattr(rollout, "make_decoder", lambda m, prompts, *rest: seen.append(prompts) or make(m, prompts, *rest))
    completions = sample(model, PROMPTS, group_size=4, max_new_tokens=6, stop_ids=[], temperature=0)
    assert seen == [[(5, 6, 7, 8, 9), (20,), tuple(range(30, 39)), (40, 41)]]
    alone = sample(model, PROMPTS, max_new_tokens=6, stop_ids=[], temperature=0)
    assert [c.ids for c in completions] == [c.ids for c in alone for _ in range(4)]


def test_a_later_turn_computes_only_the_tokens_behind(model, monkeypatch):
    """Three turns whose rows differ in length, some dropped and some equal: the same tokens as without what is kept."""
    kept, rows = rollout.Prefilled(), [list(prompt) for prompt in PROMPTS]
    computed = []
    embed = nn.functional.embedding
    monkeypatch.setattr(nn.functional, "embedding", lambda ids, *a, **k: computed.append(ids.numel()) or embed(ids, *a, **k))
    for turn in range(3):
        settings = {"group_size": 2 if turn == 0 else 1, "max_new_tokens": 5, "stop_ids": [2], "temperature": 1.0}
        fresh = sample(model, rows, generator=stream(turn), **settings)
        computed.clear()
        completions = sample(model, rows, generator=stream(turn), prefilled=kept, **settings)
        prefill = computed[0]
        assert [c.ids for c in completions] == [c.ids for c in fresh]
        for row, (one, other) in enumerate(zip(completions, fresh, strict=True)):
            prompt = rows[row // settings["group_size"]]
            assert one.logps == pytest.approx(other.logps, abs=1e-4)
            assert one.logps == pytest.approx(full_logps(model, prompt, one.ids), abs=1e-4)
        if turn:  # five tokens of answer and up to three of reply in each row
            assert prefill <= 8 * len(rows)
        group = settings["group_size"]
        rows = [[*rows[i // group], *c.ids, *range(50, 51 + i % 3)] for i, c in enumerate(completions) if i % 4 != turn + 1]


def test_rows_that_go_on_from_nothing_are_computed_whole(model):
    kept = rollout.Prefilled()
    sample(model, [[5, 6, 7], [5, 6]], max_new_tokens=3, stop_ids=[], temperature=0, prefilled=kept)
    for rows in ([[5, 6, 7]], [[5, 6, 7, 9], [8, 5, 6]]):  # equal to an earlier prompt; one without a parent
        alone = sample(model, rows, max_new_tokens=3, stop_ids=[], temperature=0)
        again = sample(model, rows, max_new_tokens=3, stop_ids=[], temperature=0, prefilled=kept)
        assert [c.ids for c in again] == [c.ids for c in alone]


def test_parents_are_the_longest_true_prefixes():
    earlier = [(1, 2), (1, 2, 3), (4,)]
    assert decoding.find_parents(earlier, [(1, 2, 3, 9), (1, 2, 5), (4, 4), (1, 2, 3)]) == [1, 0, 2, 0]
    assert decoding.find_parents(earlier, [(1, 2, 3, 9), (5, 1, 2)]) is None


def test_same_generator_state_same_completions(model):
    first, second, other = (
        sample(model, PROMPTS, group_size=2, max_new_tokens=10, stop_ids=[2], generator=stream(seed)) for seed in (3, 3, 4)
    )
    assert first == second
    assert [c.ids for c in first] != [c.ids for c in other]


def test_dropping_finished_rows_changes_no_other_row(model):
    whole = sample(model, PROMPTS, group_size=6, max_new_tokens=20, stop_ids=[], generator=stream())
    stops = set(range(0, VOCABULARY, 9))
    cut = sample(model, PROMPTS, group_size=6, max_new_tokens=20, stop_ids=sorted(stops), generator=stream())
    ends = []
    for long, short in zip(whole, cut, strict=True):
        end = next((i + 1 for i, token in enumerate(long.ids) if token in stops), 20)
        ends.append(end)
        assert short.ids == long.ids[:end]
        assert short.logps == pytest.approx(long.logps[:end], abs=1e-5)
        assert short.finished == (long.ids[end - 1] in stops)
    assert len(set(ends)) > 5


def test_e04_greedy_does_not_depend_on_the_batch(model):
    prompts = [[10 + i, 3, 50 - i] for i in range(8)]
    whole = [c.ids for c in sample(model, prompts, max_new_tokens=15, stop_ids=[2], temperature=0)]
    for size in (1, 3):
        parts = [
            sample(model, prompts[i : i + size], max_new_tokens=15, stop_ids=[2], temperature=0) for i in range(0, 8, size)
        ]
        assert [c.ids for part in parts for c in part] == whole


def test_t10_other_prompts_do_not_shift_positions(model):
    """A prompt beside one that is 0..16 tokens longer samples what it samples alone."""
    prompt = [11, 12, 13]
    alone = sample(model, [prompt], max_new_tokens=8, stop_ids=[], generator=stream())[0]
    for extra in range(0, 17, 4):
        beside = sample(model, [prompt, [14] * (3 + extra)], max_new_tokens=8, stop_ids=[], generator=stream())[0]
        assert beside.ids == alone.ids
        assert beside.logps == pytest.approx(alone.logps, abs=1e-4)


def test_d08_rows_and_calls_have_their_own_random_numbers(model):
    generator = stream()
    calls = [sample(model, [PROMPTS[0]], group_size=4, max_new_tokens=12, stop_ids=[], generator=generator) for _ in range(2)]
    rows = {tuple(c.ids) for call in calls for c in call}
    assert len(rows) == 8


def test_lora_switched_off_is_the_base_model():
    model, base = build("lora"), build("qwen3")
    on = sample(model, PROMPTS, max_new_tokens=12, stop_ids=[], temperature=0)
    with model.disable_adapter():
        off = sample(model, PROMPTS, max_new_tokens=12, stop_ids=[], temperature=0)
    plain = sample(base, PROMPTS, max_new_tokens=12, stop_ids=[], temperature=0)
    assert [c.ids for c in off] == [c.ids for c in plain]
    assert [c.ids for c in on] != [c.ids for c in plain]


def test_model_is_left_in_training_mode_and_samples_without_dropout():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.9))
    model.train()
    first, second = (sample(model, PROMPTS, max_new_tokens=8, stop_ids=[], temperature=0) for _ in range(2))
    assert model.training
    assert first == second


class SuccessorModel(nn.Module):
    """Puts probability .9 on (t + 1) mod V; its hidden state is the one-hot token."""

    V = 10

    def __init__(self):
        super().__init__()
        weight = torch.full((self.V, self.V), math.log(0.1 / (self.V - 1)))
        weight[(torch.arange(self.V) + 1) % self.V, torch.arange(self.V)] = math.log(0.9)
        self.head = nn.Linear(self.V, self.V, bias=False)
        self.head.weight = nn.Parameter(weight)
        self.config = Qwen3Config(num_hidden_layers=1, sliding_window=None)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_output_embeddings(self):
        return self.head

    def base_model(self, input_ids, **kwargs):
        hidden = nn.functional.one_hot(input_ids, self.V).float()
        return type("Output", (), {"last_hidden_state": hidden})

    def forward(self, input_ids, past_key_values, logits_to_keep=0, **kwargs):
        past_key_values.update(*[torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)] * 2, 0)
        logits = self.head(self.base_model(input_ids).last_hidden_state)
        return type("Output", (), {"logits": logits if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]})


def test_l17_logits_and_labels_align_index_by_index():
    model = SuccessorModel()
    completion = sample(model, [[3, 4]], max_new_tokens=2, stop_ids=[], temperature=0)[0]
    assert completion.ids == [5, 6]
    assert completion.logps == pytest.approx([math.log(0.9)] * 2)
    ids_BT = torch.tensor([[3, 4, 5, 6]])
    logp_BT, entropy_BT = token_logprobs(model, ids_BT, torch.ones_like(ids_BT), with_entropy=True)
    assert logp_BT.tolist()[0] == pytest.approx([0.0] + [math.log(0.9)] * 3)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 9)
    assert entropy_BT.tolist()[0] == pytest.approx([0.0] + [entropy] * 3)


def test_draws_follow_the_probabilities():
    """Evenly spaced uniform numbers give each token its share exactly."""
    shares = torch.tensor([0.1, 0.0, 0.25, 0.65])
    rule = rollout._Rule(1.0, 1.0, 0, torch.tensor([]), (), None)
    uniform_B = (torch.arange(1000) + 0.5) / 1000
    tokens_B, logp_B = rollout.choose(shares.log().clamp(min=-1e9).expand(1000, 4), uniform_B, rule)
    assert tokens_B.bincount(minlength=4).tolist() == [100, 0, 250, 650]
    assert logp_B.exp().unique().tolist() == pytest.approx([0.1, 0.25, 0.65])


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.8, 0, [0.5, 0.0, 0.3]),
        (0.81, 0, [0.5, 0.2, 0.3]),
        (0.5, 0, [0.5, 0, 0]),
        (1.0, 2, [0.5, 0.0, 0.3]),
        (0.6, 2, [0.5, 0, 0]),
    ],
)
def test_top_p_and_top_k(top_p, top_k, kept):
    assert rollout.truncate(torch.tensor([[0.5, 0.2, 0.3]]), top_p, top_k).tolist()[0] == pytest.approx(kept)


def test_l16_reported_logps_are_of_the_full_support():
    rule = rollout._Rule(1.0, 0.8, 0, torch.tensor([]), (), None)
    logits_BV = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 3)
    tokens_B, logp_B = rollout.choose(logits_BV, (torch.arange(1000) + 0.5) / 1000, rule)
    assert tokens_B.bincount(minlength=3).tolist() == [625, 375, 0]
    assert logp_B[0].item() == pytest.approx(math.log(0.5))


def test_stop_strings_end_a_row_where_their_text_is_complete():
    tokenizer = build_phrase_tokenizer([f"<{i}>" for i in range(SuccessorModel.V - 4)])
    completions = sample(
        SuccessorModel(),
        [[4], [8]],
        max_new_tokens=7,
        stop_ids=[],
        temperature=0,
        stop_strings=["2><3>"],
        tokenizer=tokenizer,
    )
    assert [c.ids for c in completions] == [[5, 6, 7], [9, 0, 1, 2, 3, 4, 5]]
    assert [c.finished for c in completions] == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"group_size": 0}, "group_size=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0}, "needs a torch.Generator"),
        ({"stop_strings": ["x"]}, "stop_strings need the tokenizer"),
    ],
)
def test_bad_requests_are_refused(changes, message):
    request = {"prompts": [[1]], "max_new_tokens": 1, "stop_ids": [], "temperature": 0} | changes
    with pytest.raises(ValueError, match=message):
        sample(SuccessorModel(), request.pop("prompts"), **request)


def test_a_sliding_window_shorter_than_the_row_is_refused():
    config = Qwen3Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    with pytest.raises(ValueError, match="sliding window is 8"):
        sample(Qwen3ForCausalLM(config), [[1, 2, 3]], max_new_tokens=8, stop_ids=[], temperature=0)


def test_no_prompts_no_completions():
    assert sample(SuccessorModel(), [], max_new_tokens=1, stop_ids=[], temperature=0) == []
