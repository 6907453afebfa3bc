"""The table-top of 7-13: splits, physics, success test, tokens, pictures, environment."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from common.schema import ConfigError
from experiments.exp_7_13_simplevla import audit, tasks, tokens
from experiments.exp_7_13_simplevla.env import ENV_ID, TableTop
from experiments.exp_7_13_simplevla.lessons import perform
from experiments.exp_7_13_simplevla.physics import PERIOD, SHAPES, START, physics, rest_height
from experiments.exp_7_13_simplevla.render import BLOCK_RGB, from_above, from_the_side
from experiments.exp_7_13_simplevla.world import LIFTED, World


def test_no_start_is_in_two_splits_and_none_is_crowded():
    seen = {}
    for split in tasks.SPLITS:
        drawn = tasks.draw(split, np.tile(tasks.SEEN, 100), "test")
        assert not tasks.crowded(drawn.block_xy, drawn.pad_xy).any()
        assert set(tasks.grid_split(drawn.block_xy, drawn.pad_xy)) == {tasks.SPLITS.index(split)}
        seen[split] = {places.tobytes() for places in np.concatenate([drawn.block_xy, drawn.pad_xy], 1)}
    assert not seen["train"] & seen["test"] and not seen["train"] & seen["validation"] and not seen["validation"] & seen["test"]
    again = tasks.draw("train", np.tile(tasks.SEEN, 100), "test")
    assert (again.block_xy == tasks.draw("train", np.tile(tasks.SEEN, 100), "test").block_xy).all()


def test_four_of_sixteen_pairs_are_never_trained_and_every_word_is_known():
    assert len(tasks.SEEN) == 12 and len(tasks.UNSEEN) == 4 and not set(tasks.SEEN) & set(tasks.UNSEEN)
    unseen = [tasks.TASKS[task] for task in tasks.UNSEEN]
    assert {colour for colour, _ in unseen} == {pad for _, pad in unseen} == {0, 1, 2, 3}  # each word is trained in other pairs
    assert tasks.instruction(tasks.SEEN[0]) == "put the red block on the right pad"
    assert [tasks.WORDS[word] for word in tasks.encode("go to the far pad")] == [
        "go",
        "to",
        "the",
        "far",
        "pad",
        *["[pad]"] * 3,
    ]
    drawn = tasks.draw("train", tasks.SEEN, "colours")
    meant = drawn.colour[np.arange(12), drawn.target]
    assert (meant == np.array(tasks.SEEN) // 4).all() and (drawn.colour[:, 0] != drawn.colour[:, 1]).all()


def test_tokens_are_centimetres_and_back():
    action = np.array([[[0.06, -0.06, 0.0, 1.0], [0.014, -0.016, 0.2, 0.0]]])
    found = tokens.encode(action)
    assert found.tolist() == [[[12, 0, 6, 1], [7, 4, 12, 0]]]
    assert np.allclose(tokens.decode(found)[0, 1], [0.01, -0.02, 0.06, 0])


def test_the_gripper_goes_where_it_is_sent_and_blocks_stay_where_they_are():
    scene = physics("cube")
    states = scene.start(np.array([[[-0.06, 0.0], [0.06, 0.0]]]))
    action = np.zeros((1, 3, 4))
    action[0, :, 0], action[0, 1, 2] = 0.06, -0.03
    at = scene.read(scene.advance(states, action)[0])
    assert np.abs(at.hand[2] - [0.18, 0, START - 0.03]).max() < 0.003
    assert np.abs(at.blocks[2, :, :2] - [[-0.06, 0.0], [0.06, 0.0]]).max() < 1e-3 and at.speed[2].max() < 0.01
    assert scene.model.opt.timestep * 12 == pytest.approx(PERIOD)


def test_a_batch_is_as_its_rows_one_by_one():
    layouts = tasks.draw("train", tasks.SEEN, "rows")
    chunk = np.random.default_rng(0).integers(0, tokens.WIDTHS, (12, 4, 4))
    whole = World(layouts)
    found = whole.act(np.arange(12), chunk)
    for row in (0, 7):
        one = World(layouts.take([row]))
        alone = one.act(np.array([0]), chunk[row : row + 1])
        assert np.array_equal(alone.states[0], found.states[row]) and one.height[0] == whole.height[row]


def test_the_audit_finds_no_hole(capsys):
    assert audit.main() == 0
    assert "the demonstrator, tall: 32 of 32 count" in capsys.readouterr().out


def test_the_audit_finds_a_success_test_that_forgets_the_height(monkeypatch):
    monkeypatch.setattr("experiments.exp_7_13_simplevla.world.FLAT", 1.0)
    assert any("held above the pad" in hole for hole in audit.holes())


def test_demonstrations_lift_and_a_solved_episode_stops():
    layouts = tasks.draw("train", tasks.SEEN, "demo")
    shown = perform(layouts, 24)
    assert shown.solved.all() and (shown.world.height > 0.08).all()
    row, end = 0, shown.steps[0] - 1
    assert (shown.states[row, end:] == shown.states[row, end]).all()
    assert (shown.world.progress() > 0.9).all()


def test_pictures_show_blocks_where_they_are():
    layouts = tasks.draw("train", tasks.SEEN[:3], "picture")
    seen = World(layouts).see()
    image = from_above(seen.places, seen.opening, layouts.colour, 48)
    assert image.shape == (3, 48, 48, 3) and image.dtype == np.uint8
    for row in range(3):
        for block in range(2):
            x, y = seen.places[row, 1 + block, :2]
            pixel = image[row, int((0.24 - y) / 0.01), int((x + 0.24) / 0.01)]
            assert np.abs(pixel - BLOCK_RGB[layouts.colour[row, block]]).max() < 40
    side = from_the_side(seen.places, seen.opening, layouts.colour, 48)
    assert side.shape == image.shape and (side != image).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_environment_follows_the_protocol(shape):
    check_env(gymnasium.make(ENV_ID, shape=shape, render_mode="rgb_array").unwrapped, skip_render_check=shape != "cube")
    assert rest_height(shape) > 0


def test_an_episode_ends_with_its_time_and_refuses_what_it_cannot_do():
    env = TableTop(chunk=4, control_steps=16)
    _, info = env.reset(seed=3, options={"task": 5, "split": "test"})
    assert info["instruction"] == tasks.instruction(5) and not info["success"]
    still = np.tile([6, 6, 6, 0], (4, 1))
    ends = [env.step(still)[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]
    with pytest.raises(ValueError, match="over"):
        env.step(still)
    env.reset(seed=3)
    with pytest.raises(ValueError, match="whole numbers"):
        env.step(np.full((4, 4), 13))
    with pytest.raises(ConfigError, match="task"):
        env.reset(options={"taks": 1})
    with pytest.raises(ConfigError, match="shape"):
        TableTop(shape="ball")


def test_the_environment_plays_the_demonstration_to_its_end():
    env = TableTop(chunk=1, control_steps=30)
    env.reset(seed=0, options={"task": 2})
    shown = perform(env.world.layouts, 24)
    for step in range(int(shown.steps[0])):
        _, reward, terminated, _, info = env.step(shown.tokens[0, step : step + 1])
    assert terminated and reward == 1.0 and info["reason"] == "solved" and info["height"] > LIFTED
