"""One's own data: arrays in Python, or an .npz file that holds the arguments of `from_arrays` by name.

Samples and labels from which nothing would be learned are refused with the remedy, and never changed by what they look
like: such a rule would have to be applied again wherever the model is used.
"""

import math
from pathlib import Path

import numpy as np

from fedjax_mr.data import files, npz
from fedjax_mr.data.federated import Dataset, first_position
from fedjax_mr.errors import UserError

TEST_SHARE = 0.2  # held out where there is no test part
SPLIT_SEED = 0  # constant: every run of every strategy is tested on the same samples
LARGEST_FLOATS = 5.0  # root mean square: 1 if standardised, less in 0..1; of digits in 0..16 it is 7.7, in 0..255 117
OPTIONAL = ("client", "x_test", "y_test", "client_test", "num_classes", "mean", "std")

# What to do with other files, by the end of their names.
_TABLE = (
    'import numpy as np, pandas as pd; df = pd.{read}("{file}"); np.savez("{made}", '
    'x=df.drop(columns="label").to_numpy("float32"), y=df["label"].to_numpy())'
)
_RECIPES = {
    ".npy": 'import numpy as np; np.savez("{made}", x=np.load("{file}"), y=np.load("labels.npy"))',
    ".csv": _TABLE.replace("{read}", "read_csv"),
    ".tsv": _TABLE.replace("{read}", "read_table"),
    ".parquet": _TABLE.replace("{read}", "read_parquet"),
}


def is_file(name: str) -> bool:
    """Return whether a name is that of a file, known by its end, and no data set's."""
    return name.endswith((".npz", *_RECIPES))


def load(path: Path | str) -> Dataset:
    """Read an .npz file.

    Raises:
      UserError: the file is missing, empty, truncated, its arrays do not fit together, or it is of another kind: then
        the message says how to make an .npz file of it.
    """
    path = files.expanded(path)
    if path.suffix in _RECIPES:
        made = path.with_suffix(".npz")
        recipe = _RECIPES[path.suffix].format(file=path, made=made)
        raise UserError(f"{path}: one's own data come as .npz, made in Python by: {recipe}; then --dataset={made}")
    if not path.is_file():
        raise UserError(f"data file {path} does not exist (a data set by name has no '/' and no ending)")
    try:
        arrays = npz.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is empty, truncated or no .npz file of plain arrays ({error})") from None
    if not {"x", "y"} <= arrays.keys() <= {"x", "y", *OPTIONAL}:
        raise UserError(f"{path} holds {sorted(arrays)}; it needs x and y and may hold {', '.join(OPTIONAL)}")
    return from_arrays(name=path.stem, **arrays)


def from_arrays(
    x: np.ndarray,
    y: np.ndarray,
    *,
    client: np.ndarray | None = None,
    x_test: np.ndarray | None = None,
    y_test: np.ndarray | None = None,
    client_test: np.ndarray | None = None,
    name: str = "arrays",
    num_classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Dataset:
    """Make a data set of images, vectors or token sequences with class labels.

    Bytes and integers in 0..255 of shape [M, H, W] or [M, H, W, channels] are images (1 or 3 channels that come first,
    in front of a square, are refused); other integers [M, T] are tokens; floating-point numbers are taken as they are,
    and need ``mean`` and ``std`` if their root mean square is above `LARGEST_FLOATS`. Without a test part, 20 % of each
    client's samples, or of all samples of each class, are held out, with a constant seed.

    Args:
      x: [M, ...] samples.
      y: [M] integer labels 0..C-1, each of them at least once in y or y_test unless ``num_classes`` is given.
      client: [M] the natural client of each sample: numbers or names.
      x_test: [T, ...] the global test set.
      y_test: [T] its labels.
      client_test: [T] the natural client of each test sample.
      name: what to call the data set.
      num_classes: C; None: one more than the largest label of y.
      mean: per channel or one number; None: 0.5 for bytes (of pixels in 0..1), else 0.
      std: likewise; None: 0.5 for bytes, else 1.

    Raises:
      UserError: the arrays do not fit together, or hold what cannot be trained on.
    """
    if (x_test is None) != (y_test is None):
        raise UserError(f"{name}: x_test and y_test belong together, but only one of them is there")
    if client_test is not None and (client is None or x_test is None):
        raise UserError(f"{name}: client_test needs client and x_test")
    scaled = mean is not None or std is not None
    x, y = _samples(x, f"{name}: x", scaled), _labels(y, f"{name}: y")
    if len(x) != len(y):
        raise UserError(f"{name}: {len(x)} samples but {len(y)} labels")
    if x_test is not None and y_test is not None:
        x_test, y_test = _samples(x_test, f"{name}: x_test", scaled), _labels(y_test, f"{name}: y_test")
    num_classes = _num_classes(y, y_test, num_classes, name)
    client = None if client is None else _array(client, f"{name}: client")
    client_test = None if client_test is None else _array(client_test, f"{name}: client_test")
    for ids, labels in ((client, y), (client_test, y_test)):
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise UserError(f"{name}: {labels.shape} labels but clients of shape {ids.shape}: one id each is needed")
    names, number, number_of_test = _numbered(client, client_test, name)
    if x_test is not None and y_test is not None:
        test_x, test_y = x_test, y_test
    else:
        test = _held_out(y if number is None else number)
        test_x, test_y, x, y = x[test], y[test], x[~test], y[~test]
        number, number_of_test = (None, None) if number is None else (number[~test], number[test])
    default = (0.5,) if x.dtype == np.uint8 else None
    tokens = np.issubdtype(x.dtype, np.signedinteger)
    return Dataset(
        name,
        x,
        y,
        test_x,
        test_y,
        num_classes=num_classes,
        mean=_per_channel(mean, default or (0.0,), x, f"{name}: mean"),
        std=_per_channel(std, default or (1.0,), x, f"{name}: std", nonzero=True),
        client=number,
        test_client=number_of_test,
        client_names=names,
        vocabulary=int(max(x.max(initial=0), test_x.max(initial=0))) + 1 if tokens else 0,
    ).check()


def _array(values: object, name: str) -> np.ndarray:
    """Return the user's values as an array.

    Raises:
      UserError: they are nested lists, or a list of arrays, whose entries have different shapes.
    """
    try:
        return np.asarray(values)
    except ValueError:
        raise UserError(
            f"{name} has entries of different shapes, but an array needs one shape: crop, pad or resize them"
        ) from None


def _numbered(
    client: np.ndarray | None, client_test: np.ndarray | None, name: str
) -> tuple[tuple[str, ...], np.ndarray | None, np.ndarray | None]:
    """Return the sorted clients' names, and the number of the client of each training and test sample.

    Raises:
      UserError: the ids cannot be sorted, such as None among numbers.
    """
    if client is None:
        return (), None, None
    every = client if client_test is None else np.concatenate([client, client_test])
    try:
        ids, number = np.unique(every, return_inverse=True)
    except TypeError as error:
        raise UserError(f"{name}: client ids must be all numbers or all text ({error})") from None
    number, number_of_test = np.split(number.astype(np.int32), [len(client)])
    return tuple(str(each) for each in ids), number, None if client_test is None else number_of_test


def _samples(x: np.ndarray, name: str, scaled: bool) -> np.ndarray:
    """Return the samples as uint8, float32 or int32; images without a channel axis get one.

    Args:
      x: as the user gave them, so that a row that is named is the user's.
      name: of the data set and of the array, for errors.
      scaled: whether the user has given mean or std.
    """
    x = _array(x, name)
    if x.ndim < 2 or not (np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating)):
        raise UserError(f"{name} is {x.dtype} of shape {x.shape}; it must be numbers [samples, ...]")
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
        raise UserError(
            f"{name} has images of shape {x.shape[1:]}, channels first: x.transpose(0, 2, 3, 1) puts them last"
        )
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            x = x.astype(np.float32)
        if bad := first_position(~np.isfinite(x)):
            raise UserError(f"{name} has a value that is not finite ({x[bad]}) in row {bad[0]}")
        if x.size and not scaled and _root_mean_square(x) > LARGEST_FLOATS:
            low, high = float(x.min()), float(x.max())
            unit = 255 if 128 < high <= 255 else math.ceil(max(high, -low))
            mean, std = x.mean(dtype=np.float64), x.std(dtype=np.float64)  # of squares that float32 cannot hold
            remedy = f"divide them (x / {unit:.7g}), or give mean={mean:.4g} and std={std:.4g}"
            remedy = "give mean=x.mean(0) and std=x.std(0) + 1e-6" if x.ndim == 2 else remedy
            raise UserError(
                f"{name} has floating-point values from {low:g} to {high:g}, taken as they are and far above 1, where "
                f"networks learn little or nothing: {remedy}"
            )
    elif x.dtype != np.uint8:
        low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
        limit = 255 if x.ndim > 2 else np.iinfo(np.int32).max
        if low < 0 or high > limit:
            kind = "pixels must be in 0..255" if x.ndim > 2 else "tokens must not be negative"
            raise UserError(f"{name} has values from {low} to {high}, but {kind}")
        x = x.astype(np.uint8 if x.ndim > 2 else np.int32)
    return x[..., None] if x.ndim == 3 else x


def _root_mean_square(x: np.ndarray) -> float:
    values = x.ravel()
    with np.errstate(over="ignore"):
        return math.sqrt(np.dot(values, values) / values.size)


def _labels(y: np.ndarray, name: str) -> np.ndarray:
    """Return the labels as int32.

    Raises:
      UserError: they are none; the message says how to make them.
    """
    y = _array(y, name)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{name} is {y.dtype} of shape {y.shape}; it must be one integer per sample{_remedy(y)}")
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise UserError(
            f"{name}: labels go from {y.min()} to {y.max()}; they must be 0..C-1: classes, y = np.unique(y, "
            "return_inverse=True) numbers them"
        )
    return y.astype(np.int32)


def _remedy(y: np.ndarray) -> str:
    """Return how to make labels of what somebody took for them, or ""."""
    if y.ndim == 1 and y.dtype.kind in "USTO":
        return ": classes, y = np.unique(y, return_inverse=True) numbers names"
    if y.ndim == 1 and (y.dtype.kind == "b" or (y.dtype.kind == "f" and np.array_equal(y, np.round(y)))):
        return ": y.astype(int)"
    if y.ndim == 2 and y.dtype.kind in "biuf":
        return ": y[:, 0]" if y.shape[1] == 1 else ": y.argmax(1) if these are one-hot"
    return ""


def _num_classes(y: np.ndarray, y_test: np.ndarray | None, given: int | None, name: str) -> int:
    """Return C.

    Raises:
      UserError: ``given`` is no number of classes, or it is None and a label below the largest is nowhere.
    """
    largest = int(y.max(initial=0))
    if given is not None:
        number = _array(given, f"{name}: num_classes")
        if number.ndim or not np.issubdtype(number.dtype, np.integer) or number <= largest:
            raise UserError(
                f"{name}: num_classes is {given}, but must be an integer above the largest label, {largest}"
            )
        return int(number)
    found = np.unique(y if y_test is None else np.concatenate([y, y_test]))
    found = found[found <= largest]
    if len(y) and len(found) <= largest:
        some = f"{', '.join(map(str, found[:3]))}{', ...' if len(found) > 3 else ''}"
        raise UserError(
            f"{name}: labels up to {largest} make {largest + 1:,} classes, of which {len(found)} are there ({some}): "
            f"classes, y = np.unique(y, return_inverse=True) numbers these; num_classes={largest + 1} keeps all"
        )
    return largest + 1


def _per_channel(
    given: object, default: tuple[float, ...], x: np.ndarray, name: str, *, nonzero: bool = False
) -> tuple[float, ...]:
    """Return statistics as a tuple.

    Raises:
      UserError: they are not finite numbers, one or as many as x has channels, or one is 0 that is divided by.
    """
    if given is None:
        return default
    values = np.atleast_1d(_array(given, name))
    if values.ndim > 1 or values.dtype.kind not in "iuf" or len(values) not in (1, x.shape[-1]):
        raise UserError(f"{name} is {given}; it must be one number, or one for each of {x.shape[-1]} channels")
    if not np.isfinite(values).all() or (nonzero and not values.all()):
        raise UserError(f"{name} is {given}; it must be finite{' and not 0' if nonzero else ''}")
    return tuple(float(value) for value in values)


def _held_out(groups: np.ndarray) -> np.ndarray:
    """Return a mask of the test share of each group (client or class), drawn with a constant seed."""
    rng = np.random.default_rng(SPLIT_SEED)
    mask = np.zeros(len(groups), bool)
    order = np.argsort(groups, kind="stable")  # all rows of a group side by side: one pass, however many groups
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        rows = rng.permutation(members)
        mask[rows[: round(TEST_SHARE * len(rows))]] = True
    return mask
