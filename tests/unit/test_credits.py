"""Credit along the path: every number worked out by hand, and each rule's mutation must turn a value red.

Covers the known faults L05, L06 (a sibling that cannot learn moves no mean).
"""

import importlib.util
import sys
from pathlib import Path as File

import pytest
import torch

import common.credits
from common.compute import Budget
from common.config import load_algo
from common.credits import (
    CreditConfig,
    Path,
    centred_turns,
    dead_shares,
    make_credit,
    path_of,
    returns,
    scalar_rewards,
    strength_at,
    token_advantages,
    turn_signals,
)
from common.episodes import Episode, collate
from common.grpo import train_grpo
from common.schema import ConfigError


def path(outcome, violations, credits, acted=None, state=None, progress=None):
    """A Path of the lists; turns without a number were not taken."""
    violations, credits = torch.tensor(violations), torch.tensor(credits)
    acted = torch.ones(violations.shape, dtype=torch.bool) if acted is None else torch.tensor(acted).bool()
    state = torch.zeros(violations.shape, dtype=torch.long) if state is None else torch.tensor(state)
    progress = torch.zeros(len(outcome)) if progress is None else torch.tensor(progress)
    return Path(torch.tensor(outcome), progress, violations, credits, acted, state)


# Two episodes of three turns: one solved with three violations and one credit, one failed with two credits.
PATH = path([1.0, 0.0], [[1.0, 0, 2], [0, 0, 0]], [[0.0, 1, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 0]], progress=[1.0, 0.5])


def values(m):
    """name -> numbers computed with the module `m`, then what they must be."""
    both = m.CreditConfig(penalty=0.5, credit=0.25, channel="both")
    token, scalar = m.CreditConfig(penalty=0.5, credit=0.25, channel="token"), m.CreditConfig(channel="scalar")
    gated, positive = (m.CreditConfig(penalty=0.5, channel="token", **{key: True}) for key in ("gated", "positive"))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 0]])
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1], [-1, 0, -1, 1, 1, -1]])
    outcome, signal = torch.tensor([0.5, -0.5]), torch.tensor([[0.0, 1.0], [-2.0, 0.0]])

    def spread(normaliser):
        return m.token_advantages(outcome, signal, turns, mask, normaliser).flatten().tolist()

    group = m.CreditConfig(penalty=0.5, credit=0.25, channel="token", baseline="group")
    states = m.CreditConfig(penalty=0.5, credit=0.25, channel="token", baseline="state", gamma=0.5)
    keyed = PATH._replace(state_BK=torch.tensor([[0, 1, 2], [0, 3, -1]]))
    dead = m.dead_shares(path([1.0, 1.0], [[1.0], [0]], [[0.0], [0]]), torch.tensor([0, 0]), torch.ones(2), both)
    return {
        # 1 - .5 * min(3, 2) + .25 * 1;  0 + .25 * 2
        "scalar": [*m.scalar_rewards(PATH, both).tolist(), 0.25, 0.5],
        "default weights": [*m.scalar_rewards(PATH, scalar).tolist(), 0.75, 0.5],
        "half strength": [*m.scalar_rewards(PATH, both, 0.5).tolist(), 0.625, 0.25],
        "token leaves the scalar": [*m.scalar_rewards(PATH, token).tolist(), 1, 0],
        "progress": [*m.scalar_rewards(PATH, m.CreditConfig(outcome=2.0, progress=0.5)).tolist(), 2.5, 0.25],
        "signals": [*m.turn_signals(PATH, token).flatten().tolist(), -0.5, 0.25, -1, 0.25, 0.25, 0],
        "no channel": [*m.turn_signals(PATH, scalar).flatten().tolist(), 0, 0, 0, 0, 0, 0],
        "gated": [*m.turn_signals(PATH, gated).flatten().tolist(), -0.5, 0.25, -1, 0, 0, 0],
        # a clean turn earns .5, and its credit
        "positive": [*m.turn_signals(PATH, positive).flatten().tolist(), 0, 0.75, 0, 0.75, 0.75, 0],
        # the five turns sum to -.75, their mean is -.15
        "group baseline": [*m.turn_signals(PATH, group).flatten().tolist(), -0.35, 0.4, -0.85, 0.4, 0.4, 0],
        # returns: .. last turn -1 + outcome 1 = 0, .25 + 0 = .25, -.5 + .125 = -.375; second .25, .25 + .125 = .375
        "state baseline": [*m.turn_signals(keyed, states).flatten().tolist(), -0.375, 0, 0, 0.375, 0, 0],
        "all": [*spread("all"), 0, 0.5, 0.5, 0, 1.5, 1.5, 0, -2.5, 0, -0.5, -0.5, 0],
        # seven policy tokens, three with a signal: the path counts 7/3
        "own": [*spread("own"), 0, 0.5, 0.5, 0, 0.5 + 7 / 3, 0.5 + 7 / 3, 0, -0.5 - 14 / 3, 0, -0.5, -0.5, 0],
        "returns": [*m.returns(torch.tensor([[1.0, 2, 4]]), 0.5)[0].tolist(), 3, 4, 4],
        "fade": [m.strength_at(m.CreditConfig(fade=0.5), used) for used in (0.2, 0.5, 0.75, 1.0)] + [1, 1, 0.5, 0],
        "no fade": [m.strength_at(both, 1.0), 1],
        "dead": [*dead.values(), 1, 0, 0, 1],
    }


def wrong(m):
    """The names whose numbers differ from what they must be."""
    red = []
    for name, row in values(m).items():
        half = len(row) // 2
        if row[:half] != pytest.approx(row[half:], abs=1e-6):
            red.append(name)
    return red


def test_values():
    assert wrong(common.credits) == []


MUTATIONS = {
    "penalty's sign": ("-config.penalty * path.violations_BK", "config.penalty * path.violations_BK"),
    "no clip": ("path.violations_BK.sum(1).clamp(max=config.clip_events)", "path.violations_BK.sum(1)"),
    "scalar penalties paid": ("credits_B - config.penalty", "credits_B + config.penalty"),
    "penalty and credit swapped": ("config.credit * counted_credits", "config.penalty * counted_credits"),
    "gate lost": ("if gated else path.credits_BK", "if not gated else path.credits_BK"),
    "turns not taken count": (" * path.acted_BK", ""),
    "positive pays violations": ("(path.violations_BK == 0)", "(path.violations_BK != 0)"),
    "baseline of all states": ("path.acted_BK, path.state_BK)", "path.acted_BK, group_numbers(path))"),
    "outcome at the first turn": ("last_turns(path), config.outcome", "0 * last_turns(path), config.outcome"),
    "no discount": ("+ gamma * tail_B", "+ tail_B"),
    "normaliser upside down": (
        "* mask_BT.sum() / (path_BT != 0).sum().clamp(min=1)", "/ mask_BT.sum() * (path_BT != 0).sum().clamp(min=1)"
    ),
    "own is all": ('if normaliser == "own":', 'if normaliser == "none":'),
    "outcome off the mask": ("outcome_B[:, None] * mask_BT", "outcome_B[:, None]"),
    "signal off the mask": ("turn_BT.clamp(min=0)) * mask_BT", "turn_BT.clamp(min=0))"),
    "fade too early": ("(1 - used) / (1 - config.fade)", "1 - used"),
    "strength forgotten": ("strength * (config.credit * credits_B", "(config.credit * credits_B"),
    "dead by outcome alone": ("penalised_B = outcome_B - config.penalty * violations_B", "penalised_B = outcome_B"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_a_value_red(name, tmp_path, monkeypatch):
    old, new = MUTATIONS[name]
    source = File(common.credits.__file__).read_text(encoding="utf-8")
    assert old in source, f"nothing to mutate: {old!r}; update this list"
    copy = tmp_path / f"credits_{abs(hash(name))}.py"
    copy.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, copy.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert wrong(module)


def test_a_turn_alone_at_its_state_gets_nothing():
    signal = torch.tensor([[3.0, 5.0], [1.0, 7.0]])
    acted = torch.tensor([[True, True], [True, False]])
    assert centred_turns(signal, acted, torch.tensor([[0, 1], [0, 1]])).tolist() == [[1, 0], [-1, 0]]


# From episodes ---------------------------------------------------------------------------------------------------------


def episode(group, success, turns, **last):
    """An episode of one prompt token and, per turn, one token of the policy and one of the environment."""
    made = Episode([], [], [], [], prompt_length=1, task={}, group=group, success=success)
    made.append([7], None, -1)
    for number, (violations, credits) in enumerate(turns):
        made.append([8], [-1.0], number)
        made.append([9], None, -1)
        made.infos.append({"violations": violations, "credits": credits, "state": str(number)})
    made.infos[-1] |= last
    return made


EPISODES = [
    episode(0, True, [(["a"], []), ([], ["b"])], progress=1.0),
    episode(0, False, [([], [])], progress=0.5),
    episode(1, False, [(["b", "a"], []), ([], [])]),
    episode(1, False, [([], [])]),
]


def test_the_path_of_episodes():
    found = path_of(EPISODES)
    assert found.outcome_B.tolist() == [1, 0, 0, 0] and found.progress_B.tolist() == [1, 0.5, 0, 0]
    assert found.violations_BK.tolist() == [[1, 0], [0, 0], [2, 0], [0, 0]]
    assert found.credits_BK.tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]]
    assert found.acted_BK.tolist() == [[True, True], [True, False], [True, True], [True, False]]
    assert found.state_BK.tolist() == [[0, 1], [0, -1], [2, 3], [2, -1]]  # the same state in another group is another
    assert path_of(EPISODES, ["a"]).violations_BK.tolist() == [[0, 0], [0, 0], [1, 0], [0, 0]]
    assert path_of(EPISODES, ["b"]).credits_BK.sum() == 0


def test_credit_of_a_batch_and_its_dead_groups():
    batch = collate(EPISODES, 0)
    config = CreditConfig(penalty=0.5, credit=0.25, channel="token")
    found, metrics = make_credit(config)(EPISODES, batch, torch.ones(4, dtype=torch.bool), 0.0)
    # outcomes 1, 0 | 0, 0 less their means, then the turns' signals; tokens stand at positions 1 and 3
    assert found[:, [1, 3]].tolist() == [[0, 0.75], [-0.5, 0], [-1, 0], [0, 0]]
    assert found[:, [0, 2, 4]].abs().sum() == 0
    assert [metrics[f"dead/{way}"] for way in ("outcome", "penalty", "path", "progress")] == [0.5, 0, 0, 0.5]
    assert metrics["path/violations"] == 0.75 and metrics["path/turns"] == 1.5


def test_an_episode_that_cannot_learn_moves_no_sibling():
    batch = collate(EPISODES, 0)
    valid = torch.tensor([True, False, True, True])
    found, _ = make_credit(CreditConfig(channel="none"))(EPISODES, batch, valid, 0.0)
    assert found.abs().sum() == 0


def test_raw_signals_and_their_configuration():
    with pytest.raises(ConfigError, match="channel"):
        CreditConfig(channel="turns")
    with pytest.raises(ConfigError, match="positive"):
        CreditConfig(channel="scalar", positive=True)
    with pytest.raises(ConfigError, match="penalty"):
        CreditConfig(penalty=-1.0)
    assert scalar_rewards(PATH, CreditConfig()).tolist() == [1, 0]
    assert turn_signals(PATH, CreditConfig()).abs().sum() == 0
    assert returns(torch.zeros(2, 1), 0.5).shape == (2, 1) and strength_at(CreditConfig(), 0.9) == 1
    with pytest.raises(ConfigError, match="normaliser"):
        token_advantages(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, 1).long(), torch.ones(1, 1), "mean")
    # 1 and 0, less .75 and 0, plus .25 and .5: equal by the whole path
    shares = dead_shares(PATH, torch.tensor([0, 0]), torch.ones(2), CreditConfig())
    assert shares == {"dead/outcome": 0, "dead/penalty": 0, "dead/path": 1, "dead/progress": 0}


def test_groups_without_spread_in_the_outcome_are_not_dropped(tmp_path):
    algo = load_algo("dr_grpo", {"drop_zero_variance": True})
    with pytest.raises(ConfigError, match="drop_zero_variance"):
        train_grpo(None, None, None, None, algo, seed=0, budget=Budget(steps=1), log=None, folder=tmp_path,
                   credit=make_credit(CreditConfig()))  # fmt: skip
