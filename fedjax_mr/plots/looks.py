"""Colours, strokes and markers of lines. A method has the same colour and marker in all plots."""

import collections
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Okabe and Ito's colours for all kinds of colour vision (jfly.uni-koeln.de/color, 2008), the pale yellow left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#7F7F7F"
LIGHTEST = 0.5  # share of white in the lightest shade of a colour
STROKES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")  # 12 and 7 colours make 84 different pairs

# The place of a name decides its look, so add new names at the end. A column is one colour, so methods that papers
# compare with each other are in different columns.
METHODS = (
    "fedmr", "fedavg", "fedcross", "scaffold", "fedprox", "fedgen", "local",
    "pfedhr", "fccl", "fedme", "fedmd", "fedgh", "fedkemf", "centralized",
    "fedmut", "moon", "clusamp", "fedexp", "indep", "hypcluster", "fedasam",
    "fml", "fedsam", "feddyn", "pfedme", "mapper", "ditto", "feddc",
    "fedmerge", "fedspeed", "fedrep", "fedgamma", "fedsmoo", "mofedsam", "fedntd",
    "heterofl", "fedlc", "adaptivefl", "fedswa", "fedmoswa", "perfedavg", "pfedbayes",
    "fedproto", "fedtgp", "fedper", "fedbn", "lgfedavg", "gitfl", "fedbuff",
    "fedasync", "fedsa", "cabafl", "fedit", "ffalora", "fedsalora", "fedexlora",
    "flora", "flexlora", "hetlora", "rolora", "fedsubavg", "dpsgd", "gossipmr",
    "kgt", "diloco", "hierfavg", "ifca", "fedala", "fedrod", "ties",
    "taskarithmetic", "fedawa", "fedmuon",
)  # fmt: skip
_PAIRS = len(COLOURS) * len(MARKERS)
_OTHERS = 73  # the first look of methods that are not listed; those before `_PAIRS` are tried first


class Look(NamedTuple):
    """A colour, a stroke and a marker as matplotlib names them."""

    colour: str
    stroke: str
    marker: str


def look(number: int, *, variant: int = 0, variants: int = 1) -> Look:
    """The look of a number. Pairs of colour and marker repeat after 84 numbers, then with another stroke.

    The variants of a number have shades of its colour, which become lighter, and different strokes.
    """
    lap = number // _PAIRS
    stroke = STROKES[(number // len(COLOURS) + lap + variant) % len(STROKES)]
    colour = _lighter(COLOURS[number % len(COLOURS)], LIGHTEST * variant / max(1, variants - 1))
    return Look(colour, stroke, MARKERS[(number + lap + variant // len(STROKES)) % len(MARKERS)])


def _lighter(colour: str, share: float) -> str:
    """A colour, mixed with a share of white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)


def number_of(method: str) -> int:
    """The number of a method's look. For a method that is not listed, a hash of its name decides."""
    return METHODS.index(method) if method in METHODS else _OTHERS + zlib.crc32(method.encode()) % (_PAIRS - _OTHERS)


def looks(names: Iterable[str], methods: Mapping[str, str] | None = None) -> dict[str, Look]:
    """The look of each line of a plot.

    Several lines of one method share its marker and differ in their strokes and in the shades of its colour; the first
    has the colour itself. Lines without a method are grey if others have one; otherwise they have the looks in order.

    Args:
      names: names of the lines.
      methods: method by name of the line. A line need not have one.
    """
    names, methods = list(names), methods or {}
    own = {name: methods[name] for name in names if name in methods}
    if not own:
        return {name: look(place) for place, name in enumerate(names)}
    numbers, lines = _numbers(list(own.values())), collections.Counter(own.values())
    count: collections.Counter[str | None] = collections.Counter()
    chosen = {}
    for name in names:
        method = own.get(name)
        variant = count[method]
        if method is None:
            chosen[name] = _neutral(variant)
        else:
            chosen[name] = look(numbers[method], variant=variant, variants=lines[method])
        count[method] += 1
    return chosen


def _neutral(variant: int) -> Look:
    return Look(GREY, STROKES[variant % len(STROKES)], ("", *MARKERS)[variant // len(STROKES) % (len(MARKERS) + 1)])


def _numbers(methods: Sequence[str]) -> dict[str, int]:
    """The numbers of some methods. If methods that are not listed collide, the later one takes the next free number."""
    numbers: dict[str, int] = {}
    for method in dict.fromkeys(methods):
        own = number_of(method)
        free = itertools.chain([own], range(own + 1, _PAIRS), range(_OTHERS, own), itertools.count(_PAIRS))
        numbers[method] = next(number for number in free if number not in numbers.values())
    return numbers
