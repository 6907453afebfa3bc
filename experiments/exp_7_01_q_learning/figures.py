"""The figures and the text section of 7-1, from records alone."""

from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from common.claims import load_claims
from common.records import Record
from common.report.figures import COLOURS, LINES, MARKERS, bars, canvas, curve, series
from experiments.exp_7_01_q_learning import world as rules
from experiments.exp_7_01_q_learning.tables import best_play, keys_of, reachable_states, shortest_win
from experiments.exp_7_01_q_learning.world import ACTIONS, ROOMS

LABELS = load_claims(Path(__file__).with_name("claims.yaml")).labels
BOOK_STATES = {1000: 124, 5000: 133, 10000: 145}
FIRST_README = {1000: 0.001, 2000: 0.0, 3000: 0.0, 5000: 0.0, 7000: 0.0, 8000: 0.0, 9000: 0.093, 10000: 0.998}
BOOK = {1000: 0.0, 5000: 0.0, 7000: 0.34, 8000: 0.96, 10000: 1.0}
PLACES = {"entrance": (0, 0), "storage": (1, 0), "hallway": (0, 1), "guard_room": (0, 2), "treasure_room": (1, 2)}
DISCOUNT = 0.99
ENDLESS = 2000  # moves after which the rest weighs less than 1e-6
GROUPS = (
    ("faults", "The book's learner and the published program's faults", ("base", "published", "rng_fault", "limit_fault")),
    ("farming", "What the learner sees and is paid for", ("base", "pays_once", "full_world", "full_state", "stochastic")),
    ("learners", "Other learners of the same table", ("base", "sarsa", "double_q", "dyna_q", "optimistic")),
)  # fmt: skip
MAP_ARMS = ("base", "pays_once")
STATE_ARMS = ("base", "published", "pays_once")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Learning curves by theme, episodes to the rise, state counts, values of the rooms while training, found path."""
    arms = list(dict.fromkeys(row["arm"] for row in records))
    groups = [(stem, title, [arm for arm in members if arm in arms]) for stem, title, members in GROUPS]
    known = {arm for _, _, members in groups for arm in members}
    rest = [arm for arm in arms if arm not in known]
    groups += [(f"rest-{i // 5}", "Further arms", ["base", *rest[i : i + 5]]) for i in range(0, len(rest), 5)]
    names = []
    for stem, title, members in groups:
        if len(members) > 1:
            names.append(
                curve(
                    records, "train", "success", members, folder / f"curve-{stem}.svg", labels=LABELS, unit="rate",
                    title=f"{title}: training win rate (mean and 95 % interval over seeds)",
                    x_label="training episodes", y_label="games won in the last window",
                )
            )  # fmt: skip
    names.append(
        bars(
            records, "train", "rise_episode", arms, folder / "rise.svg", labels=LABELS, unit="count",
            title="Episodes until half of a window's games were won (runs that never got there count with all episodes)",
            x_label="training episodes",
        )
    )  # fmt: skip
    if all(arm in arms for arm in MAP_ARMS):
        names.append(_single_runs(records, folder / "runs.svg"))
        names.append(_state_counts(records, [arm for arm in STATE_ARMS if arm in arms], folder / "states.svg"))
        names.append(_value_maps(records, list(MAP_ARMS), folder / "value-map.svg"))
        names.append(_path_map(records, MAP_ARMS[0], folder / "path.svg"))
    return names


def _steps(records: list[Record], arm: str, metric: str) -> list[int]:
    return sorted({row["step"] for row in records if row["arm"] == arm and row["metric"] == metric})


def _single_runs(records: list[Record], path: Path) -> str:
    """Each seed of the base by itself: the mean curve hides that every run rises suddenly, at its own time."""
    with canvas(path, "Every single run of the base, and the published curves: each rises suddenly, at its own time") as (
        _,
        axes,
    ):
        rows = [r for r in records if (r["arm"], r["split"], r["metric"]) == ("base", "train", "success")]
        for index, seed in enumerate(sorted({row["seed"] for row in rows})):
            points = sorted((row["step"], row["value"]) for row in rows if row["seed"] == seed)
            label = "one seed" if index == 0 else None
            axes.plot(*zip(*points, strict=True), color="#56B4E9", linewidth=0.9, alpha=0.8, label=label)
        for text, published, style in (("book", BOOK, "D"), ("first README", FIRST_README, "^")):
            axes.plot(*zip(*published.items(), strict=True), style, mfc="#FFFFFF", mec="#D55E00", mew=1.6, label=text)
        axes.set_xlabel("training episodes")
        axes.set_ylabel("share of games won in the last window")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return path.name


def _state_counts(records: list[Record], arms: list[str], path: Path) -> str:
    """States in the table along training, with the book's three counts."""
    with canvas(path, "States in the table while training (mean and 95 % interval over seeds)") as (_, axes):
        for index, arm in enumerate(arms):
            xs, estimates = series(records, arm, "train", "states", unit="count")
            colour = COLOURS[index]
            axes.plot(xs, [e.mean for e in estimates], LINES[index], color=colour, marker=MARKERS[index], label=LABELS[arm])
            lows, highs = [e.low for e in estimates], [e.high for e in estimates]
            axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.plot(*zip(*BOOK_STATES.items(), strict=True), "D", mfc="#FFFFFF", mec="#000000", mew=1.6, label="book")
        axes.set_xlabel("training episodes")
        axes.set_ylabel("states")
        axes.legend(loc="lower right")
    return path.name


def _rooms(axes: Axes, colours: dict[str, tuple] | None = None, texts: dict[str, str] | None = None, size: float = 8) -> None:
    """The five rooms as boxes, with passages between them."""
    for here, exits in rules.EXITS.items():
        for there in exits.values():
            (x0, y0), (x1, y1) = PLACES[here], PLACES[there]
            axes.plot((x0, x1), (y0, y1), color="#7F7F7F", linewidth=3, zorder=0)
    for room, (x, y) in PLACES.items():
        face = (colours or {}).get(room, "#FFFFFF")
        dark = colours is not None and sum(face[:3]) < 1.2
        box = {"boxstyle": "round,pad=0.5", "facecolor": face, "edgecolor": "#000000"}
        text = f"{room.replace('_', ' ')}\n{(texts or {}).get(room, '')}".rstrip()
        axes.text(x, y, text, ha="center", va="center", fontsize=size, bbox=box, color="#FFFFFF" if dark else "#000000")
    axes.set_xlim(-0.75, 1.75)
    axes.set_ylim(-0.5, 2.5)
    axes.axis("off")


def _value_maps(records: list[Record], arms: list[str], path: Path) -> str:
    """Highest value of each room's states (mean over seeds) at a few moments of training."""
    steps = _steps(records, arms[0], "room_values")
    shown = steps[:3] + steps[3:][-1:]
    scale = Normalize(0, 230)
    title = "Highest action value in each room while training (mean over seeds): value flows back from the treasure"
    with canvas(path, title, width=2.6 * len(shown), height=3.3 * len(arms)) as (figure, first):
        palette = matplotlib.colormaps["cividis"]
        first.remove()
        grid = figure.subplots(len(arms), len(shown), squeeze=False)
        for row, arm in enumerate(arms):
            for column, step in enumerate(shown):
                items = [
                    r["items"] for r in records
                    if (r["arm"], r["metric"], r["step"]) == (arm, "room_values", step)
                ]  # fmt: skip
                values = dict(zip(ROOMS, np.mean(items, axis=0), strict=True))
                colours = {room: palette(scale(value)) for room, value in values.items()}
                _rooms(grid[row][column], colours, {room: f"{value:.0f}" for room, value in values.items()})
                grid[row][column].set_title(f"{LABELS[arm]}\n{step:,} episodes", fontsize=9)
    return path.name


def found_paths(records: list[Record], arm: str) -> Counter[tuple[str, ...]]:
    """The greedy games of an arm's seeds after training, as lists of actions, with how many seeds play each."""
    rows = [row for row in records if (row["arm"], row["metric"]) == (arm, "path_actions")]
    return Counter(tuple(ACTIONS[int(number)] for number in row["items"]) for row in rows)


def _path_map(records: list[Record], arm: str, path: Path) -> str:
    """The most frequent greedy game on the map, each action numbered in the room where it is made."""
    (actions, count), *_ = found_paths(records, arm).most_common(1)
    total = sum(found_paths(records, arm).values())
    here, texts = rules.World(), dict.fromkeys(ROOMS, "")
    for number, action in enumerate(actions[:20], start=1):
        texts[here.room] += f"{number} {action}\n"
        here = rules.apply_action(here, action).world
    more = " (its first 20)" if len(actions) > 20 else ""
    title = f"The game learnt most often by the base: {len(actions)} moves{more}, found by {count} of {total} seeds"
    with canvas(path, title, width=7.0, height=6.0) as (_, axes):
        _rooms(axes, None, texts, size=9)
    return path.name


def sections(records: list[Record]) -> dict[str, str]:
    """What exact search says about the game, and which games the base learns."""
    path, best = shortest_win(), best_play()
    at_once = [best_play(exact_moves=len(path), discount=discount)[0] for discount in (1.0, DISCOUNT)]
    endless, plan = best_play(max_moves=ENDLESS, discount=DISCOUNT)
    clocked, clocked_plan = best_play(discount=DISCOUNT)
    wins = "never wins" if "take dragon's treasure" not in plan[: ENDLESS // 2] else f"wins after {len(plan)} moves"
    exact = f"""\
Found by search over all {len(reachable_states()):,} states that differ in where which item lies, and in which order \
({len(keys_of(rules.full_key))} without the order, {len(keys_of(rules.seen_key))} as the learner sees them):

- The shortest victory takes {len(path)} moves and returns {at_once[0]:+.1f}: {", ".join(path)}.
- It is not the best-paid game. The best return within {rules.MAX_MOVES} moves is {best[0]:+.1f}, in {len(best[1])} moves \
with {best[1].count("take red key")} pick-ups of the red key: dropping and re-taking it earns 4 points every two moves, so \
the best player farms first and wins at the last moment.
- With the learner's discount of {DISCOUNT} per move, the shortest victory is worth {at_once[1]:.2f} from the start. If games \
had no limit, which is what a learner without a clock can at best know, the best plan would be worth {endless:.2f} and \
{wins}: it drops and re-takes the key for ever. With the limit known the best is {clocked:.2f}, a victory after \
{len(clocked_plan)} moves. The three lie within {(endless - at_once[1]) / at_once[1]:.1%} of each other, so the table \
has to tell apart near-equals by rare cut-off games, and when it does so is a matter of luck.
"""
    found = {"What exact search says": exact}
    games = found_paths(records, "base")
    if games and "pays_once" in {row["arm"] for row in records}:
        lines = [
            f"| {len(actions)} | {count} | {', '.join(actions[:14])}{', ...' if len(actions) > 14 else ''} |"
            for actions, count in games.most_common(8)
        ]
        table = "\n".join(["| moves | seeds | greedy game after training |", "| --- | --- | --- |", *lines])
        found["Which games the base learns"] = f"{table}\n\n{len(games)} different games over {sum(games.values())} seeds."
    return found
