"""The drawings of the concepts and of four methods, as SVG with the colours of the page, light or dark."""

import html
from collections.abc import Callable, Sequence

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd")  # of the models
WIDTH = 620
CELL, GAP = 26, 3  # a layer of a model, and the room between two

# --- Parts -----------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, *, anchor: str = "middle", small: bool = False) -> str:
    """Return a line of text; ``y`` is its middle."""
    kind = "small" if small else "label"
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, words: str = "", *, colour: str = "", small: bool = False
) -> str:
    """Return a box with lines of text in its middle."""
    style = f' style="fill:{colour};fill-opacity:.22;stroke:{colour}"' if colour else ""
    lines = words.split("\n") if words else []
    middle, step = y + height / 2, 16 if small else 19
    rows = [
        text(x + width / 2, middle + step * (row - (len(lines) - 1) / 2), line, small=small)
        for row, line in enumerate(lines)
    ]
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="box"{style}/>' + "".join(rows)


def arrow(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, both: bool = False) -> str:
    """Return an arrow."""
    kind = "arrow dashed" if dashed else "arrow"
    start = ' marker-start="url(#head)"' if both else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}" marker-end="url(#head)"{start}/>'


def model(x: float, y: float, colours: Sequence[str], *, width: float = 46, names: Sequence[str] = ()) -> str:
    """Return a model as a column of layers, the first at the bottom."""
    parts = []
    for layer, colour in enumerate(reversed(colours)):
        top = y + layer * (CELL + GAP)
        parts.append(f'<rect x="{x}" y="{top}" width="{width}" height="{CELL}" rx="3" style="fill:{colour}"/>')
        if names:
            label = html.escape(list(reversed(names))[layer])
            parts.append(f'<text x="{x + width / 2}" y="{top + CELL / 2}" class="inside">{label}</text>')
    return "".join(parts)


def height_of(layers: int) -> float:
    """Return the height of a model."""
    return layers * (CELL + GAP) - GAP


def svg(height: float, label: str, *parts: str, caption: str = "", kind: str = "drawing") -> str:
    """Return a drawing as one line of HTML; ``kind``: its classes in `docs/assets/site.css`."""
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}">'
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}"><div>{head}{"".join(parts)}</svg></div>{below}</figure>'


def figure(height: float, caption: str, *parts: str, kind: str = "drawing") -> str:
    """Return a drawing that may have arrows, with its caption, as one line of HTML."""
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" class="head"/></marker></defs>'
    )
    return svg(height, caption, head, *parts, caption=caption, kind=kind)


# --- Concepts --------------------------------------------------------------------------------------------------------


def round_() -> str:
    """One round: select, dispatch, train, upload, update."""
    parts = [box(20, 20, 580, 54, "server: the state of the strategy")]
    for number, x in enumerate((40, 245, 450)):
        colour = COLOURS[number]
        parts += [
            arrow(x + 35, 76, x + 35, 134),
            arrow(x + 95, 134, x + 95, 76),
            box(x, 136, 130, 62, f"client {(7, 2, 15)[number]}\ntrains", colour=colour),
        ]
    parts += [
        text(62, 106, "payload", anchor="end", small=True),
        text(145, 106, "upload", anchor="start", small=True),
        text(310, 222, "the cohort: K = 3 of N = 20 clients, all in one compiled program", small=True),
    ]
    return figure(
        240,
        "A round. The strategy selects a cohort and sends a payload to each client. The clients train and "
        "upload. The strategy updates its state.",
        *parts,
    )


def cohort() -> str:
    """N clients of different sizes; K of them take part."""
    sizes = (18, 9, 30, 14, 22, 40, 12, 26, 8, 34, 16, 20, 11, 28, 24, 13, 36, 10, 19, 15)
    drawn = {2: 0, 6: 1, 11: 2, 14: 3, 16: 4}
    parts = []
    for client, size in enumerate(sizes):
        x = 20 + client * 29
        tall = 3.2 * size
        style = f'style="fill:{COLOURS[drawn[client]]}"' if client in drawn else 'class="pale"'
        parts.append(f'<rect x="{x}" y="{140 - tall}" width="21" height="{tall}" rx="2" {style}/>')
        parts.append(text(x + 10.5, 154, str(client), small=True))
    parts.append(text(310, 180, "client; the height is its number of samples", small=True))
    return figure(
        196,
        "A cohort: K = 5 of N = 20 clients take part in this round (coloured). By default they are drawn "
        "uniformly, without replacement, in random order.",
        *parts,
    )


def strategy() -> str:
    """The members of a strategy in the order in which a round calls them."""
    names = ("init", "select", "dispatch", "client_update", "server_update")
    parts = []
    for number, name in enumerate(names):
        x = 8 + number * 123
        client = name == "client_update"
        parts.append(box(x, 40, 112, 48, name, colour=COLOURS[1] if client else COLOURS[0], small=True))
        if number:
            parts.append(arrow(x - 11, 64, x - 1, 64))
    parts += [
        '<path d="M 552 90 C 552 150, 190 150, 190 92" class="arrow" fill="none" marker-end="url(#head)"/>',
        text(370, 150, "state: the next round", small=True),
        text(432, 24, "written for one client", small=True),
        text(64, 106, "once", small=True),
    ]
    return figure(
        168,
        "The functions of a strategy. select has a default. The engine calls client_update for all K clients at once.",
        *parts,
    )


def zoo() -> str:
    """Networks of different size as vectors of one length, and a switch."""
    parts, sizes = [], (3, 5, 2)
    for row, (size, colour) in enumerate(zip(sizes, COLOURS, strict=False)):
        y = 22 + row * 44
        parts.append(text(96, y + 15, f"client {row}: network {row}", small=True))
        parts.append(f'<rect x="190" y="{y}" width="{size * 44}" height="30" rx="3" style="fill:{colour}"/>')
        if size < 5:
            parts.append(
                f'<rect x="{190 + size * 44}" y="{y}" width="{(5 - size) * 44}" height="30" rx="3" class="pale"/>'
            )
        parts.append(arrow(418, y + 15, 476, y + 15))
    parts += [
        box(480, 22, 120, 118, "switch on\nthe number:\nonly that\nnetwork runs", small=True),
        text(300, 166, "parameters as a vector, filled up to the largest network's length", small=True),
    ]
    return figure(
        182,
        "A zoo: clients with networks of different architectures in one compiled program.",
        *parts,
    )


def lanes() -> str:
    """Clients over two devices with two lanes each."""
    parts = []
    for device in range(2):
        x = 20 + device * 300
        parts += [box(x, 14, 280, 176), text(x + 140, 34, f"device {device}", small=True)]
        for lane in range(2):
            y = 54 + lane * 66
            parts.append(text(x + 12, y + 22, f"lane {lane}", anchor="start", small=True))
            for place in range(3):
                client, at = place * 4 + device * 2 + lane, (x + 64 + place * 70, y, 62, 44)
                words, colour = (f"client\n{client}", COLOURS[client % 4]) if client < 10 else ("padding", "")
                parts.append(box(*at, words, colour=colour, small=True))
    parts.append(text(310, 208, "time: left to right", small=True))
    return figure(
        222,
        "Lanes and devices: K = 10 clients on D = 2 devices with 2 lanes each. The lanes of a device train side by "
        "side. Results do not depend on the layout, to float tolerance.",
        *parts,
    )


# --- Methods ---------------------------------------------------------------------------------------------------------


def fedmr() -> str:
    """Layers of three models change places."""
    blue, red, green = COLOURS[:3]
    before = ([blue] * 4, [red] * 4, [green] * 4)
    after = ([red, blue, green, blue], [green, green, blue, red], [blue, red, red, green])
    parts = []
    for number in range(3):
        parts += [
            model(30 + number * 62, 50, before[number]),
            model(390 + number * 62, 50, after[number]),
            text(53 + number * 62, 182, f"model {number + 1}", small=True),
            text(413 + number * 62, 182, f"model {number + 1}", small=True),
        ]
    parts += [
        text(115, 28, "trained by three clients"),
        text(475, 28, "next round"),
        arrow(225, 106, 375, 106),
        text(300, 88, "each layer: its own", small=True),
        text(300, 128, "random permutation", small=True),
    ]
    return figure(
        200,
        "FedMR with K = 3 models of four layers. Each row keeps its three layers, so the mean of the models does not "
        "change.",
        *parts,
        kind="drawing fits",
    )


def fedcross() -> str:
    """Each model takes a small part of its collaborator."""
    parts = [text(115, 28, "trained by three clients"), text(475, 28, "next round")]
    for number in range(3):
        own, other = COLOURS[number], COLOURS[(number + 1) % 3]
        x = 390 + number * 62
        parts += [
            model(30 + number * 62, 50, [own] * 4),
            model(x, 50, [own] * 4),
            f'<rect x="{x + 38}" y="50" width="8" height="{height_of(4)}" rx="2" style="fill:{other}"/>',
            text(53 + number * 62, 182, f"model {number + 1}", small=True),
            text(x + 23, 182, f"model {number + 1}", small=True),
        ]
    parts += [
        arrow(225, 106, 375, 106),
        text(300, 88, "0.99 (alpha) of itself,", small=True),
        text(300, 128, "0.01 of a collaborator", small=True),
    ]
    return figure(
        200,
        "FedCross with K = 3 models. Each model takes a small share of one other model (the strip, not to scale).",
        *parts,
    )


def fedme() -> str:
    """Two clients exchange their models, train both, and keep the better."""
    blue, red = COLOURS[:2]
    parts = [
        box(20, 34, 270, 190),
        box(330, 34, 270, 190),
        text(155, 20, "client 1"),
        text(465, 20, "client 2"),
        model(60, 130, [blue] * 3),
        model(180, 72, [red] * 5),
        model(385, 72, [red] * 5),
        model(510, 130, [blue] * 3),
        text(83, 50 + 8, "own", small=True),
        text(203, 58, "received", small=True),
        text(408, 58, "own", small=True),
        text(533, 58, "received", small=True),
        arrow(110, 170, 176, 170, both=True),
        arrow(436, 170, 506, 170, both=True),
        text(143, 156, "learn", small=True),
        text(471, 156, "learn", small=True),
        text(155, 246, "keeps the one with the lower held-out loss", small=True),
        text(465, 246, "keeps the one with the lower held-out loss", small=True),
    ]
    return figure(
        264,
        "FedMe: two clients of one cluster have exchanged their models. Each trains its own and the received one "
        "together, keeps the better one, and uploads both.",
        *parts,
    )


def pfedhr() -> str:
    """Blocks are grouped, reassembled with stitches, and matched with a client."""
    blue, red, green, orange = COLOURS[:4]
    networks = ([blue, red, green, orange], [blue, red, orange], [blue, green, orange])
    parts = [text(110, 20, "1. uploaded networks"), text(352, 20, "2. a candidate"), text(535, 20, "3. its pupil")]
    for number, blocks in enumerate(networks):
        top = 44 + (4 - len(blocks)) * (CELL + GAP)
        parts += [
            model(20 + number * 64, top, blocks, width=50, names=["ABC"[number]] * len(blocks)),
            text(45 + number * 64, 178, f"client {'ABC'[number]}", small=True),
        ]
    candidate = ((blue, "B"), (red, "A"), (green, "C"), (orange, "B"))
    for place, (colour, owner) in enumerate(candidate):
        top = 160 - place * 39
        parts.append(model(320, top, [colour], width=64, names=[owner]))
        if place:
            parts.append(f'<path d="M352 {top + 26.5} l7 6 -7 6 -7 -6z" class="stitch"/>')
    parts += [
        arrow(222, 110, 300, 110),
        text(261, 96, "group, take", small=True),
        text(261, 128, "one of each", small=True),
        arrow(400, 110, 480, 110),
        text(440, 96, "outputs", small=True),
        text(440, 128, "most alike", small=True),
        box(486, 84, 100, 52, "client B\nlearns from it", small=True),
        text(352, 206, "diamonds: stitches; trained on public data", small=True),
    ]
    return figure(
        222,
        "pFedHR: blocks of one colour do the same work (a group). A candidate takes a block of each group, joined by "
        "stitches, and teaches the client with the most similar outputs.",
        *parts,
    )


DRAWINGS: dict[str, Callable[[], str]] = {
    "round": round_,
    "cohort": cohort,
    "strategy": strategy,
    "zoo": zoo,
    "lanes": lanes,
    "fedmr": fedmr,
    "fedcross": fedcross,
    "fedme": fedme,
    "pfedhr": pfedhr,
}


def drawing(name: str) -> str:
    """Return a drawing by its name.

    Raises:
      KeyError: there is none of that name.
    """
    return DRAWINGS[name]()
