"""Natural federations in the JSON format of LEAF (Caldas et al., 2018): ``{train,test}/*.json``.

FEMNIST has 62 classes and pixels in 0..1 where paper is 1. The released FedMR code (Hu et al., KDD 2024) converts them
to 1 - 2x. They are multiples of 1/255 and stored as bytes here. Samples of Shakespeare are 80 characters, and the label
is the next one, numbered by the vocabulary of LEAF's ``language_utils.py``. Files are read one by one, because each
must fit into memory as Python objects.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr import untrusted
from fedjax_mr.data.cache import cached
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources.text import TextLength, from_texts
from fedjax_mr.data.values import ids
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import Language

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
FEMNIST_CLASSES = 62
SIDE = 28  # pixels
_NUMBER = np.full(0x110000, -1, np.int8)  # the token of each Unicode character
_NUMBER[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))


def femnist(request: DataRequest) -> Dataset:
    """Handwritten characters by writer, x uint8 [M, 28, 28, 1] with paper = 255.

    Raises:
      UserError: there is no folder, a file is empty or truncated, or samples are of another kind.
    """
    facts = {"num_classes": FEMNIST_CLASSES, "mean": (0.5,), "std": (-0.5,)}  # (x - 0.5) / -0.5 = 1 - 2x
    return _load(request, "./preprocess.sh -s niid -sf 0.05 -k 100 -t sample", _images, facts)


def shakespeare(request: DataRequest) -> Dataset:
    """Lines of Shakespeare's plays by role, x int32 [M, 80], y int32 [M], the next character.

    With ``task="language"``, y [M, 80] has the next character at each position. With a tokenizer, too, the samples are
    the tokens of the lines of each role: x and y int32 [M, T], T = ``text_length``. Each token is one target.

    Raises:
      UserError: there is no folder, a file is empty or truncated, or samples are of another kind.
    """
    facts = {"num_classes": len(LETTERS), "vocabulary": len(LETTERS)}
    dataset = _load(request, "./preprocess.sh -s niid --sf 0.2 -k 0 -t sample -tf 0.8", _characters, facts)
    if request.tokenizer is not None and request.task == Language.name:
        return _of_roles(dataset, request)
    if request.settings not in (None, TextLength()):
        raise UserError("text_length= of shakespeare needs task='language' and a tokenizer: samples are 80 characters")
    if request.task != Language.name:
        return dataset
    y, test_y = (
        np.concatenate([x[:, 1:], label[:, None]], axis=1)
        for x, label in ((dataset.x, dataset.y), (dataset.test_x, dataset.test_y))
    )
    return dataclasses.replace(dataset, y=y, test_y=test_y, task=Language(width=len(LETTERS)))


def _of_roles(dataset: Dataset, request: DataRequest) -> Dataset:
    """The samples of a tokenizer, from those of characters."""
    assert dataset.client is not None and dataset.test_client is not None  # LEAF names the role of every sample
    train = role_texts(dataset.x, dataset.y, dataset.client)
    test = role_texts(dataset.test_x, dataset.test_y, dataset.test_client)
    made = from_texts(
        [text for _, text in train], client=[dataset.client_names[role] for role, _ in train],
        texts_test=[text for _, text in test], client_test=[dataset.client_names[role] for role, _ in test],
        task=Language.name, name=dataset.name, tokenizer=request.tokenizer, length=request.settings.text_length,
        join=True,
    )  # fmt: skip
    return made


def role_texts(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> list[tuple[int, str]]:
    """The texts of which LEAF's samples are windows, each with its client.

    Args:
      x: [M, 80] characters.
      y: [M] the next character.
      client: [M] clients in ascending order.
    """
    letters = np.array(list(LETTERS))
    follows = np.zeros(len(x), bool)
    follows[1:] = (client[1:] == client[:-1]) & (x[1:, :-1] == x[:-1, 1:]).all(axis=1) & (x[1:, -1] == y[:-1])
    starts = np.flatnonzero(~follows)
    return [
        (int(client[first]), "".join(letters[np.concatenate([x[first], y[first:last]])]))
        for first, last in zip(starts, [*starts[1:], len(x)], strict=True)
    ]


class _Part(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    users: list[str]
    sizes: list[int]


def _load(request: DataRequest, command: str, convert: Callable, facts: dict[str, Any]) -> Dataset:
    name = request.name
    how_to = f"create it in LEAF's folder data/{name} with: {command}"
    if request.data_dir is None:
        raise UserError(f"{name} needs data_dir=, a folder with train/*.json and test/*.json; {how_to}")
    candidates = [Path(request.data_dir), *(Path(request.data_dir) / place for place in (name, f"{name}/data"))]
    folders = [folder for folder in candidates if any((folder / "train").glob("*.json"))]
    if not folders:
        if near := _near(Path(request.data_dir)):
            folders = " or ".join(f"data_dir={shlex.quote(str(folder))}" for folder in near)
            raise UserError(f"{request.data_dir} has no train/*.json; did you mean {folders}?")
        raise UserError(f"{request.data_dir} has no train/*.json of {name}; {how_to}")
    sources = {part: sorted((folders[0] / part).glob("*.json")) for part in ("train", "test")}
    if not sources["test"]:
        raise UserError(f"{folders[0]} has train/*.json but no test/*.json; {how_to}")

    def build() -> dict[str, Any]:
        train, test = (_read(sources[part], convert) for part in ("train", "test"))
        names = sorted({*train.users, *test.users})
        number = {user: client for client, user in enumerate(names)}

        def clients(part: _Part) -> np.ndarray:
            return np.repeat(np.array([number[user] for user in part.users], np.int32), part.sizes)

        return facts | {
            "x": train.x, "y": train.y, "test_x": test.x, "test_y": test.y,
            "client": clients(train), "test_client": clients(test), "client_names": tuple(names),
        }  # fmt: skip

    return Dataset(name=name, **cached(name, [*sources["train"], *sources["test"]], build))


def _near(folder: Path) -> list[Path]:
    """Folders with train/*.json that the user may have meant: one level up, or at most two levels down."""
    candidates = [folder.absolute().parent, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]
    return [each for each in candidates if any((each / "train").glob("*.json"))][:3]


def _read(sources: list[Path], convert: Callable) -> _Part:
    """Read the files one by one, in order of the users."""
    xs, ys, users, sizes = [], [], [], []
    for source in sources:
        if not (parts := list(_users(source, convert))):
            raise UserError(f"{source} has no users with samples")
        users += [user for user, _, _ in parts]
        sizes += [len(y) for _, _, y in parts]
        xs.append(_joined(source, [x for _, x, _ in parts]))
        ys.append(np.concatenate([y for _, _, y in parts]))
    return _Part(_joined(sources[0].parent, xs), np.concatenate(ys), users, sizes)


def _joined(source: Path, xs: list[np.ndarray]) -> np.ndarray:
    if len(lengths := {x.shape[1:] for x in xs}) > 1:
        raise UserError(f"{source}: samples have different shapes: {' and '.join(map(str, sorted(lengths)[:2]))}")
    return np.concatenate(xs)


def _users(source: Path, convert: Callable) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (user, x, y) of each user of one file that has samples."""
    try:
        content = untrusted.parse_json(untrusted.read_text(source), {"user_data": dict, "users": list})
        user_data, users = content["user_data"], content["users"]
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is empty, truncated or not a LEAF file ({type(error).__name__}: {error})") from None
    for user in ids(users, f"{source}: users").astype(str).tolist():  # keys are always texts
        try:
            data = user_data.pop(user)  # freed as soon as it is converted
            xs, ys = data["x"], data["y"]
            if len(xs) != len(ys):
                raise ValueError(f"{len(xs)} samples but {len(ys)} labels")
            if not len(xs):
                continue
            x, y = convert(xs, ys)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{source}: user {user!r}: {_reason(error)}") from None
        yield user, x, y


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


def _images(xs: list, ys: list) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.array(xs, np.float32).reshape(len(xs), -1)
    if pixels.shape[1] != SIDE * SIDE:
        raise ValueError(f"a sample has {pixels.shape[1]} pixels, not {SIDE * SIDE}")
    if not ((pixels >= 0) & (pixels <= 1)).all():  # also false for NaN
        raise ValueError("a pixel is outside 0..1 or not finite")
    labels = np.array(ys)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be integers, not {labels.dtype} of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= FEMNIST_CLASSES:
        wrong = labels.max() if labels.min() >= 0 else labels.min()
        raise ValueError(f"label {wrong} is outside 0..{FEMNIST_CLASSES - 1}")
    x = np.round(pixels * 255).astype(np.uint8).reshape(-1, SIDE, SIDE, 1)
    return x, labels.astype(np.int32)


def _characters(xs: list, ys: list) -> tuple[np.ndarray, np.ndarray]:
    if len({len(x) for x in xs}) > 1 or any(len(y) != 1 for y in ys):
        raise ValueError("all samples must have the same number of characters, and each label must be one character")
    rows = [np.frombuffer("".join(text).encode("utf-32-le"), np.uint32) for text in (xs, ys)]
    x, y = (_NUMBER[row].astype(np.int32) for row in rows)
    for row, numbers in zip(rows, (x, y), strict=True):
        if (numbers < 0).any():
            raise ValueError(f"character {chr(row[numbers < 0][0])!r} is not in LEAF's vocabulary")
    return x.reshape(len(xs), -1), y
