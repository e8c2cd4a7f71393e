"""The font of the equations: STIX Two Math (SIL Open Font License), from the package ziamath, cut to what pages need.

Browsers draw MathML with any font, but signs grow with what they enclose only in one that has a table for mathematics.
"""

import importlib.metadata
import io

from fontTools import subset
from fontTools.ttLib import TTFont

PATH = "assets/stix-two-math.woff"
# Code points, first and last: Latin, accents, Greek, signs, arrows, operators, brackets; letters as variables.
RANGES = (
    (0x20, 0x7E), (0xA0, 0xB7), (0x300, 0x36F), (0x391, 0x3F6), (0x2010, 0x2057), (0x2102, 0x2135), (0x2190, 0x2194),
    (0x2200, 0x22A5), (0x2308, 0x230B), (0x27E8, 0x27E9), (0x1D434, 0x1D467), (0x1D49C, 0x1D4B5), (0x1D6E2, 0x1D71B),
)  # fmt: skip


def font() -> bytes:
    """Return the font as a WOFF file."""
    whole = TTFont(importlib.metadata.distribution("ziamath").locate_file("ziamath/fonts/STIXTwoMath-Regular.ttf"))
    part = subset.Subsetter(subset.Options(layout_features=["ssty"], notdef_outline=True))
    part.populate(unicodes=[code for first, last in RANGES for code in range(first, last + 1)])
    part.subset(whole)
    whole.flavor = "woff"
    file = io.BytesIO()
    whole.save(file)
    return file.getvalue()
