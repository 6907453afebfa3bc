"""Policies that see: sampling, scoring, masks and gradients against the model's own forward, compute, a model that learns."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from common import fused, vision
from common.checkpoints import load_model, save_model
from common.compute import Budget, Meter
from common.config import load_algo
from common.episodes import collate, run_episodes, token_logprobs
from common.fused import states_before
from common.grpo import train_grpo
from common.models import DecoderConfig, build_decoder, parameter_count
from common.policy import images_to_encode, micro_batches, score_tokens, select
from common.ppo import train_ppo
from common.rollout import sample
from common.runlog import RunLog
from common.seeding import generator, python_random
from common.sft import SftConfig, pad_rows, train_sft
from common.tokenizers import build_phrase_tokenizer
from common.vision import IMAGE, VisionConfig, add_eyes, embed, expand, freeze_encoder, image_tokens, meter_for, stack

COLOURS = {"red ": (220, 20, 20), "green ": (20, 160, 20), "blue ": (30, 30, 220)}
TOKENIZER = build_phrase_tokenizer([*COLOURS, "what colour? ", "say more. ", IMAGE])
TOKEN = TOKENIZER.convert_tokens_to_ids(IMAGE)
EYES = VisionConfig(image_size=8, patch_size=4, hidden=16, layers=2, heads=2, feedforward=24)


def picture(colour, shade=1.0):
    return np.full((8, 8, 3), np.array(COLOURS[colour]) * shade, np.uint8)


@functools.cache
def shared_model():
    return new_model().eval()


def new_model(seed=0):
    decoder = build_decoder(DecoderConfig(hidden=24, layers=2, heads=2, kv_heads=1, feedforward=32), TOKENIZER, seed)
    return add_eyes(decoder, EYES, TOKEN, seed)


class Colour(gymnasium.Env):
    """Shows a colour; right if the answer begins with its name. A wrong answer may be followed by a second trial."""

    def __init__(self, rounds=1):
        self.rounds, self.trial = rounds, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.colour, self.trial = options["colour"], 0
        self.image = picture(self.colour, options.get("shade", 1.0))
        return {"text": f"what colour? {IMAGE}{'what colour? ' * options.get('longer', 0)}", "image": self.image}, {}

    def step(self, action):
        self.trial += 1
        self.image[:] = 0  # an environment may paint over its own buffer
        success = action.startswith(self.colour)
        info = {"success": success, "reason": "", "parts": {}}
        return {"text": "say more. ", "image": self.image}, float(success), success or self.trial >= self.rounds, False, info


TASKS = [{"colour": "red "}, {"colour": "blue ", "longer": 1}, {"colour": "red ", "shade": 0.5}, {"colour": "green "}]


def play(model, tasks=TASKS, rounds=1, **changes):
    settings = {"max_new_tokens": 4, "generator": generator(1, "play"), "group_size": 2, "max_turns": rounds, **changes}
    return run_episodes(model, TOKENIZER, lambda: Colour(rounds), tasks, **settings)


def own_forward(model, episode, temperature=1.0):
    """log-probabilities of the episode's tokens by the model's own forward of ids and pixels, nothing shared."""
    pixels = torch.from_numpy(episode.image).permute(2, 0, 1)[None].float() / 127.5 - 1
    ids = torch.tensor([episode.ids])
    if episode.ids.count(TOKEN) == 4:
        logits = model(input_ids=ids, pixel_values=pixels).logits[0, :-1] / temperature
    else:  # the policy wrote an image token, which the model's own forward refuses
        embeds = model.get_input_embeddings()(ids)
        seen = model.model.get_image_features(pixel_values=pixels).pooler_output[0]
        first = episode.ids.index(TOKEN)
        embeds = torch.cat([embeds[:, :first], seen[None], embeds[:, first + 4 :]], 1)
        logits = model(inputs_embeds=embeds).logits[0, :-1] / temperature
    logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(episode.ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logp])


@pytest.mark.parametrize(("rounds", "temperature"), [(1, 1.0), (1, 0.7), (2, 1.0)])
def test_what_the_sampler_reports_is_what_a_full_forward_says(rounds, temperature):
    model = shared_model()
    episodes = play(model, rounds=rounds, temperature=temperature)
    assert len({len(e.ids) for e in episodes}) > 1  # padding is at work
    for episode in episodes:
        mask = torch.tensor(episode.mask).bool()
        with torch.no_grad():
            full = own_forward(model, episode, temperature)
        torch.testing.assert_close(torch.tensor(episode.logps)[mask], full[mask], atol=2e-5, rtol=0)
        assert episode.ids[: episode.prompt_length].count(TOKEN) == image_tokens(model) == EYES.tokens == 4
    assert any(e.ids.count(TOKEN) == 4 for e in episodes)


@pytest.mark.parametrize("fuse", [True, False])
def test_scoring_a_padded_batch_equals_full_forwards_and_so_do_the_gradients(monkeypatch, fuse):
    model = new_model().eval()
    if not fuse:
        monkeypatch.setattr(fused, "can_fuse", lambda model: False)
    episodes = play(model)
    batch = collate(episodes, TOKENIZER.pad_token_id)
    assert len(batch.images.pixels_ICHW) == 4 and len(episodes) == 8
    out = score_tokens(model, batch, 0.8)
    weights = torch.linspace(-1, 1, len(out.logp_N))
    (out.logp_N * weights).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    full = torch.cat([own_forward(model, e, 0.8)[torch.tensor(e.mask).bool()] for e in episodes])
    torch.testing.assert_close(out.logp_N, full, atol=2e-5, rtol=0)
    (full * weights).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4, rtol=1e-3)
    assert any("vision_tower" in name and ours[name].abs().max() > 0 for name in ours)
    logp_BT, _ = token_logprobs(model, batch.ids_BT, batch.attention_BT, 0.8, mask_BT=batch.mask_BT, images=batch.images)
    torch.testing.assert_close(logp_BT[batch.mask_BT], full, atol=2e-5, rtol=0)
    assert fused.can_fuse(model) is fuse  # the hooks that its encoder's forward leaves behind do not matter


def test_l01_a_row_learns_from_its_own_image_and_only_from_what_stands_behind_it():
    model = shared_model()
    batch = collate(play(model), TOKENIZER.pad_token_id)
    pixels = batch.images.pixels_ICHW.float().requires_grad_()
    images = vision.Images(pixels, batch.images.index_B)
    one_row = torch.zeros_like(batch.mask_BT)
    one_row[2] = batch.mask_BT[2]
    states_before(model, batch.ids_BT, one_row, images).sum().backward()
    touched = pixels.grad.abs().amax((1, 2, 3)) > 0
    assert touched.tolist() == [index == batch.images.index_B[2] for index in range(4)]
    pixels.grad = None
    before = torch.zeros_like(batch.mask_BT)
    before[:, 1] = True  # read at position 0, ahead of the image
    states_before(model, batch.ids_BT, before, images).sum().backward()
    assert not pixels.grad.any()
    with pytest.raises(ValueError, match="padded on the right"):
        token_logprobs(model, batch.ids_BT, batch.attention_BT.flip(1), images=batch.images)


def test_equal_tokens_with_other_images_are_other_prompts():
    model = shared_model()
    prompt = expand(TOKENIZER(f"what colour? {IMAGE}")["input_ids"], TOKEN, 4)
    settings = {"max_new_tokens": 1, "stop_ids": [], "temperature": 0.0}
    red, blue = picture("red "), picture("blue ")
    together = sample(model, [prompt] * 3, images=[red, blue, red], **settings)
    alone = [sample(model, [prompt], images=[image], **settings)[0] for image in (red, blue, red)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert [c.logps for c in together] == [pytest.approx(c.logps, abs=1e-5) for c in alone]
    assert together[0].logps == together[2].logps != together[1].logps


def test_a_rows_answer_does_not_depend_on_the_other_rows():
    model = shared_model()
    whole = play(model, group_size=1, temperature=0.0)
    for task, episode in zip(TASKS, whole, strict=True):
        (alone,) = play(model, [task], group_size=1, temperature=0.0)
        assert alone.ids == episode.ids


def test_the_image_of_an_episode_is_the_one_that_was_shown():
    for episode in play(shared_model(), rounds=2):
        assert np.array_equal(episode.image, picture(episode.task["colour"], episode.task.get("shade", 1.0)))


def test_rows_keep_their_images_when_a_batch_is_cut():
    batch = collate(play(shared_model(), group_size=3), TOKENIZER.pad_token_id)
    shown = [batch.images.pixels_ICHW[i] for i in batch.images.index_B]
    rows = torch.tensor([11, 0, 4])
    part = select(batch, rows)
    assert len(part.images.pixels_ICHW) == 3 == images_to_encode(batch, rows)
    for place, row in enumerate(rows):
        assert torch.equal(part.images.pixels_ICHW[part.images.index_B[place]], shown[row])
    pieces = list(micro_batches(batch, torch.arange(12), 3 * batch.ids_BT.shape[1]))
    assert sorted(torch.cat(pieces).tolist()) == list(range(12))
    assert sum(images_to_encode(batch, piece) for piece in pieces) <= 6  # members of a group stay side by side


def test_text_batches_have_no_images_and_mixed_ones_are_refused():
    episodes = play(shared_model())
    assert images_to_encode(collate(episodes, 0)) == 4
    episodes[0].image = None
    with pytest.raises(ValueError, match="7 of 8 episodes"):
        collate(episodes, 0)
    for episode in episodes:
        episode.image = None
    assert collate(episodes, 0).images is None and images_to_encode(collate(episodes, 0)) == 0


def test_compute_counts_the_encoder_per_patch_and_a_frozen_one_forward_only():
    model = new_model()
    parts = {"tower": model.model.vision_tower, "projector": model.model.multi_modal_projector}
    tower, projector = (parameter_count(part) for part in parts.values())
    meter = meter_for(model)
    assert meter.parameters == parameter_count(model) - tower - projector
    assert meter.image_flops == (2 * 4 * (tower + projector), 6 * 4 * (tower + projector))
    freeze_encoder(model)
    assert meter_for(model).image_flops == (2 * 4 * (tower + projector), 4 * (2 * tower + 6 * projector))
    meter.add_forward(10)
    meter.add_train(5)
    meter.add_images(3)
    meter.add_images(2, train=True)
    assert meter.flops == meter.parameters * (2 * 10 + 6 * 5) + 3 * meter.image_flops[0] + 2 * meter.image_flops[1]
    again = meter_for(new_model())
    again.load_state_dict(meter.state_dict())
    assert again.flops == meter.flops
    text = build_decoder(DecoderConfig(hidden=24, layers=1, heads=2, kv_heads=1, feedforward=32), TOKENIZER, 0)
    assert meter_for(text).image_flops == (0, 0) and meter_for(text).parameters == parameter_count(text)


def test_further_turns_count_the_whole_row_again():
    once, twice = play(shared_model(), rounds=1), play(shared_model(), rounds=2)
    assert [e.images_forward for e in once] == [1, 0] * 4
    for first, both in zip(once, twice, strict=True):
        if len(both.texts) == 2:
            answer = both.turns.count(1)
            assert both.images_forward == first.images_forward + 1
            assert both.tokens_forward == first.tokens_forward + (len(both.ids) - answer) + answer


def test_bad_prompts_and_models_are_refused():
    with pytest.raises(ValueError, match="exactly once"):
        expand([1, 2], TOKEN, 4)
    with pytest.raises(ValueError, match="2 times"):
        expand([TOKEN, TOKEN], TOKEN, 4)
    model = shared_model()
    with pytest.raises(ValueError, match=r"\[3\] image tokens, an image has 4"):
        embed(model, torch.tensor([[1, TOKEN, TOKEN, TOKEN]]), stack([picture("red ")]))
    with pytest.raises(ValueError, match="qwen3 does not read an image as tokens"):
        image_tokens(build_decoder(DecoderConfig(hidden=24, layers=1, heads=2, kv_heads=1, feedforward=32), TOKENIZER, 0))
    with pytest.raises(ValueError, match="multiple of patch_size"):
        add_eyes(shared_model(), VisionConfig(image_size=9, patch_size=4), TOKEN, 0)


def test_eyes_leave_the_decoder_as_it_was_and_depend_on_the_seed_alone():
    decoder = build_decoder(DecoderConfig(hidden=24, layers=2, heads=2, kv_heads=1, feedforward=32), TOKENIZER, 3)
    ids = torch.tensor([[1, 4, 5, 6]])
    first, again, other = (add_eyes(decoder, EYES, TOKEN, seed) for seed in (1, 1, 2))
    with torch.no_grad():
        torch.testing.assert_close(first(input_ids=ids).logits, decoder(input_ids=ids).logits, atol=1e-5, rtol=0)
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    name = "model.vision_tower.embeddings.patch_embedding.weight"
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_a_saved_model_that_sees_is_loaded_as_one(tmp_path):
    model = new_model()
    save_model(model, TOKENIZER, tmp_path / "model")
    loaded, tokenizer = load_model(tmp_path / "model")
    assert type(loaded) is type(model) and tokenizer.convert_tokens_to_ids(IMAGE) == TOKEN
    assert [e.ids for e in play(loaded)] == [e.ids for e in play(model.eval())]


def test_a_model_of_another_kind_goes_through_the_same_functions():
    text = {"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SmolVLMConfig(
        text_config={**text, "num_key_value_heads": 1, "vocab_size": len(TOKENIZER), "pad_token_id": 0},
        vision_config={**eyes, "image_size": 16, "patch_size": 4},
        image_token_id=TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config).eval()
    assert image_tokens(model) == 4 and meter_for(model).image_flops[0] > 0
    clean = [episode for episode in play(model, group_size=4) if episode.ids.count(TOKEN) == 4]
    assert len({episode.task["colour"] for episode in clean}) > 1
    for episode in clean:
        pixels = torch.from_numpy(episode.image).permute(2, 0, 1)[None].float() / 127.5 - 1
        pixels = torch.nn.functional.interpolate(pixels, (16, 16), mode="bilinear", antialias=True)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([episode.ids]), pixel_values=pixels[:, None]).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(episode.ids)[1:, None])[:, 0]
        mask = torch.tensor(episode.mask).bool()
        torch.testing.assert_close(torch.tensor(episode.logps)[mask], logp[mask[1:]], atol=2e-5, rtol=0)


def demonstrations(step):
    stream = python_random("colours", step)
    rows, images = [], []
    for colour in stream.choices(list(COLOURS), k=12):
        head = expand(TOKENIZER(f"<bos>what colour? {IMAGE}")["input_ids"], TOKEN, 4)
        tail = TOKENIZER(f"{colour}<eos>")["input_ids"]
        rows.append(([*head, *tail], [0] * len(head) + [1] * len(tail)))
        images.append(picture(colour, stream.uniform(0.5, 1.0)))
    return *pad_rows(rows, TOKENIZER.pad_token_id), stack(images)


def log_of(folder):
    return RunLog(folder, {"experiment": "7-0", "scale": "smoke", "variant": None, "arm": "a", "seed": 0})


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_sft_learns_to_tell_colours_and_counts_the_images(tmp_path, micro_batch):
    model = new_model()
    with log_of(tmp_path) as log:
        meter = train_sft(
            model,
            demonstrations,
            SftConfig(lr=5e-3, micro_batch=micro_batch),
            budget=Budget(steps=40),
            log=log,
            folder=tmp_path,
        )
    right = [e.success for e in play(model.eval(), [{"colour": c, "shade": 0.9} for c in COLOURS], temperature=0.0)]
    assert all(right)
    assert 40 <= meter.images_trained <= 40 * 12 and meter.images_forward == 0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rl_trains_what_sees_unless_it_is_frozen(tmp_path, name):
    changes = {"grpo": {"prompts_per_step": 3, "group_size": 4}, "ppo": {"prompts_per_step": 12, "value_warmup_steps": 0}}
    changes["ppo"] |= {"epochs": 1, "minibatches": 1}
    algo = load_algo(name, {"lr": 1e-2, "max_new_tokens": 2, "kl_coef": 0.01, **changes[name]}, {})
    for frozen in (False, True):
        model = new_model(5)
        if frozen:
            freeze_encoder(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        folder = tmp_path / str(frozen)
        with log_of(folder) as log:
            meter: Meter = {"grpo": train_grpo, "ppo": train_ppo}[name](
                model, TOKENIZER, Colour, lambda step, count: [{"colour": list(COLOURS)[i % 3]} for i in range(count)], algo,
                seed=0, budget=Budget(steps=2), log=log, folder=folder,
            )  # fmt: skip
        moved = {key.split(".")[1] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
        assert "language_model" in moved and "multi_modal_projector" in moved
        assert ("vision_tower" in moved) is not frozen
        assert meter.images_trained > 0 and meter.images_forward >= 6
