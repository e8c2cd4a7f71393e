"""The leaderboard: every setting with runs of at least two methods, over all seeds; never a single best run."""

from typing import Any

import kept
from kept import Line

from fedjax_mr.strategies import STRATEGIES


def page() -> str:
    """The tables. Settings of papers come first; within each kind, settings with the most runs come first.

    The learning rate belongs to the method, as it may be tuned. Trials that chose settings have no board, and neither
    has a setting in which every method diverged.
    """
    jobs: dict[str, list[Line]] = {}
    for line in kept.lines():
        if (line.by_seed or line.diverged) and not line.is_trial:
            jobs.setdefault(kept.same_job(_setting(line)), []).append(line)
    boards = [
        lines
        for lines in jobs.values()
        if len({each.strategy for each in lines}) > 1 and any(each.by_seed for each in lines)
    ]
    boards.sort(key=_papers_first)
    differences = kept.particulars([lines[0]._replace(own={}, job=_setting(lines[0])) for lines in boards])
    return "\n\n".join(map(_board, boards, differences))


def _setting(line: Line) -> dict[str, Any]:
    """The settings that the lines of a board share."""
    return {flag: value for flag, value in line.job.items() if flag != "lr"}


def _papers_first(lines: list[Line]) -> tuple[bool, int]:
    return not any(each.compared for each in lines), -sum(len(each.by_seed) for each in lines)


def _method(line: Line) -> str:
    """The method with a link to its page. The method of a plug-in has no page."""
    return f"[{line.title()}](../methods/{line.strategy}.md)" if line.strategy in STRATEGIES else line.title()


def _board(lines: list[Line], differs: str) -> str:
    metric = lines[0].metric
    unit = f"{metric.title}, %" if metric.unit == "fraction" else metric.title
    heads = ["method", "learning rate", "tuning", "seeds", unit, "lowest to highest seed", "MB sent"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    sign = -1 if metric.higher_is_better else 1
    for line in sorted(lines, key=lambda line: sign * (line.statistic.mean or 0)):
        several = (
            f"{min(line.by_seed.values()):.2f} to {max(line.by_seed.values()):.2f}" if len(line.by_seed) > 1 else ""
        )
        cells = [
            _method(line),
            str(line.job["lr"]),
            line.budget or "-",
            line.seeds(),
            line.value(named=False) or "diverged",
            several,
            f"{line.bytes / 1e6:,.1f}" if line.by_seed else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    first, job, table = lines[0], lines[0].job, "\n".join(rows)
    tested = min(10, *(line.evaluations for line in lines if line.by_seed))
    facts = [
        kept.clients_title(first),
        f"{job['local_epochs']} local epochs, batches of {job['batch_size']}",
        f"{100 * job['public_share']:.3g} % public data" if job.get("public_share") else "",
        f"mean of the last {tested} evaluations",
        kept.OWN_SAMPLES if job.get("eval_clients") else "",
    ]
    head = f"## {kept.data_title(first)}: {kept.titles.network(first.config.model)}, {first.config.rounds} rounds"
    head += f"; {differs}" * bool(differs)
    return f'{head}\n\n{"; ".join(filter(None, facts))}.\n\n<div class="sortable" markdown>\n\n{table}\n\n</div>'
