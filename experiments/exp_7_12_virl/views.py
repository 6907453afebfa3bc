"""What an agent sees: small pictures of a city's streets, drawn by casting rays through its street map.

A view is 64 x 64 pixels over 90 degrees. Along the streets stand walls; a named place has a sign with two glyphs that
stand for its name, alike in every city. All else is the city's own: light, sky, ground, the colours, heights and windows
of its buildings, the form and colours of its signs. So another city is another look, and a sign still reads the same.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numba
import numpy as np

from common.seeding import rng, stream_seed
from experiments.exp_7_12_virl.cities import City, city

SIDE = 64  # pixels of a view
CELL = 2.0  # metres of a cell of the map
HALF_STREET = 7.0  # metres from the middle of a street to its walls
FAR = 160.0  # metres a ray goes
EYE = 1.7  # metres above the ground
MARGIN = 60.0  # metres of walls around the outermost crossing
SIGN_RANGE = 75.0  # metres from which a sign is drawn
GLYPH = 7  # cells of a glyph, each way
ROOFS = 3  # flat, stepped, gabled


class Look(NamedTuple):
    """How a city is drawn: colours as 0..1 RGB rows, sizes in metres.

    numbers: fog, ambient light, sun bearing in radians, window width, window height, share of the wall that is window,
    least and most height of a building, roof form, height and width of a sign, its frame.
    """

    colours: np.ndarray  # sky top, sky bottom, road, kerb, window, sign ground, sign ink, sign frame, then 5 walls
    numbers: np.ndarray


class Map(NamedTuple):
    """Cells (row to the north, column to the east): 0 street, else the number of the building; origin in metres."""

    cells: np.ndarray
    origin: tuple[float, float]
    signs: np.ndarray  # (S, 2): where the signs stand
    glyphs: np.ndarray  # (S, GLYPH, 2 * GLYPH + 1): their ink
    shown_at: np.ndarray  # (S, 2): the crossing that each sign belongs to


def hue(stream: np.random.Generator, saturation: tuple[float, float], value: tuple[float, float]) -> np.ndarray:
    """A random colour of that saturation and brightness."""
    h, s, v = stream.uniform(0, 6), stream.uniform(*saturation), stream.uniform(*value)
    rgb = np.clip(np.abs((h + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    return v * (1 - s * (1 - rgb))


@cache
def look(name: str) -> Look:
    """The look of a city, from its name alone."""
    stream = rng("look", name)
    wall = hue(stream, (0.15, 0.6), (0.45, 0.9))
    walls = [np.clip(wall * stream.uniform(0.7, 1.15) + stream.normal(0, 0.07, 3), 0, 1) for _ in range(5)]
    sky = hue(stream, (0.05, 0.6), (0.55, 1.0))
    ink, ground = hue(stream, (0.3, 1.0), (0.0, 0.25)), hue(stream, (0.0, 0.5), (0.85, 1.0))
    if stream.random() < 0.5:
        ink, ground = ground, ink
    colours = [
        sky, np.clip(sky + 0.25, 0, 1), hue(stream, (0.0, 0.2), (0.2, 0.5)), hue(stream, (0.0, 0.2), (0.5, 0.75)),
        hue(stream, (0.1, 0.7), (0.1, 0.95)), ground, ink, hue(stream, (0.4, 1.0), (0.3, 0.9)), *walls,
    ]  # fmt: skip
    low = stream.uniform(5, 14)
    numbers = [
        stream.uniform(40, 200), stream.uniform(0.45, 0.8), stream.uniform(0, 2 * math.pi), stream.uniform(1.6, 4.5),
        stream.uniform(2.4, 4.0), stream.uniform(0.3, 0.7), low, low + stream.uniform(3, 22), float(stream.integers(ROOFS)),
        stream.uniform(3.0, 4.2), stream.uniform(5.2, 7.5), stream.uniform(0.06, 0.12),
    ]  # fmt: skip
    return Look(np.array(colours), np.array(numbers))


def glyphs_of(name: str) -> np.ndarray:
    """The ink (GLYPH, 2 * GLYPH + 1) of a name: a glyph for its first word and one for the rest, each mirror-symmetric."""
    first, _, rest = name.partition(" ")
    ink = np.zeros((GLYPH, 2 * GLYPH + 1), np.uint8)
    for place, word in ((0, first), (GLYPH + 1, rest or first)):
        bits = rng("glyph", stream_seed(word)).integers(0, 2, size=(GLYPH, GLYPH // 2 + 1))
        ink[:, place : place + GLYPH] = np.concatenate([bits, bits[:, -2::-1]], axis=1)
    return ink


@cache
def street_map(name: str) -> Map:
    """The map of a city that rays are cast through, with every sign at the wall beside its crossing."""
    town = city(name)
    points = np.array(town.points)
    low, high = points.min(axis=0) - MARGIN, points.max(axis=0) + MARGIN
    columns, rows = (int(n) for n in np.ceil((high - low) / CELL))
    x, y = np.meshgrid(low[0] + CELL * (np.arange(columns) + 0.5), low[1] + CELL * (np.arange(rows) + 0.5))
    centre = np.stack([x, y], axis=-1)
    block = (np.floor(x / 24).astype(np.int64) * 7919 + np.floor(y / 24).astype(np.int64) * 104729) % 251 + 1
    cells = block.astype(np.int32)
    for a, others in enumerate(town.neighbours):
        for b in (b for b in others if a < b):
            along = points[b] - points[a]
            share = np.clip(((centre - points[a]) @ along) / (along @ along), 0, 1)[..., None]
            cells[np.hypot(*np.moveaxis(centre - points[a] - share * along, -1, 0)) < HALF_STREET] = 0
    at = [n for n, place in enumerate(town.places) if place is not None]
    signs = np.array([sign_spot(town, n) for n in at]).reshape(-1, 2)
    ink = np.array([glyphs_of(town.places[n].name) for n in at]).reshape(-1, GLYPH, 2 * GLYPH + 1)
    return Map(cells, (float(low[0]), float(low[1])), signs, ink, points[at].reshape(-1, 2))


def sign_spot(town: City, node: int) -> tuple[float, float]:
    """Where a sign hangs: in the direction of its place, where the free room around the crossing ends at the latest."""
    place, (x, y) = town.places[node], town.points[node]
    assert place is not None
    far = math.hypot(place.x - x, place.y - y)
    near = min(far, HALF_STREET - 0.5)
    return x + (place.x - x) * near / far, y + (place.y - y) * near / far


@numba.njit(cache=True)
def _wall(cells, origin, x, y, dx, dy, far):
    """(distance, number of the building, position along the wall, wall faces east or west) of the first wall on a ray."""
    column, row = math.floor((x - origin[0]) / CELL), math.floor((y - origin[1]) / CELL)
    step_x, step_y = (1 if dx > 0 else -1), (1 if dy > 0 else -1)
    per_x = CELL / max(abs(dx), 1e-9)
    per_y = CELL / max(abs(dy), 1e-9)
    edge_x = origin[0] + (column + (1 if dx > 0 else 0)) * CELL
    edge_y = origin[1] + (row + (1 if dy > 0 else 0)) * CELL
    next_x, next_y = abs(edge_x - x) / max(abs(dx), 1e-9), abs(edge_y - y) / max(abs(dy), 1e-9)
    distance, side = 0.0, False
    while distance < far:
        if next_x < next_y:
            distance, side = next_x, True
            next_x += per_x
            column += step_x
        else:
            distance, side = next_y, False
            next_y += per_y
            row += step_y
        if row < 0 or column < 0 or row >= cells.shape[0] or column >= cells.shape[1]:
            break
        if cells[row, column]:
            along = y + distance * dy if side else x + distance * dx
            return distance, cells[row, column], along, side
    return far, 0, 0.0, False


@numba.njit(cache=True)
def _draw(cells, origin, signs, shown_at, glyphs, colours, numbers, x, y, facing, side_pixels, image):
    """One view into image (side, side, 3), uint8."""
    half = side_pixels / 2
    fog, ambient, sun, window_w, window_h, window_share, low, high, roof = numbers[:9]
    depth = np.empty(side_pixels)
    for i in range(side_pixels):
        offset = (i + 0.5 - half) / half  # tangent of the angle off the middle: 90 degrees in all
        dx = math.sin(facing) + offset * math.cos(facing)
        dy = math.cos(facing) - offset * math.sin(facing)
        distance, number, along, side = _wall(cells, origin, x, y, dx, dy, FAR)  # in units of depth, not of length
        depth[i] = distance
        height = low + (high - low) * ((number * 37) % 101) / 101.0
        if roof == 1:
            height += 1.5 * (math.floor(along / 4.0) % 2)
        elif roof == 2:
            height += 4.0 * (1 - abs(2 * (along / 12.0 - math.floor(along / 12.0)) - 1))
        light = ambient + (1 - ambient) * abs(math.sin(sun) if side else math.cos(sun))
        near = math.exp(-distance / fog)
        wall = 8 + number % 5
        for j in range(side_pixels):
            up = (half - j - 0.5) / half  # tangent of the angle above the horizon
            level = EYE + up * distance
            for c in range(3):
                if number and 0 <= level <= height:
                    colour = colours[wall, c]
                    w, h = along / window_w, level / window_h
                    if level > 1.0 and abs(w - math.floor(w) - 0.5) < window_share / 2 and abs(h - math.floor(h) - 0.5) < 0.3:
                        colour = colours[4, c]
                    value = near * light * colour + (1 - near) * colours[1, c]
                elif up > 0:
                    share = min(1.0, 1.4 * up)
                    value = share * colours[0, c] + (1 - share) * colours[1, c]
                else:
                    ground = EYE / max(-up, 1e-6)
                    mist = math.exp(-ground / fog)
                    kerb = 2 if number == 0 or ground < 0.8 * distance else 3
                    value = mist * colours[kerb, c] + (1 - mist) * colours[1, c]
                image[j, i, c] = int(255 * min(max(value, 0.0), 1.0))
    _sign(signs, shown_at, glyphs, colours, numbers, x, y, facing, side_pixels, depth, image)


@numba.njit(cache=True)
def _sign(signs, shown_at, glyphs, colours, numbers, x, y, facing, side_pixels, depth, image):
    """The signs in range, far ones first; each turns its face to the one who looks and is hidden only by nearer walls."""
    half = side_pixels / 2
    tall, wide, frame = numbers[9], numbers[10], numbers[11]
    away = np.empty(len(signs))
    for s in range(len(signs)):
        away[s] = (signs[s, 0] - x) * math.sin(facing) + (signs[s, 1] - y) * math.cos(facing)
    for s in np.argsort(-away):
        distance = away[s]
        here = math.hypot(shown_at[s, 0] - x, shown_at[s, 1] - y) < 1.0
        if distance < 0.5 or distance > SIGN_RANGE:
            continue
        across = (signs[s, 0] - x) * math.cos(facing) - (signs[s, 1] - y) * math.sin(facing)
        shown = max(distance, 6.5) if here else distance  # at its crossing a sign fits into the view
        middle, reach = half + half * across / max(distance, 1e-6), half * wide / 2 / shown
        top, bottom = half - half * (tall + 2.6 - EYE) / shown, half - half * (2.6 - EYE) / shown
        first, last = int(max(0.0, math.floor(middle - reach))), int(min(side_pixels - 1.0, math.ceil(middle + reach)))
        for i in range(first, last + 1):
            u = (i + 0.5 - (middle - reach)) / (2 * reach)
            if u < 0 or u >= 1 or (depth[i] < distance - 3.0 and not here):
                continue
            for j in range(int(max(0.0, math.floor(top))), int(min(side_pixels - 1.0, math.ceil(bottom))) + 1):
                v = (j + 0.5 - top) / (bottom - top)
                if v < 0 or v >= 1:
                    continue
                edge = u < frame or u > 1 - frame or v < frame or v > 1 - frame
                row = int((v - frame) / (1 - 2 * frame) * glyphs.shape[1])
                column = int((u - frame) / (1 - 2 * frame) * glyphs.shape[2])
                colour = 7 if edge else 6 if glyphs[s, row, column] else 5
                for c in range(3):
                    image[j, i, c] = int(255 * colours[colour, c])


def view(name: str, x: float, y: float, heading: float, side: int = SIDE) -> np.ndarray:
    """One view (side, side, 3), uint8, from a point of a city along a heading in degrees."""
    image = np.empty((side, side, 3), np.uint8)
    town, seen = street_map(name), look(name)
    _draw(
        town.cells, town.origin, town.signs, town.shown_at, town.glyphs, seen.colours, seen.numbers, x, y,
        math.radians(heading), side, image,
    )  # fmt: skip
    return image


def four_views(name: str, x: float, y: float, heading: float, side: int = SIDE) -> np.ndarray:
    """The 2 x 2 grid (2 side, 2 side, 3): front and right above, back and left below."""
    front, right, back, left = (view(name, x, y, heading + turn, side) for turn in (0, 90, 180, 270))
    return np.concatenate([np.concatenate([front, right], axis=1), np.concatenate([back, left], axis=1)])
