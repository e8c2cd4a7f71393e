"""The results of trained coalitions: values, contributions, files and a table."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedjax_mr import plots
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.whatif import contributions
from fedjax_mr.whatif.coalitions import Coalition, by_size, text
from fedjax_mr.whatif.record import write_csv


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
    """

    names: tuple[str, ...]
    sizes: np.ndarray
    seeds: tuple[int, ...]
    rows: Mapping[tuple[int, Coalition], Mapping[str, float]]
    metric: str
    lower: frozenset[str]
    orders: np.ndarray

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
        """The contribution of each client by rule [S, N], see `fedjax_mr.whatif.contributions`. Higher is better.

        Args:
          metric: a column of the results. If lower values of it are better, its sign is changed. Default: `metric`.
        """
        sign = -1.0 if self._column(metric) in self.lower else 1.0
        values = {each: sign * self.value(each, metric) for each in self.coalitions}
        return contributions.contributions(values, len(self.names), self.orders)

    def table(self) -> str:
        """The contributions as a table: the mean over the seeds and, with several seeds, the standard deviation.

        The last rows have the sums over all clients, and how far each rule ranks the clients as Shapley values do.
        """
        found = self.contributions()
        cells = [["client", "samples", *found]]
        cells += [
            [name, f"{size}", *(_shown(values[:, client]) for values in found.values())]
            for client, (name, size) in enumerate(zip(self.names, self.sizes, strict=True))
        ]
        cells.append(["all", f"{self.sizes.sum()}", *(_shown(values.sum(axis=1)) for values in found.values())])
        if "shapley" in found:
            means = {rule: values.mean(axis=0) for rule, values in found.items()}
            ranks = (contributions.rank_correlation(means["shapley"], each) for each in means.values())
            cells.append(["rank correlation with shapley", "", *(f"{each:.2f}" for each in ranks)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        nobody, everyone = (_shown(self.value(each)) for each in ((), range(len(self.names))))
        return "\n".join([f"test {self.metric}: {nobody} without clients, {everyone} with all of them", *lines])

    def write(self, folder: Path | str, *, picture_format: str = "png") -> None:
        """Write ``contributions.csv`` and a picture of it into a folder."""
        found, count = self.contributions(), len(self.seeds)
        write_csv(
            Path(folder) / "contributions.csv",
            [
                {
                    "client": client,
                    "name": name,
                    "samples": int(self.sizes[client]),
                    "metric": self.metric,
                    "rule": rule,
                    "mean": float(values[:, client].mean()),
                    "std": float(values[:, client].std(ddof=1)) if count > 1 else "",
                    "seeds": count,
                }
                for rule, values in found.items()
                for client, name in enumerate(self.names)
            ],
        )
        shown = {rule: values for rule, values in found.items() if rule not in ("orders", "truncated")} or found
        if shown:
            plots.contributions(
                shown,
                Path(folder) / f"contributions.{picture_format}",
                names=self.names,
                y_label=f"contribution to the test {self.metric.replace('_', ' ')}",
            )

    def _column(self, metric: str | None) -> str:
        metric, columns = metric or self.metric, next(iter(self.rows.values()))
        if metric not in columns:
            raise unknown_name("metric", metric, columns)
        return metric


def _shown(values: np.ndarray) -> str:
    spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"
