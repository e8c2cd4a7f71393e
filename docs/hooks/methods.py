"""The page of a method: its prose, and what the registry, the head of its file and the kept results contain."""

import functools
import html
import inspect
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import drawings
import kept
import traffic
import yaml
from mkdocs.exceptions import PluginError

from fedjax_mr.analysis import tables
from fedjax_mr.config import settings
from fedjax_mr.strategies import STRATEGIES, by_group

ROOT = Path(__file__).parents[2]
PROSE = ROOT / "docs" / "methods"
# A page in a clone is readable as it is. The site replaces its title and its last section, and reads the facts.
FORM = re.compile(r"# (?P<title>[^\n]*)\n(?P<text>.*)\n## The rest\n.*\n<!-- facts\n(?P<facts>.*)\n-->\n", re.DOTALL)
KEYS = {"work", "traffic", "tests", "command"}
# Column of the table of all methods: the link that stands for its kind.
LINKS = {"compression": "QSGD", "privacy": "privacy, noise on uploads", "attacks": "sign flip", "robust": "Multi-Krum"}


class Prose(NamedTuple):
    """The hand-written part of a page.

    Attributes:
      work: description of what a local step and the server compute.
      traffic: description of what the table of traffic cannot count; "" if it counts everything.
      tests: tested identities: name of the test -> what it shows.
      command: the command that trains the method; "" for the main job.
      text: three sentences, then the algorithm.
    """

    work: str
    traffic: str
    tests: dict[str, str]
    command: str
    text: str


@functools.cache
def prose(name: str) -> Prose:
    """Read the prose of a method.

    Raises:
      PluginError: the page or a part of it is missing, or it names a test that does not exist.
    """
    path = PROSE / f"{name}.md"
    if not path.exists():
        raise PluginError(f"the strategy {name} has no prose: write docs/methods/{name}.md")
    parts = FORM.fullmatch(path.read_text(encoding="utf-8"))
    if parts is None or parts["title"] != STRATEGIES[name].title:
        raise PluginError(f"{path}: expected '# TITLE', the prose, '## The rest', and a comment with facts at the end")
    facts: dict[str, Any] = yaml.safe_load(parts["facts"])
    if not set(facts) <= KEYS or not facts.get("work"):
        raise PluginError(f"{path}: the facts may be {', '.join(sorted(KEYS))}; work is required")
    for test in facts.get("tests") or {}:
        file, _, function = test.partition("::")
        source = ROOT / "tests" / "strategies" / file
        if not source.exists() or not re.search(rf"^def {function}\(", source.read_text(encoding="utf-8"), re.M):
            raise PluginError(f"{path}: there is no test {test} in tests/strategies")
    text = parts["text"].strip()
    if "## The algorithm" not in text or "$" not in text:
        raise PluginError(f"{path} has no section 'The algorithm' with an equation")
    beside, tests, command = facts.get("traffic", ""), facts.get("tests") or {}, facts.get("command", "")
    return Prose(facts["work"], beside, tests, command, text)


def check_prose() -> None:
    """Check the prose of all methods.

    Raises:
      PluginError: a method has no page, or a page has no method.
    """
    for name in STRATEGIES:
        prose(name)
    if others := {path.stem for path in PROSE.glob("*.md")} - set(STRATEGIES) - {"index"}:
        raise PluginError(f"docs/methods has pages without a strategy: {', '.join(sorted(others))}")


def navigation() -> list[Any]:
    """The entries of the navigation: all methods by group."""
    entries: list[Any] = [{"All methods": "methods/index.md"}]
    for group, names in by_group().items():
        entries.append({group.capitalize(): [{STRATEGIES[name].title: f"methods/{name}.md"} for name in names]})
    return [*entries, {"Additions": "additions.md"}]


def facts() -> str:
    """The table of all methods with their facts, with filters."""
    heads = ["method", "group", "server keeps", "client keeps", "sent", "public data", "real clients", "asynchronous"]
    rows = [f"| {' | '.join([*heads, *LINKS])} |", f"|{'---|' * (len(heads) + len(LINKS))}"]
    rows += [f"| {' | '.join(_facts(name))} |" for name in STRATEGIES]
    return "\n".join(['<div class="filterable sortable" markdown>', "", *rows, "", "</div>"])


def sentences() -> str:
    """All methods by group, each with its first sentence."""
    parts = []
    for group, names in by_group().items():
        rows = ["| method | what it does |", "|---|---|"]
        for name in names:
            row = STRATEGIES[name]
            rows.append(f"| [{row.title}]({name}.md) `{name}`<br><small>{row.paper}</small> | {_first(name)} |")
        parts.append("\n".join([f"## {group.capitalize()}", "", *rows]))
    return "\n\n".join(parts)


def _facts(name: str) -> list[str]:
    """The cells of a method in the table of all methods."""
    row, found, links = STRATEGIES[name], traffic.count(name), _links().get(name, ["not tried"] * len(LINKS))
    models = [f"{size / found.model:.3g}" for size in (found.server, found.kept, found.down + found.up + found.peer)]
    public = "needed" if traffic.needs_public(name) else "optional" if row.public else "no"
    real = "no" if row.only_simulated else "yes"
    alone = "yes" if found.asynchronous else "no"
    return [f"[{row.title}]({name}.md)", row.group, *models, public, real, alone, *links]


@functools.cache
def _links() -> dict[str, list[str]]:
    """For each method, whether the kinds of links in `LINKS` work, from the page of every link with every method."""
    text = (ROOT / "docs" / "channel_matrix.md").read_text(encoding="utf-8")
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    uniform = re.findall(r"^(\d+)\. .*pass weights=uniform", text, flags=re.MULTILINE)
    words = {"✓": "yes"} | dict.fromkeys(uniform, "if uniform")
    tables = [dict(zip(heads, row, strict=True)) for row in rows]
    return {cells["method"]: [words.get(cells[link], "no") for link in LINKS.values()] for cells in tables}


def _first(name: str) -> str:
    """The first sentence of a method's prose."""
    return re.split(r"(?<=[.])\s", " ".join(prose(name).text.split()), maxsplit=1)[0]


def page(name: str) -> str:
    """The page of a method in Markdown."""
    row, own = STRATEGIES[name], prose(name)
    what, _, algorithm = own.text.partition("## The algorithm")
    head = f"*{row.paper}* · `--strategy={name}` · file `{_file(row.build).relative_to(ROOT)}`"
    drawn = drawings.drawing(name) if name in drawings.DRAWINGS else ""
    source, deviations = _head(row.build)
    if others := [f"[{STRATEGIES[each].title}]({each}.md)" for each in _neighbours(name)]:
        source += f"\n\n*This method shares its file with {', '.join(others)}. These notes are about all of them.*"
    sections = {
        "The algorithm": f"{drawn}\n\n{algorithm.strip()}\n\nThe [glossary](../glossary.md) explains the letters.",
        "Traffic and memory": _traffic(name, own),
        "Settings": settings_of(name),
        "Sources": source,
        "Deviations and choices": deviations or "The head of the file names none.",
        "Cost": _cost(name, own),
        "Tested identities": _tests(own),
        "Our results": _numbers(name),
        "Train it": _command(name, own),
    }
    parts = [f"# {row.title}", head, what.strip()]
    for title, text in sections.items():
        parts += [f"## {title}", text]
    return "\n\n".join(parts)


def _plain(function: Any) -> Any:
    """The function behind partial applications."""
    return _plain(function.func) if isinstance(function, functools.partial) else function


def _file(build: Any) -> Path:
    return Path(inspect.getfile(_plain(build)))


def _neighbours(name: str) -> list[str]:
    """The other methods of the same file."""
    files = {each: _file(row.build) for each, row in STRATEGIES.items()}
    return [each for each, file in files.items() if file == files[name] and each != name]


def _head(build: Any) -> tuple[str, str]:
    """The head of a strategy's file in Markdown: its sources, then its deviations."""
    module = sys.modules[_plain(build).__module__]
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")[1:]
    first = next((at for at, text in enumerate(paragraphs) if text.startswith("Deviation")), len(paragraphs))
    shown = [_markdown(text) for text in paragraphs]
    deviations = re.sub(r"^Deviations?( and choices)?[.:]\s+", "", "\n\n".join(shown[first:]))
    return "\n\n".join(shown[:first]), deviations[:1].upper() + deviations[1:]


def _markdown(paragraph: str) -> str:
    """Convert a paragraph of a docstring to Markdown."""
    if paragraph.startswith("    "):
        return paragraph
    lead, *items = re.split(r"(?:^|\n)\* ", html.escape(paragraph, quote=False))
    lead, *items = (re.sub(r"([*|$])", r"\\\1", each) for each in (lead, *items))
    text = "\n\n".join(filter(None, (lead, "\n".join(f"- {item}" for item in items))))
    return _flags(re.sub(r"``(.*?)``", r"`\1`", text, flags=re.DOTALL))


def _flags(text: str) -> str:
    """Mark the flags of a text as code."""
    return re.sub(r"(`[^`]*`)|(?<![\w-])(--\w+)", lambda found: found[1] or f"`{found[2]}`", text)


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def settings_of(name: str) -> str:
    """The table of a method's own flags."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for each in settings.settings_of(STRATEGIES[name].hyper, f"{name}_"):
        default = ("on" if each.default else "off") if each.kind is bool else each.default
        default = "none" if default in (None, ()) else default
        allowed = each.info.allowed() or ", ".join(f"`{choice}`" for choice in each.info.choices or ())
        facts = [each.info.unit, allowed, f"source: {each.info.source or 'our choice'}"]
        help = _flags(f"{each.info.help}<br><small>{'; '.join(filter(None, facts))}</small>")
        rows.append(f"| {' | '.join(map(_cell, (f'`--{each.flag}`', f'`{default}`', help)))} |")
    if len(rows) == 2:
        return "The method has no flags of its own."
    return "\n".join([*rows, "", f"`python -m fedjax_mr.main --help={name}` prints the same."])


def _traffic(name: str, own: Prose) -> str:
    found = traffic.count(name)

    def models(size: float) -> str:
        count = f"{size / found.model:.3g}"
        return f"{size:,.0f} bytes" + (f" ({count} model{'s' * (count != '1')})" if size else "")

    rows = [
        ("sent to each client in a round", models(found.down)),
        ("sent by each client to the server in a round", models(found.up)),
        ("sent by each client to other clients in a round", models(found.peer)),
        ("kept by a client between rounds", models(found.kept)),
        ("kept by the server between rounds", models(found.server)),
    ]
    lines = ["| in the main job | size |", "|---|---|", *(f"| {what} | {size} |" for what, size in rows)]
    if found.first:
        down, up, _ = found.first
        lines.append(f"| in the first round | {down:,.0f} bytes sent to each client, {up:,.0f} sent by each client |")
    return "\n".join(
        [
            *lines,
            "",
            f"Counted from the shapes of the arrays in the main job: digits, N = 20, K = 5, a network of "
            f"{found.model:,} bytes. FedAvg sends one model to each client and one model back. {own.traffic}",
            "",
            _real_clients(name),
        ]
    )


def _real_clients(name: str) -> str:
    """Whether a method runs on real clients, and what clients then tell the server."""
    row = STRATEGIES[name]
    if row.only_simulated:
        return f"The method is only simulated: {row.only_simulated}."
    counts = " They tell the server how many samples of each class they have." if row.label_counts else ""
    return f"The method also runs on [real clients](../recipes/real_clients.md).{counts}"


def _cost(name: str, own: Prose) -> str:
    measured, lines = kept.costs().get(name), [own.work]
    if measured and name != "fedavg":
        lines.append(
            f"Measured: a round takes **{measured['cost']} rounds of FedAvg** ({measured['job']}; "
            f"{measured['machine']})."
        )
    elif name != "fedavg" and (found := kept.seconds(name)):
        runs = "one run" if found[1] == 1 else f"median of {found[1]} runs"
        lines.append(
            f"In the kept runs, a round took {found[0]:.1f} times as long as FedAvg's ({runs} on a shared "
            "machine, so this is a rough value)."
        )
    elif name != "fedavg":
        lines.append("The time of a round has not been measured.")
    return "\n\n".join(lines)


def _tests(own: Prose) -> str:
    if not own.tests:
        return (
            "The method has no tests of its own. It passes [the contract](../design.md#the-contract) of all strategies."
        )
    rows = [f"- {what} (`{test}`)" for test, what in own.tests.items()]
    return "\n".join([*rows, "", "It also passes [the contract](../design.md#the-contract) of all strategies."])


def _numbers(name: str) -> str:
    lines = kept.of(name)
    if not lines:
        return "There are no kept runs of this method yet."
    compared = any(line.published for line in lines)
    rows = [
        f"| setting | seeds | accuracy, % |{' published, %: verdict |' * compared}",
        f"|---|---|---|{'---|' * compared}",
    ]
    lines = sorted(lines, key=_compared_first)
    for line, differs in zip(lines, kept.particulars(lines), strict=True):
        own = ", ".join(f"{key.replace('_', ' ')} = {value}" for key, value in line.own.items())
        facts = "; ".join(filter(None, [kept.clients_title(line), own, differs]))
        setting = f"{kept.data_title(line)}<br><small>{facts}</small>"
        cells = [setting, line.seeds(), line.value() or "diverged"]
        papers = [
            f"{tables.plus_minus(number.mean, number.deviation, digits=2)}: {line.verdict(number)}"
            f"<br><small>{number.source}</small>"
            for number in line.published
        ]
        rows.append(f"| {' | '.join([*cells, *(['<br>'.join(papers)] if compared else [])])} |")
    return "\n".join(
        [
            *rows,
            "",
            "Accuracy: mean of the last ten evaluations (of all, if there are fewer) ± standard deviation over the "
            "seeds, from the metrics in `experiments/results`. *Replicates*: within 1.5 points of the published "
            "mean, or within two of our standard deviations (*spread*). See [the record](../results/index.md) and "
            "[the leaderboard](../results/leaderboard.md).",
        ]
    )


def _compared_first(line: kept.Line) -> tuple[bool, bool, str]:
    return not line.published, not line.compared, kept.data_title(line)


def _command(name: str, own: Prose) -> str:
    one = own.command or " ".join(["python -m fedjax_mr.main", *traffic.flags(name)])
    public = " --public_share=0.1" if traffic.needs_public(name) else ""
    many = f"python -m fedjax_mr.sweep --strategies=fedavg,{name} --seeds=0:3{public}"
    return "\n".join(["```sh", one, *([many] if name != "fedavg" else []), "```"])
