"""Datasets of users: arrays in Python, or an .npz file that contains the arguments of `from_arrays` by name.

Unsuitable samples and labels are refused with a remedy. They are never converted by a guess: every user of the model
would have to repeat the conversion.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_mr import files
from fedjax_mr.data import inputs, npz
from fedjax_mr.data.federated import DataRequest, Dataset, first_position
from fedjax_mr.data.values import as_array, ids, is_missing
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.tasks import TASKS, Classification, Task

TEST_SHARE = 0.2  # share of the test set if the user provides none
SPLIT_SEED = 0  # constant, so that all runs of all strategies are tested on the same samples
LARGEST_FLOATS = 5.0  # root mean square: 1 if standardised, below 1 in 0..1, 7.7 for digits in 0..16, 117 in 0..255
OPTIONAL = (
    "task", "client", "x_test", "y_test", "client_test", "domain", "domain_test", "num_classes", "mean", "std",
    "categories",
)  # fmt: skip

# How to convert other files, by suffix: the suffix of the result, and a line of Python.
_RECIPES = {
    ".npy": (".npz", 'import numpy as np; np.savez("{target}", x=np.load("{file}"), y=np.load("labels.npy"))'),
    ".parquet": (".csv", 'import pandas as pd; pd.read_parquet("{file}").to_csv("{target}", index=False)'),
}


def is_file(name: str) -> bool:
    """Whether a name is that of a file, by its suffix, and not that of a dataset."""
    return name.endswith((".npz", *_RECIPES))


def load(request: DataRequest) -> Dataset:
    """Read an .npz file. The task is by default that of the array ``task`` of the file, or classification.

    Raises:
      UserError: the file is missing, empty or truncated, its arrays do not match, or it has another suffix. In the last
        case the message says how to convert it.
    """
    path, task = files.expand_home(request.name), request.task
    if path.suffix in _RECIPES:
        suffix, recipe = _RECIPES[path.suffix]
        target = path.with_suffix(suffix)
        recipe = recipe.format(file=path, target=target)
        raise UserError(f"{path} must be converted to {suffix}, in Python: {recipe}; then use {target} as the dataset")
    if not path.is_file():
        raise UserError(f"data file {path} does not exist (names of datasets have no '/' and no suffix)")
    try:
        arrays = npz.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is empty, truncated or not an .npz file of plain arrays ({error})") from None
    if not {"x", "y"} <= arrays.keys() <= {"x", "y", *OPTIONAL}:
        raise UserError(f"{path} contains {sorted(arrays)}; it needs x and y and may contain {', '.join(OPTIONAL)}")
    recorded = arrays.pop("task", None)
    task = task or (None if recorded is None else str(recorded))
    return from_arrays(name=path.stem, task=task, **arrays)


def from_arrays(
    x: np.ndarray,
    y: np.ndarray,
    *,
    task: str | Task | None = None,
    client: Sequence[Any] | np.ndarray | None = None,
    x_test: np.ndarray | None = None,
    y_test: np.ndarray | None = None,
    client_test: Sequence[Any] | np.ndarray | None = None,
    domain: Sequence[Any] | np.ndarray | None = None,
    domain_test: Sequence[Any] | np.ndarray | None = None,
    name: str = "arrays",
    num_classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    categories: Sequence[int] | np.ndarray = (),
) -> Dataset:
    """Make a dataset of images, vectors or token sequences with class labels, or with the targets of another task.

    Integers in 0..255 of shape [M, H, W] or [M, H, W, channels] are images with channels last (square images with 1 or
    3 channels first are refused). Integers [M, T] are tokens. Floating-point numbers are used as they are; if their
    root mean square is above `LARGEST_FLOATS`, ``mean`` and ``std`` are required. Floats [M, H, W] are images if H = W,
    and else sequences of T = H positions with F = W numbers, zeros at the end of a shorter one. If there is no test
    set, 20 % of the samples of each client (or of each class, without clients) become the test set, with a constant
    seed.

    Args:
      x: [M, ...] samples.
      y: [M] integer labels 0..C-1, or the targets of ``task``. Without ``num_classes``, every label must occur in y or
        y_test.
      task: a name of `tasks.TASKS`, or a task. Default: classification. By name, facts such as the mean and standard
        deviation of the targets are those of the training samples.
      client: [M] the natural client of each sample: numbers or names, "" for samples without a client.
      x_test: [T, ...] the global test set.
      y_test: [T] its labels.
      client_test: [T] the natural client of each test sample.
      domain: [M] the domain of each sample, such as its source: numbers or names.
      domain_test: [T] the domain of each test sample.
      name: name of the dataset.
      num_classes: C. Default: the largest label of y plus one.
      mean: per channel or one number. Default: 0.5 for bytes (of pixels in 0..1), else 0.
      std: per channel or one number. Default: 0.5 for bytes, else 1.
      categories: of vectors x [M, F], the number of categories of each column [F], whose values are 0..k-1 or -1, or 0
        for a column of numbers.

    Raises:
      UserError: the arrays do not match, or cannot be trained on.
    """
    if (x_test is None) != (y_test is None):
        raise UserError(f"{name}: x_test and y_test belong together, but one of them is missing")
    if client_test is not None and (client is None or x_test is None):
        raise UserError(f"{name}: client_test needs client and x_test")
    if (domain_test is not None) != (domain is not None and x_test is not None):
        raise UserError(
            f"{name}: with x_test, domain and domain_test belong together; without it, only domain is needed"
        )
    if isinstance(task, str) and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    kind = Classification if task is None else TASKS[task] if isinstance(task, str) else type(task)
    x = _samples(x, f"{name}: x")
    y = _labels(y, f"{name}: y") if kind is Classification else kind.convert(as_array(y, f"{name}: y"))
    if len(x) != len(y):
        raise UserError(f"{name}: {len(x)} samples but {len(y)} labels")
    if x_test is not None and y_test is not None:
        x_test = _samples(x_test, f"{name}: x_test")
        test_name = f"{name}: y_test"
        y_test = (
            _labels(y_test, test_name, test=True)
            if kind is Classification
            else kind.convert(as_array(y_test, test_name))
        )
    if kind is Classification:
        num_classes = _num_classes(y, y_test, num_classes, name)
        task = task if isinstance(task, Task) else Classification(width=num_classes)
    else:
        if not isinstance(task, Task):
            task = kind.of(y if y_test is None else np.concatenate([y, y_test]))
        task.check(x, y, f"{name}: the training set")  # before the split, so that errors name the user's row
    client = None if client is None else ids(client, f"{name}: client", nobody=True)
    client_test = None if client_test is None else ids(client_test, f"{name}: client_test", nobody=True)
    domain = None if domain is None else ids(domain, f"{name}: domain")
    domain_test = None if domain_test is None else ids(domain_test, f"{name}: domain_test")
    for what, owners, labels in (
        ("client id", client, y), ("client id", client_test, y_test),
        ("domain", domain, y), ("domain", domain_test, y_test),
    ):  # fmt: skip
        if owners is not None and labels is not None and owners.shape != labels.shape[:1]:
            raise UserError(f"{name}: labels of shape {labels.shape} need one {what} each, not shape {owners.shape}")
    names, number, number_of_test = _numbered(client, client_test)
    domain_names, domain, domain_test = _numbered(domain, domain_test)
    if x_test is not None and y_test is not None:
        test_x, test_y = x_test, y_test
    else:
        test = held_out(y, number, task, name)
        test_x, test_y, x, y = x[test], y[test], x[~test], y[~test]
        number, number_of_test = (None, None) if number is None else (number[~test], number[test])
        domain, domain_test = (None, None) if domain is None else (domain[~test], domain[test])
    if mean is None and std is None:
        _refuse_large(x, f"{name}: x", held_out=x_test is None)
        _refuse_large(test_x, f"{name}: x_test")
    if names[:1] == ("",):  # samples without a client
        assert number is not None
        names, number = names[1:], number - 1
        number_of_test = None if number_of_test is None else number_of_test - 1
    default = (0.5,) if x.dtype == np.uint8 else None
    tokens = np.issubdtype(x.dtype, np.signedinteger)
    return Dataset(
        name,
        x,
        y,
        test_x,
        test_y,
        task=task.fitted(y),
        mean=_per_channel(mean, default or (0.0,), x, f"{name}: mean"),
        std=_per_channel(std, default or (1.0,), x, f"{name}: std", nonzero=True),
        client=number,
        test_client=number_of_test,
        client_names=names,
        vocabulary=int(max(x.max(initial=0), test_x.max(initial=0))) + 1 if tokens else 0,
        domain=domain,
        test_domain=domain_test,
        domain_names=domain_names,
        categories=tuple(int(count) for count in categories),
    ).check()


def _numbered(
    client: np.ndarray | None, client_test: np.ndarray | None
) -> tuple[tuple[str, ...], np.ndarray | None, np.ndarray | None]:
    """The sorted names of the clients (or domains), and the number of that of each training and test sample."""
    if client is None:
        return (), None, None
    all_ids = client if client_test is None else np.concatenate([client, client_test])  # numbers beside texts are texts
    names, number = np.unique(all_ids, return_inverse=True)
    number, number_of_test = np.split(number.astype(np.int32), [len(client)])
    return tuple(str(each) for each in names), number, None if client_test is None else number_of_test


def _samples(x: np.ndarray, name: str) -> np.ndarray:
    """Check samples and convert them to uint8, float32 or int32. Images without a channel axis receive one.

    Args:
      x: the user's samples in their order, so that errors name the user's row.
      name: name of the dataset and of the array in errors.
    """
    x = as_array(x, name)
    if x.ndim < 2 or not (np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating)):
        raise UserError(f"{name} is {x.dtype} of shape {x.shape}; it must be numbers [samples, ...]")
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
        raise UserError(f"{name} has images of shape {x.shape[1:]} with channels first: use x.transpose(0, 2, 3, 1)")
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # infinite values are refused below
            given, x = x, x.astype(np.float32)
        if bad := first_position(~np.isfinite(x) & np.isfinite(given)):
            raise UserError(f"{name} has a value that is too large for float32 ({given[bad]}) in row {bad[0]}")
        inputs.refuse_not_finite(name, x)
    elif x.dtype != np.uint8:
        low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
        limit = 255 if x.ndim > 2 else np.iinfo(np.int32).max
        if low < 0 or high > limit:
            kind = "pixels must be in 0..255" if x.ndim > 2 else "tokens must not be negative"
            floats = "; if they are measurements, use x.astype('float32')" if x.ndim == 2 else ""
            raise UserError(f"{name} has values from {low} to {high}, but {kind}{floats}")
        x = x.astype(np.uint8 if x.ndim > 2 else np.int32)
    sequences = x.ndim == 3 and x.dtype == np.float32 and x.shape[1] != x.shape[2]
    return x[..., None] if x.ndim == 3 and not sequences else x


def _refuse_large(x: np.ndarray, name: str, *, held_out: bool = False) -> None:
    """Check that floating-point numbers without mean and std are near 1.

    Args:
      x: training or test samples.
      name: name of the dataset and of the array in errors.
      held_out: whether the test samples are a part of the user's samples.
    """
    if x.dtype.kind != "f" or not x.size or _root_mean_square(x) <= LARGEST_FLOATS:
        return
    low, high = float(x.min()), float(x.max())
    unit = 255 if 128 < high <= 255 else math.ceil(max(high, -low))
    mean, std = x.mean(dtype=np.float64), x.std(dtype=np.float64)  # float64 because squares overflow in float32
    remedy = f"divide them (x / {unit:.7g}), or pass mean={mean:.4g} and std={std:.4g}"
    if x.ndim == 2:
        first = ", after a split into x and x_test" if held_out else ""
        remedy = f"pass mean=x.mean(0) and std=x.std(0) + 1e-6 of the training samples{first}"
    raise UserError(
        f"{name} has floating-point values from {low:g} to {high:g}; networks learn little from values far above 1: "
        f"{remedy}"
    )


def _root_mean_square(x: np.ndarray) -> float:
    values = x.ravel()
    with np.errstate(over="ignore"):
        return math.sqrt(np.dot(values, values) / values.size)


def _labels(y: np.ndarray, name: str, *, test: bool = False) -> np.ndarray:
    """Check labels and convert them to int32.

    Args:
      y: the user's labels.
      name: name of the dataset and of the array in errors.
      test: whether they are those of the test set, whose numbers must be those of the training set.

    Raises:
      UserError: the values are not labels. The message says how to convert them, if that is possible.
    """
    y = as_array(y, name)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        reason = _remedy(y, test)
        raise UserError(
            f"{name} is {y.dtype} of shape {y.shape}; it must be one integer per sample{reason and f': {reason}'}"
        )
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise UserError(
            f"{name}: labels range from {y.min()} to {y.max()}, but must be 0..C-1: {_remedy_of_range(y, test)}"
        )
    return y.astype(np.int32)


def _numbering(test: bool) -> str:
    if test:
        return "number them as those of y, with classes of np.unique(y): y_test = np.searchsorted(classes, y_test)"
    return "use classes, y = np.unique(y, return_inverse=True)"


def _remedy_of_range(y: np.ndarray, test: bool) -> str:
    """The remedy for integers outside 0..C-1."""
    array = "y_test" if test else "y"
    if y.min() != -1 or (not test and len(np.unique(y)) == 2):
        return _numbering(test)
    if (y == -1).all():
        return (
            "-1 marks samples without a label, and all are -1: pass labelled test samples, or leave out x_test and "
            "y_test, so that a fifth of the samples is held out"
            if test
            else "-1 marks samples without a label, and all are -1: labels are needed"
        )
    drop = f"if -1 marks samples without a label, drop these {(y == -1).sum()} samples ({array} >= 0 are the others)"
    return drop if test else f"{drop}; if it is a class, {_numbering(test)}"


def _remedy(y: np.ndarray, test: bool) -> str:
    """How to convert the values to labels, or why that is impossible; "" if unknown."""
    array, kind = "y_test" if test else "y", y.dtype.kind
    if y.ndim == 1:
        missing = sum(map(is_missing, y.tolist())) if kind in "fO" else 0
        if missing:
            return f"{missing} labels are missing: drop these samples"
        if kind in "USTO":
            return _numbering(test)
    if y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1):
        column = array if y.ndim == 1 else f"{array}[:, 0]"
        if kind == "f" and not np.array_equal(y, np.round(y)):
            return f"task='regression' predicts numbers; classes of values are {array} = np.digitize({column}, edges)"
        return f"use {column}{'' if kind in 'iu' else '.astype(int)'}" if kind in "biuf" else ""
    if y.ndim == 2 and kind in "biuf" and y.size:
        sums, binary = y.sum(1), np.isin(y, (0, 1)).all()
        if binary and (sums == 1).all():
            return f"use {array}.argmax(1), because the labels are one-hot"
        if binary:
            return "task='multilabel' has several labels per sample"
        if (y >= 0).all() and np.allclose(sums, 1, atol=1e-3):
            return f"probabilities of classes are not supported; the most probable class is {array}.argmax(1)"
    if y.ndim > 1 and kind == "f":
        return "task='regression' predicts several numbers per sample"
    if y.ndim == 3 and kind in "iu":
        return "task='segmentation' has a class for each pixel"
    return "task='language' has a token for each position" if y.ndim == 2 and kind in "iu" else ""


def _num_classes(y: np.ndarray, y_test: np.ndarray | None, num_classes: int | None, name: str) -> int:
    """The number of classes C.

    Raises:
      UserError: ``num_classes`` is not a number of classes, or it is None and a label below the largest is missing.
    """
    largest = int(y.max(initial=0))
    if num_classes is not None:
        number = as_array(num_classes, f"{name}: num_classes")
        if number.ndim or not np.issubdtype(number.dtype, np.integer) or number <= largest:
            raise UserError(
                f"{name}: num_classes is {num_classes}, but must be an integer above the largest label, {largest}"
            )
        return int(number)
    present = np.unique(y if y_test is None else np.concatenate([y, y_test]))
    present = present[present <= largest]
    if len(y) and len(present) <= largest:
        numbering = _numbering(test=False) + (
            "" if y_test is None else " and y_test = np.searchsorted(classes, y_test)"
        )
        some = f"{', '.join(map(str, present[:3]))}{', ...' if len(present) > 3 else ''}"
        raise UserError(
            f"{name}: labels up to {largest} mean {largest + 1:,} classes, but only {len(present)} have samples "
            f"({some}): {numbering}, or pass num_classes={largest + 1}"
        )
    return largest + 1


def _per_channel(
    statistic: object, default: tuple[float, ...], x: np.ndarray, name: str, *, nonzero: bool = False
) -> tuple[float, ...]:
    """Check a mean or standard deviation and convert it to a tuple.

    Raises:
      UserError: the values are not finite, are neither one nor one per channel, or one is 0 although ``nonzero``.
    """
    if statistic is None:
        return default
    values = np.atleast_1d(as_array(statistic, name))
    if values.ndim > 1 or values.dtype.kind not in "iuf" or len(values) not in (1, x.shape[-1]):
        raise UserError(f"{name} is {statistic}; it must be one number, or one for each of {x.shape[-1]} channels")
    if not np.isfinite(values).all() or (nonzero and not values.all()):
        raise UserError(f"{name} is {statistic}; it must be finite{' and not 0' if nonzero else ''}")
    return tuple(float(value) for value in values)


def held_out(y: np.ndarray, client: np.ndarray | None, task: Task, name: str) -> np.ndarray:
    """Draw the test share of each client, or of each group of targets, with a constant seed. Return a mask [M].

    Args:
      y: targets [M, ...].
      client: number of the client of each sample [M], or None.
      task: decides the groups of targets, see `Task.strata`.
      name: name of the dataset in errors.

    Raises:
      UserError: no client or group has enough samples.
    """
    groups = (task.strata(y) or (np.zeros(len(y), int), 1))[0] if client is None else client
    rng = np.random.default_rng(SPLIT_SEED)
    mask = np.zeros(len(groups), bool)
    order = np.argsort(groups, kind="stable")  # the rows of a group are adjacent, so one pass serves all groups
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        rows = rng.permutation(members)
        mask[rows[: round(TEST_SHARE * len(rows))]] = True
    if len(y) and not mask.any():
        kind = "client" if client is not None else "class" if type(task) is Classification else "group of targets"
        raise UserError(
            f"{name}: no {kind} has three samples, of which one is held out for the test: add samples, or give test "
            "samples (x_test, y_test)"
        )
    return mask
