"""Tasks by name: what a federation learns, its loss and its metrics. One task has one file."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry
from fedjax_mr.tasks.base import Criterion, Metric, Task
from fedjax_mr.tasks.classification import Classification
from fedjax_mr.tasks.language import Language
from fedjax_mr.tasks.metrics import METRICS
from fedjax_mr.tasks.multilabel import Multilabel
from fedjax_mr.tasks.regression import Regression
from fedjax_mr.tasks.segmentation import Segmentation
from fedjax_mr.tasks.survival import Survival


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `TASKS`. Raises a UserError: it is not a dataclass of `Task` with that name."""
    if not (isinstance(row, type) and issubclass(row, Task) and getattr(row, "name", "") == name):
        raise UserError(f"fmr.TASKS[{name!r}] takes a dataclass of fmr.Task whose name is {name!r}")


_OURS: tuple[type[Task], ...] = (Classification, Multilabel, Regression, Segmentation, Language, Survival)
TASKS: Registry[type[Task]] = Registry("task", "fmr.TASKS", check_row, {each.name: each for each in _OURS})
"""Every task by its name."""


def with_metrics(task: Task, metrics: Iterable[str | Metric] = ()) -> Task:
    """The task with some metrics, by name or as objects. Default: those that it has, or its usual ones.

    Raises:
      UserError: a metric is unknown, does not suit the task, or has the name of another.
    """
    named = tuple(metrics)
    if not named and task.metrics:
        return task
    found = []
    for each in named or task.default_metrics:
        if isinstance(each, str) and each not in METRICS:
            raise unknown_name("metric", each, METRICS)
        metric = METRICS[each] if isinstance(each, str) else each
        if not isinstance(metric, Metric):
            raise UserError(f"a metric is a name or an fmr.Metric, not a {type(metric).__name__}")
        if missing := [need for need in metric.needs if task.provides.isdisjoint(need.split("|"))]:
            suited = ", ".join(name for name, row in METRICS.items() if suits(task, row)) or "none of ours"
            need = missing[0].replace("|", " or ")
            raise UserError(f"metric {metric.name} needs {need}, which {task.name} has not: it has {suited}")
        found.append(metric)
    if not found:
        raise UserError(f"the task {task.name} has no metrics: name some in its default_metrics")
    found = list(dict.fromkeys(found))
    if twice := [name for name, count in collections.Counter(each.name for each in found).items() if count > 1]:
        raise UserError(f"two metrics have the name {twice[0]}: give one of them another name")
    return dataclasses.replace(task, metrics=tuple(found))


def suits(task: Task | type[Task], metric: Metric) -> bool:
    """Whether a task provides what a metric needs."""
    return not any(task.provides.isdisjoint(need.split("|")) for need in metric.needs)


def of_facts(facts: Mapping[str, Any]) -> Task:
    """The task of `Task.facts`, as read from JSON.

    Raises:
      ValueError: the task is unknown, or a fact does not belong to it or is impossible.
    """
    facts = dict(facts)
    name = facts.pop("name", None)
    if name not in TASKS:
        raise ValueError(f"the task {name!r} is not registered: import its file")
    fields = {each.name for each in dataclasses.fields(TASKS[name])} - {"criterion", "metrics"}
    if set(facts) - fields:
        raise ValueError(f"the task {name} has no {', '.join(sorted(set(facts) - fields))}")
    if type(facts.get("width")) is not int or facts["width"] < 1:
        raise ValueError(f"the task {name} needs its width, a whole number from 1")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    try:
        return with_metrics(TASKS[name](**values))
    except UserError as error:
        raise ValueError(str(error)) from None


__all__ = [
    "METRICS", "TASKS", "Classification", "Criterion", "Language", "Metric", "Multilabel", "Regression",
    "Segmentation", "Survival", "Task", "of_facts", "suits", "with_metrics",
]  # fmt: skip
