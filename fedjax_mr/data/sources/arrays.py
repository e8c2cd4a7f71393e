"""One's own data: arrays in Python, or an .npz file of x, y and, optionally, client, x_test, y_test, client_test."""

from pathlib import Path

import numpy as np

from fedjax_mr.data import npz
from fedjax_mr.data.federated import Dataset
from fedjax_mr.errors import UserError

TEST_SHARE = 0.2  # held out where there is no test part
SPLIT_SEED = 0  # constant: every run of every strategy is tested on the same samples


def load(path: Path | str) -> Dataset:
    """Read an .npz file.

    Raises:
      UserError: the file is missing, empty, truncated, or its arrays do not fit together.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"data file {path} does not exist (a data set by name has no '/' and no ending)")
    try:
        arrays = npz.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is empty, truncated or no .npz file of plain arrays ({error})") from None
    known = {"x", "y", "client", "x_test", "y_test", "client_test"}
    if not {"x", "y"} <= arrays.keys() or not arrays.keys() <= known:
        raise UserError(f"{path} holds {sorted(arrays)}; it needs x and y and may hold {sorted(known - {'x', 'y'})}")
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
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Dataset:
    """Make a data set of images, vectors or token sequences with class labels.

    Bytes and integers in 0..255 of shape [M, H, W] or [M, H, W, channels] are images; other integers [M, T] are tokens;
    floating-point numbers are taken as they are. Without a test part, 20 % of each client's samples, or of all samples
    of each class, are held out, with a constant seed.

    Args:
      x: [M, ...] samples.
      y: [M] integer labels 0..C-1.
      client: [M] the natural client of each sample: numbers or names.
      x_test: [T, ...] the global test set.
      y_test: [T] its labels.
      client_test: [T] the natural client of each test sample.
      name: what to call the data set.
      mean: per channel or one number; None: 0.5 for bytes (of pixels in 0..1), else 0.
      std: likewise; None: 0.5 for bytes, else 1.

    Raises:
      UserError: the arrays do not fit together, or hold what cannot be trained on.
    """
    if (x_test is None) != (y_test is None):
        raise UserError(f"{name}: x_test and y_test belong together, but only one of them is there")
    if client_test is not None and (client is None or x_test is None):
        raise UserError(f"{name}: client_test needs client and x_test")
    x, y = _samples(x, name), _labels(y, name)
    if len(x) != len(y):
        raise UserError(f"{name}: {len(x)} samples but {len(y)} labels")
    num_classes = int(y.max(initial=0)) + 1
    for ids, labels in ((client, y), (client_test, y_test)):
        if ids is not None and labels is not None and np.shape(ids) != np.shape(labels):
            raise UserError(
                f"{name}: {np.shape(labels)} labels but clients of shape {np.shape(ids)}: one id each is needed"
            )
    names, number, number_of_test = _numbered(client, client_test)
    if x_test is not None and y_test is not None:
        test_x, test_y = _samples(x_test, name), _labels(y_test, name)
    else:
        test = _held_out(y if number is None else number)
        test_x, test_y, x, y = x[test], y[test], x[~test], y[~test]
        number, number_of_test = (None, None) if number is None else (number[~test], number[test])
    default = 0.5 if x.dtype == np.uint8 else None
    tokens = np.issubdtype(x.dtype, np.signedinteger)
    return Dataset(
        name,
        x,
        y,
        test_x,
        test_y,
        num_classes=num_classes,
        mean=mean or (default or 0.0,),
        std=std or (default or 1.0,),
        client=number,
        test_client=number_of_test,
        client_names=names,
        vocabulary=int(max(x.max(initial=0), test_x.max(initial=0))) + 1 if tokens else 0,
    ).check()


def _numbered(
    client: np.ndarray | None, client_test: np.ndarray | None
) -> tuple[tuple[str, ...], np.ndarray | None, np.ndarray | None]:
    """Return the sorted clients' names, and the number of the client of each training and test sample."""
    if client is None:
        return (), None, None
    every = client if client_test is None else np.concatenate([client, client_test])
    ids, number = np.unique(every, return_inverse=True)
    number, number_of_test = np.split(number.astype(np.int32), [len(client)])
    return tuple(str(each) for each in ids), number, None if client_test is None else number_of_test


def _samples(x: np.ndarray, name: str) -> np.ndarray:
    """Return the samples as uint8, float32 or int32; images without a channel axis get one."""
    x = np.asarray(x)
    if x.ndim < 2 or not (np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating)):
        raise UserError(f"{name}: x is {x.dtype} of shape {x.shape}; it must be numbers [samples, ...]")
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            x = x.astype(np.float32)
    elif x.dtype != np.uint8:
        low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
        limit = 255 if x.ndim > 2 else np.iinfo(np.int32).max
        if low < 0 or high > limit:
            kind = "pixels must be in 0..255" if x.ndim > 2 else "tokens must not be negative"
            raise UserError(f"{name}: x has values from {low} to {high}, but {kind}")
        x = x.astype(np.uint8 if x.ndim > 2 else np.int32)
    return x[..., None] if x.ndim == 3 else x


def _labels(y: np.ndarray, name: str) -> np.ndarray:
    """Return the labels as int32."""
    y = np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{name}: y is {y.dtype} of shape {y.shape}; it must be one integer per sample")
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise UserError(f"{name}: labels go from {y.min()} to {y.max()}; they must be 0..C-1")
    return y.astype(np.int32)


def _held_out(groups: np.ndarray) -> np.ndarray:
    """Return a mask of the test share of each group (client or class), drawn with a constant seed."""
    rng = np.random.default_rng(SPLIT_SEED)
    mask = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        rows = rng.permutation(np.flatnonzero(groups == group))
        mask[rows[: round(TEST_SHARE * len(rows))]] = True
    return mask
