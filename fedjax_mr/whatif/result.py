"""The results of trained coalitions: values, contributions, files and a table."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedjax_mr import plots
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.whatif import contributions
from fedjax_mr.whatif.approximations import RULES, UNITS, Round, approximations
from fedjax_mr.whatif.coalitions import Coalition, by_size, text
from fedjax_mr.whatif.record import write_csv
from fedjax_mr.whatif.uploads import NUMBERS

BARS = ("shapley", "banzhaf", "leave_one_out", "alone")  # rules in the picture of contributions, if there are any


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """The test results of the federations of many coalitions.

    Letters: N clients, S seeds.

    Attributes:
      names: names of the clients [N].
      sizes: their training samples [N].
      seeds: seeds of the training [S].
      rows: the columns of each seed and coalition, such as ``accuracy`` and ``loss``.
      metric: the column that is the value of a coalition.
      lower: the columns of which lower values are better.
      orders: random orders of the clients [M, N] for the rules that use them.
      rebuilt: the columns of the models that are rebuilt from uploads, by seed, round and coalition. Without them,
        there are no approximations.
    """

    names: tuple[str, ...]
    sizes: np.ndarray
    seeds: tuple[int, ...]
    rows: Mapping[tuple[int, Coalition], Mapping[str, float]]
    metric: str
    lower: frozenset[str]
    orders: np.ndarray
    rebuilt: Mapping[tuple[int, int, Coalition], Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"WhatIf({len(self.coalitions)} coalitions of {len(self.names)} clients, {len(self.seeds)} seeds)"

    @functools.cached_property
    def coalitions(self) -> list[Coalition]:
        """The coalitions, by size."""
        return sorted({coalition for _, coalition in self.rows}, key=by_size)

    def value(self, clients: Iterable[int], metric: str | None = None) -> np.ndarray:
        """A test result of the federation of some clients, for each seed [S].

        Args:
          clients: numbers of the clients.
          metric: a column of the results. Default: `metric`.

        Raises:
          UserError: this coalition was not trained, or there is no such column.
        """
        coalition = frozenset(clients)
        if coalition not in self.coalitions:
            raise UserError(f"the federation of clients {text(coalition)} was not trained: add it to coalitions=")
        return np.array([self.rows[seed, coalition][self._column(metric)] for seed in self.seeds])

    def contributions(self, metric: str | None = None) -> dict[str, np.ndarray]:
        """The contribution of each client by rule [S, N]. Higher is better.

        The rules are those of `fedjax_mr.whatif.contributions` and of `fedjax_mr.whatif.approximations`.

        Args:
          metric: a column of the results. If lower values of it are better, its sign is changed. Default: `metric`.
        """
        sign = -1.0 if self._column(metric) in self.lower else 1.0
        values = {each: sign * self.value(each, metric) for each in self.coalitions}
        found = contributions.contributions(values, len(self.names), self.orders)
        return found | self._approximations(sign, metric)

    def table(self) -> str:
        """The contributions as a table: the mean over the seeds and, with several seeds, the standard deviation.

        The last rows have the sums over all clients, and how far each rule ranks the clients as Shapley values do.
        Approximations follow in a table of their own.
        """
        found = self.contributions()
        exact = {rule: values for rule, values in found.items() if rule not in RULES}
        nobody, everyone = (_shown(self.value(each)) for each in ((), range(len(self.names))))
        lines = [
            f"test {self.metric}: {nobody} without clients, {everyone} with all of them",
            *self._lines(exact, found),
        ]
        if self.rebuilt:
            own = {rule: values for rule, values in found.items() if rule in RULES}
            lines += ["", "approximations from the uploads of one training run:", *self._lines(own, found)]
        return "\n".join(lines)

    def _lines(self, found: Mapping[str, np.ndarray], every: Mapping[str, np.ndarray]) -> list[str]:
        """The lines of a table with a column for each rule. ``every``: the contributions by all rules."""
        cells = [["client", "samples", *found]]
        cells += [
            [name, f"{size}", *(_shown(values[:, client]) for values in found.values())]
            for client, (name, size) in enumerate(zip(self.names, self.sizes, strict=True))
        ]
        cells.append(["all", f"{self.sizes.sum()}", *(_shown(values.sum(axis=1)) for values in found.values())])
        if "shapley" in every:
            ranks = _ranks(every["shapley"], found).values()
            cells.append(["rank correlation with shapley", "", *(f"{each:.2f}" for each in ranks)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]

    def _approximations(self, sign: float, metric: str | None) -> dict[str, np.ndarray]:
        """The approximations, of the column times ``sign``."""
        if not self.rebuilt:
            return {}
        rounds: dict[tuple[int, int], dict[Coalition, Mapping[str, float]]] = {}
        for (seed, round, coalition), columns in sorted(self.rebuilt.items(), key=lambda row: row[0][:2]):
            rounds.setdefault((seed, round), {})[coalition] = columns
        runs: dict[int, list[Round]] = {seed: [] for seed in self.seeds}
        for (seed, _), rows in rounds.items():
            single = {next(iter(coalition)): columns for coalition, columns in rows.items() if len(coalition) == 1}
            numbers = ({client: columns[name] for client, columns in single.items()} for name in NUMBERS)
            values = {each: sign * columns[self._column(metric)] for each, columns in rows.items()}
            runs[seed].append(Round(values, *numbers))
        return approximations(list(runs.values()), len(self.names))

    def write(self, folder: Path | str, *, picture_format: str = "png") -> None:
        """Write ``contributions.csv`` and pictures into a folder.

        Besides the bars of the contributions there is a lattice of all coalitions of at most six clients, and the
        approximations against the exact Shapley values, if both are known.
        """
        found, count, words = self.contributions(), len(self.seeds), self.metric.replace("_", " ")
        write_csv(
            Path(folder) / "contributions.csv",
            [
                {
                    "client": client,
                    "name": name,
                    "samples": int(self.sizes[client]),
                    "metric": UNITS.get(rule, self.metric),
                    "rule": rule,
                    "mean": float(values[:, client].mean()),
                    "std": float(values[:, client].std(ddof=1)) if count > 1 else "",
                    "seeds": count,
                }
                for rule, values in found.items()
                for client, name in enumerate(self.names)
            ],
        )
        shown = {rule: values for rule, values in found.items() if rule in BARS} or found
        if shown:
            plots.contributions(
                shown,
                Path(folder) / f"contributions.{picture_format}",
                names=self.names,
                y_label=f"contribution to the test {words}",
            )
        clients = len(self.names)
        if clients <= plots.MOST_IN_LATTICE and len(self.coalitions) == 2**clients:
            plots.lattice(
                {each: float(self.value(each).mean()) for each in self.coalitions},
                Path(folder) / f"coalitions.{picture_format}",
                names=self.names,
                label=f"test {words}",
                lower=self.metric in self.lower,
            )
        if self.rebuilt and "shapley" in found:
            others = {rule: values for rule, values in found.items() if rule != "shapley"}
            plots.approximations(
                found["shapley"],
                others,
                Path(folder) / f"approximations.{picture_format}",
                names=self.names,
                ranks=list(_ranks(found["shapley"], others).values()),
            )

    def _column(self, metric: str | None) -> str:
        metric, columns = metric or self.metric, next(iter(self.rows.values()))
        if metric not in columns:
            raise unknown_name("metric", metric, columns)
        return metric


def _ranks(truth: np.ndarray, found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The rank correlation of contributions [S, N] with the truth [S, N], of their means over the seeds."""
    means = {rule: values.mean(axis=0) for rule, values in found.items()}
    return {rule: contributions.rank_correlation(truth.mean(axis=0), mean) for rule, mean in means.items()}


def _shown(values: np.ndarray) -> str:
    spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"
