"""Pictures of four playing cards, drawn here: own glyphs for ranks and suits, jittered in place, size, style and tint.

    image = draw(("A", "10", "J", "3"), ("S", "C", "C", "S"), ("black",) * 4, seed=7)  # (48, 48, 3) uint8

The cards lie in two rows of two on a green table, in reading order. Everything that varies comes from the seed; the same
arguments give the same bytes. Glyphs are scaled once and kept, so that a picture costs about a tenth of a millisecond.
"""

from functools import lru_cache

import numpy as np

from common.cards.hands import RANKS
from common.seeding import python_random

SIDE, CELL = 48, 24
INKS = {
    "black": (22, 22, 26),
    "red": (205, 30, 45),
    "blue": (35, 65, 200),
    "green": (25, 125, 50),
    "purple": (125, 35, 155),
    "brown": (120, 78, 35),
    "teal": (15, 120, 130),
    "grey": (95, 95, 100),
    "orange": (225, 120, 20),
}
COOL = ("blue", "green", "teal")  # the inks of pre-training beside black; red and its neighbours are withheld
# Suit letters as in common.cards.hands.SUITS; "black" and "red" are the looks of training and test.
SUITS_OF = {"black": ("S", "C"), "red": ("H", "D")}
INK_OF = {"S": "black", "C": "black", "H": "red", "D": "red"}
# Seven rows a rank; '#' is ink. The 10 is wider than the others, as on a real card.
_RANKS = {
    "A": " ### |#   #|#   #|#####|#   #|#   #|#   #",
    "2": " ### |#   #|    #|   # |  #  | #   |#####",
    "3": "#####|   # |  #  |   # |    #|#   #| ### ",
    "4": "   # |  ## | # # |#  # |#####|   # |   # ",
    "5": "#####|#    |#### |    #|    #|#   #| ### ",
    "6": "  ## | #   |#    |#### |#   #|#   #| ### ",
    "7": "#####|    #|   # |  #  | #   | #   | #   ",
    "8": " ### |#   #|#   #| ### |#   #|#   #| ### ",
    "9": " ### |#   #|#   #| ####|    #|   # | ##  ",
    "10": "#  ### |# #   #|# #   #|# #   #|# #   #|# #   #|#  ### ",
    "J": "  ###|   # |   # |   # |   # |#  # | ##  ",
    "Q": " ### |#   #|#   #|#   #|# # #|#  # | ## #",
    "K": "#   #|#  # |# #  |##   |# #  |#  # |#   #",
}
_SUITS = {
    "S": "   #   |  ###  | ##### |#######|## # ##|   #   |  ###  ",
    "H": " ## ## |#######|#######|#######| ##### |  ###  |   #   ",
    "D": "   #   |  ###  | ##### |#######| ##### |  ###  |   #   ",
    "C": "  ###  |  ###  |## # ##|#######|## # ##|   #   |  ###  ",
}
RANK_HEIGHTS, SUIT_SIZES = (8, 9, 10, 11), (5, 6, 7)
STYLES = ("plain", "bold")
TABLE = (53.0, 101.0, 77.0)  # the published program's background, #35654d


def _bitmap(text: str) -> np.ndarray:
    return np.array([[float(mark == "#") for mark in row] for row in text.split("|")])


def _scaled(bitmap: np.ndarray, height: int, width: int) -> np.ndarray:
    """The bitmap at another size, each pixel the ink of the area it covers: (height, width, 1), 0..1."""
    fine = np.kron(bitmap, np.ones((height, width)))
    rows, columns = bitmap.shape
    return fine.reshape(height, rows, width, columns).mean((1, 3))[..., None]


@lru_cache(maxsize=1024)
def rank_mask(rank: str, style: str, height: int) -> np.ndarray:
    """Ink of a rank at a height in pixels, (height, width, 1) in 0..1."""
    bitmap = _bitmap(_RANKS[rank])
    width = round(height * bitmap.shape[1] / 7)
    mask = _scaled(bitmap, height, width)
    if style == "bold":
        mask = np.minimum(1.0, mask + 0.7 * np.pad(mask, ((0, 0), (1, 0), (0, 0)))[:, :-1])
    return mask


@lru_cache(maxsize=64)
def suit_mask(suit: str, size: int) -> np.ndarray:
    """Ink of a suit, (size, size, 1) in 0..1."""
    return _scaled(_bitmap(_SUITS[suit]), size, size)


def draw(cards: tuple[str, ...], suits: tuple[str, ...], inks: tuple[str, ...], seed: int) -> np.ndarray:
    """Four cards as an image (48, 48, 3), uint8.

    cards: names as in RANKS. suits: S, H, D or C each. inks: names of INKS. seed: of place, size, style and tint. Raises
    ValueError on other names or another number of cards.
    """
    known = set(cards) <= set(RANKS) and set(suits) <= set(_SUITS) and set(inks) <= set(INKS)
    if not known or not len(cards) == len(suits) == len(inks) == 4:
        raise ValueError(f"draw() needs four cards, suits and inks by name; got {cards}, {suits}, {inks}")
    stream = python_random(seed, "drawing")
    number, bits = stream.random, stream.getrandbits
    image = np.empty((SIDE, SIDE, 3))
    shade = 0.85 + 0.3 * number()
    image[:] = [shade * part for part in TABLE]
    face, style = 232 + 20 * number(), STYLES[bits(1)]
    warmth = np.array([0.0, -3.0, -14.0]) * number()
    for place, (card, suit, ink) in enumerate(zip(cards, suits, inks, strict=True)):
        width, height = 18 + bits(2), 20 + bits(2)
        top = place // 2 * CELL + int(number() * (CELL - height + 1))
        left = place % 2 * CELL + int(number() * (CELL - width + 1))
        paper = face + warmth
        image[top : top + height, left : left + width] = paper - 60
        image[top + 1 : top + height - 1, left + 1 : left + width - 1] = paper
        ink_less_paper = np.array(INKS[ink]) * (0.85 + 0.3 * number()) - paper
        rank = rank_mask(card, style, RANK_HEIGHTS[bits(2)])
        pip = suit_mask(suit, SUIT_SIZES[int(3 * number())])
        y, x = top + 2 + bits(1), left + 2 + bits(1)
        image[y : y + rank.shape[0], x : x + rank.shape[1]] += rank * ink_less_paper
        y, x = top + height - 2 - pip.shape[0], left + width - 2 - pip.shape[1]
        image[y : y + pip.shape[0], x : x + pip.shape[1]] += pip * ink_less_paper
    return np.clip(image, 0, 255).astype(np.uint8)


def in_their_ink(suits: tuple[str, ...]) -> tuple[str, ...]:
    """The ink that each suit has on a real card."""
    return tuple(INK_OF[suit] for suit in suits)
