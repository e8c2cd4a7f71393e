"""The leaderboard: every setting that two methods or more have run, over all seeds; never one best run."""

import kept
from kept import Line


def page() -> str:
    """Return the tables, the settings with most runs first."""
    jobs: dict[str, list[Line]] = {}
    for line in kept.lines():
        if line.by_seed or line.diverged:
            jobs.setdefault(kept.same_job(line.job), []).append(line)
    boards = [lines for lines in jobs.values() if len({each.strategy for each in lines}) > 1]
    boards.sort(key=lambda lines: -sum(len(each.by_seed) for each in lines))
    return "\n\n".join(map(_board, boards))


def _board(lines: list[Line]) -> str:
    rows = [
        "| method | seeds | accuracy, % | standard deviation | lowest seed | highest seed | MB sent | of evaluations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda line: -(line.statistic.mean or 0)):
        mean, deviation = line.statistic
        cells = [f"[{line.title()}](../methods/{line.strategy}.md)", line.seeds()]
        if mean is None:
            cells += ["diverged", "", "", "", "", ""]
        else:
            spread = "one seed" if deviation is None else f"{deviation:.2f}"
            ends = [f"{end(line.by_seed.values()):.2f}" for end in (min, max)] if deviation is not None else ["", ""]
            cells += [f"{mean:.2f}", spread, *ends, f"{line.bytes / 1e6:,.1f}", f"last {min(line.evaluations, 10)}"]
        rows.append("| " + " | ".join(cells) + " |")
    head = f"## {kept.data_title(lines[0])}\n\n{kept.clients_title(lines[0])}{_training(lines[0])}."
    table = "\n".join(rows)
    return f'{head}\n\n<div class="sortable" markdown>\n\n{table}\n\n</div>'


def _training(line: Line) -> str:
    job = line.job
    public = f", {100 * job['public_share']:.3g} % public data" if job.get("public_share") else ""
    return f"; {job['local_epochs']} local epochs, batches of {job['batch_size']}, learning rate {job['lr']}{public}"
