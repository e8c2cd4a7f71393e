"""One page to look at: the verdict, interactive curves, tables and clients of runs, as a single HTML file.

PATH is a run folder, or the folder of a sweep, tuning, comparison or what-if. The page needs no network and no other
file: it contains the library plotly.js (MIT), which is why it has 5 MB. Curves can be zoomed, have the values of all
seeds or their mean, logarithmic axes, and rounds, simulated time or bytes as x. Tables can be sorted, and copied as CSV
and LaTeX. The page follows the dark or light mode of the system. It needs the extra 'report'. With --live it renews
itself while the runs train, and nothing is written.
"""

import argparse
import base64
import copy
import csv
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_mr
from fedjax_mr import files, plots, untrusted
from fedjax_mr.analysis import groups, ledger, live, runs, tables, verdicts
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_clients
from fedjax_mr.results import kept

PAGE = Path(__file__).with_name("report.html")
LIBRARY = "package_data/plotly.min.js"  # in the package plotly
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
FILES = ("summary.json", "metrics.csv", "clients.csv", "config.json", "run.flags", "curves.png", "partition.png",
         "personal.png")  # fmt: skip
MOST_SUMMARIES = 4  # lines of the verdict without paired seeds
MOST_LINKED = 200  # runs whose files are linked
VERDICTS, RESULTS, TRIALS = "Verdicts", "Results", "Trials of the tuning"
PLACES = {title: place for place, title in enumerate((VERDICTS, RESULTS, TRIALS))}  # of tables; others follow
X = ("round", "clock", "bytes", "images", "seconds")  # possible x, if the runs have them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    help = "run folder, or folder of a sweep, tuning, comparison or what-if, or table of kept runs (NAME.jsonl.gz)"
    parser.add_argument("runs", nargs="+", metavar="PATH", help=help)
    parser.add_argument(
        "--out", metavar="FILE", help="file of the page. Default: report.html in the folder, or in analysis/ beside it"
    )
    parser.add_argument(
        "--live", action="store_true", help="show the page to browsers of this machine, on 127.0.0.1, until Ctrl-C"
    )


def main(arguments: argparse.Namespace) -> None:
    """Write the page and print its path, or serve it."""
    script = library()
    paths = [files.expand_home(path) for path in arguments.runs]
    if arguments.live:
        _serve(paths, script)
        return
    out = Path(arguments.out) if arguments.out else _default(paths)
    if out.suffix != ".html":
        raise UserError(f"--out={out} must be a file that ends in .html")
    text = filled(page(paths, out.parent), script)
    try:
        files.make_folder(out.parent)
        with files.atomic_write(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}); --out names another file") from None
    print(f"written to {out}")


def _serve(paths: Sequence[Path], script: str) -> None:
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no {path}")
    content = lambda: page(paths, paths[0]) | {"links": []}  # the server has no files but the page
    live.serve(content, lambda content: filled(content, script))


def filled(content: dict[str, Any], script: str) -> str:
    """The text of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, value in {"/*PLOTLY*/": script, "/*CONTENT*/": live.as_json(content).replace("<", "\\u003c")}.items():
        text = text.replace(mark, value, 1)
    return text


def library() -> str:
    """The text of plotly.js.

    Raises:
      UserError: the package plotly is not installed.
    """
    found = importlib.util.find_spec("plotly")
    path = None if found is None or found.origin is None else Path(found.origin).parent / LIBRARY
    if path is None or not path.exists():
        raise UserError("the report needs plotly: pip install 'fedjax_mr[report]'")
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _default(paths: Sequence[Path]) -> Path:
    if len(paths) == 1 and paths[0].is_dir():
        return paths[0] / "report.html"
    parent = paths[0].parent
    return (parent if parent.is_dir() else Path()) / "analysis" / "report.html"


# --- Content ---------------------------------------------------------------------------------------------------------


def page(paths: Sequence[Path], parent: Path) -> dict[str, Any]:
    """The content of the page, as values for JSON.

    Args:
      paths: the paths of the command.
      parent: folder of the page, from which its links start.

    Raises:
      UserError: a path holds nothing that can be shown.
    """
    content = copy.deepcopy(live.EMPTY)
    content["title"] = ", ".join(path.name or str(path) for path in paths)
    content["made"] = f"fedjax_mr {fedjax_mr.__version__}"
    with_runs = []
    for path in paths:
        if (path / ledger.LEDGER).exists():
            _add_comparison(content, path)
        if (path / "contributions.csv").exists():
            _add_contributions(content, path)
        else:
            with_runs.append(path)
        if (path / "trials.csv").exists():
            content["tables"].append(_csv_table(TRIALS, path / "trials.csv"))
            with_runs[-1] = path / "tests" if kept.find(path / "tests") else path
    if with_runs:
        _add_runs(content, groups.find(with_runs), parent)
    content["tables"].sort(key=lambda table: PLACES.get(table["title"], len(PLACES)))
    return content


def _add_comparison(content: dict[str, Any], path: Path) -> None:
    found = ledger.replay(path)
    known, unit = found.ledger, verdicts.Unit.of(found.ledger["metric"])
    content["verdict"] += found.sentences()
    budget = ledger.BUDGETS[known["equal"]]
    content["notes"] += [f"At equal {budget}.", ledger.ASSUMPTION.format(alpha=known["error"])]
    if known["tuning"]:
        rounds = ", ".join(f"{name} {count:,}" for name, count in known["tuning"]["rounds"].items())
        content["notes"].append(f"Settings tuned before on other seeds, for these numbers of rounds: {rounds}.")
    rows = []
    for (first, second), verdict in found.verdicts().items():
        ends = ["" if not math.isfinite(end) else unit.signed(end) for end in (verdict.low, verdict.high)]
        shown = [unit.signed(verdict.mean), *ends, f"{verdict.e_value:.3g}", str(verdict.count), verdict.outcome]
        rows.append([found.names[first], found.names[second], *shown])
    head = ["method", "against", f"difference{unit.words}", "from", "to", "e-value", "seeds", "verdict"]
    content["tables"].append({"title": VERDICTS, "head": head, "rows": rows})


def _add_contributions(content: dict[str, Any], path: Path) -> None:
    table = _csv_table("Contributions of the clients", path / "contributions.csv")
    head, rows = table["head"], table["rows"]
    try:
        at = {name: head.index(name) for name in ("name", "rule", "mean", "std", "metric")}
        metric = rows[0][at["metric"]]
        for rule in dict.fromkeys(row[at["rule"]] for row in rows if row[at["metric"]] == metric):
            own = [row for row in rows if row[at["rule"]] == rule]
            values = [float(row[at["mean"]]) for row in own]
            deviations = [float(row[at["std"]] or 0) for row in own]
            content["bars"].append(
                {"name": rule, "x": [row[at["name"]] for row in own], "y": values, "deviations": deviations}
            )
        first = content["bars"][0]
    except (ValueError, IndexError) as error:
        raise UserError(f"{path / 'contributions.csv'} is damaged ({error})") from None
    best = max(range(len(first["y"])), key=lambda place: first["y"][place])
    content["verdict"].append(
        f"Client {first['x'][best]} contributes most to the test {metric} ({first['name']}: {first['y'][best]:+.4f})"
    )
    content["bars_title"] = f"contribution to the test {metric.replace('_', ' ')}"
    content["tables"].append(table)


def _csv_table(title: str, path: Path) -> dict[str, Any]:
    try:
        rows = list(csv.reader(untrusted.read_text(path).splitlines()))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise UserError(f"{path} is damaged (its rows have different lengths)")
    return {"title": title, "head": rows[0], "rows": [list(map(_brief, row)) for row in rows[1:]]}


def _brief(cell: str) -> str:
    """A cell with at most six digits of a number that is no integer."""
    try:
        return f"{float(cell):.6g}" if "." in cell else cell
    except ValueError:
        return cell


def _add_runs(content: dict[str, Any], chosen: Sequence[RunRecord], parent: Path) -> None:
    """Add curves, tables, clients and files of runs."""
    lines = tables.accuracy_lines(chosen)
    settings = groups.by_setting(chosen)
    names = groups.titles_of(settings)
    looks = plots.looks(names, {name: members[0].method() for name, (_, members) in zip(names, settings, strict=True)})
    if not content["verdict"]:
        if judged := verdicts.below_table(lines, names):
            *content["verdict"], about = [each.removeprefix("verdict: ") for each in judged]
            content["notes"].append(about)
        else:
            content["verdict"] = _summaries(names, lines)
    columns: dict[str, None] = {}
    for name, (_, members) in zip(names, settings, strict=True):
        look, seeds = looks[name], []
        for run in sorted(members, key=lambda run: run.config.seed):
            rows = run.rows_so_far()
            values = {column: [_number(row.get(column)) for row in rows] for column in _columns(rows)}
            columns |= dict.fromkeys(values)
            if rows:
                values["bytes"] = [_number(runs.bytes_sent(row)) for row in rows]
                seeds.append({"seed": run.config.seed, "state": run.state, "values": values})
        content["curves"].append({"name": name, "colour": look.colour, "dash": DASHES[look.stroke], "seeds": seeds})
        if values_of := _clients(members):
            content["clients"].append({"name": name, "colour": look.colour, "values": values_of})
        if (matrix := _confusion(members)) is not None:
            content["matrices"].append({"name": name, "shares": matrix})
    content["pictures"] = _partitions(chosen)
    first = chosen[0].metric().name
    content["columns"] = sorted((each for each in columns if each not in X), key=lambda each: each != first)
    content["first"] = first
    content["x"] = [
        each for each in X if any(each in seed["values"] for curve in content["curves"] for seed in curve["seeds"])
    ]
    head, *rows = tables.accuracy_cells(lines)
    content["tables"].append({"title": RESULTS, "head": head, "rows": rows})
    content["tables"].append(_settings_table(settings, names))
    content["links"] = _links([run.path for run in chosen if not kept.is_kept(run.path)], parent)


def _summaries(names: Sequence[str], lines: Sequence[tables.Line]) -> list[str]:
    """The best settings by their means, if no seeds are paired, so that nothing can be said about differences."""
    sign = -1 if lines[0].metric.higher_is_better else 1

    def place(pair: tuple[str, tables.Line]) -> float:
        mean = pair[1].of("last_10").mean
        return math.inf if mean is None else sign * mean

    ordered = sorted(zip(names, lines, strict=True), key=place)
    shown = [_summary(name, line) for name, line in ordered[:MOST_SUMMARIES]]
    return shown + ([f"and {len(lines) - len(shown)} more settings"] if len(lines) > len(shown) else [])


def _summary(name: str, line: tables.Line) -> str:
    if not line.finished:
        return f"{name}: {tables.seeds(line)}"
    shown = tables.shown(line.of("last_10"), line.metric)
    unit = " %" if line.metric.unit == "fraction" else ""
    return f"{name}: {line.metric.title} {shown}{unit} (mean of the last evaluations, seeds: {tables.seeds(line)})"


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns with numbers."""
    known = dict.fromkeys(column for row in rows for column in row)
    return [each for each in known if any(isinstance(row.get(each), int | float) for row in rows)]


def _number(value: Any) -> float | None:
    """A number with six digits, to keep the page small. None if it is missing."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _clients(members: Sequence[RunRecord]) -> list[list[Any]]:
    """The accuracy of each client's own model: seed, client and value. Empty if the runs have none."""
    found = []
    for run in members:
        if (run.path / "clients.csv").exists():
            name = run.metric().name
            for number, row in enumerate(read_clients(run.path)):
                if row.get(name) and float(row.get("test_samples") or 0):
                    found.append([run.config.seed, number, _number(float(row[name]))])
    return found


def _confusion(members: Sequence[RunRecord]) -> list[list[float]] | None:
    """The shares [C, C] of the predicted classes among the test samples of each true class, over the ended runs.

    None if no run has the metric ``confusion``.
    """
    summaries = [run.summary() for run in members if run.state == "finished"]
    counts = [summary["confusion"] for summary in summaries if "confusion" in summary]
    if not counts:
        return None
    total = np.sum(counts, axis=0)
    return np.round(total / np.maximum(total.sum(axis=1, keepdims=True), 1), 4).tolist()


def _partitions(chosen: Sequence[RunRecord]) -> list[dict[str, str]]:
    """The picture of the partition of the first run that has one, as a data URI."""
    for run in chosen:
        if (path := run.path / "partition.png").exists():
            picture = base64.b64encode(path.read_bytes()).decode()
            words = f"Samples of each client by class, in {run.path.name}"
            return [{"words": words, "source": f"data:image/png;base64,{picture}"}]
    return []


def _settings_table(settings: Sequence[tuple[Mapping[str, Any], Sequence[RunRecord]]], names: Sequence[str]) -> dict:
    """The settings that differ, a row per setting; then those that all share, and those of single methods."""
    known = [titles.facts(members[0].config) for _, members in settings]
    varied = titles.varied(known)
    shown = lambda value: "" if value is None else json.dumps(value).strip('"')
    rows = [[flag, *(shown(each.get(flag)) for each in known)] for flag in varied]
    flags = [flag for flag in dict.fromkeys(flag for each in known for flag in each) if flag not in varied]
    common = [flag for flag in flags if all(flag in each for each in known)]
    words = lambda chosen, own: " ".join(f"--{flag}={shown(own[flag])}" for flag in chosen if own.get(flag) is not None)
    notes = [f"All: {words(common, known[0])}"]
    for name, own in zip(names, known, strict=True):
        if text := words([flag for flag in flags if flag not in common], own):
            notes.append(f"{name}: {text}")
    return {"title": "Settings that differ", "head": ["setting", *names], "rows": rows, "notes": notes}


def _links(paths: Sequence[Path], parent: Path) -> list[dict[str, Any]]:
    """The files of run folders, relative to the folder of the page."""
    found = []
    for path in paths[:MOST_LINKED]:
        of = lambda name, path=path: Path(os.path.relpath(path / name, parent)).as_posix()
        present = [{"name": name, "href": of(name)} for name in FILES if (path / name).exists()]
        found.append({"name": path.name, "files": present})
    return found
