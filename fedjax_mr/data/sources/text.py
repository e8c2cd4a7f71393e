"""Labelled texts: the sentences of vaderSentiment, JSON Lines files, and folders of Hugging Face's ``datasets``.

Texts become token numbers once; the result is in the cache. `sentiment` has the 23,703 sentences with human ratings of
Hutto and Gilbert, "VADER: a parsimonious rule-based model for sentiment analysis of social media text" (ICWSM 2014), in
the MIT-licensed source distribution of vaderSentiment: tweets, film reviews, product reviews and editorials. A rating
is the mean of twenty people, from -4 to 4; here ratings above 0.5 are positive, those below -0.5 negative, and the
others are left out.
"""

import dataclasses
import functools
import gzip
import html
import io
import json
import shlex
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from fedjax_mr import files, untrusted
from fedjax_mr.data import tokens
from fedjax_mr.data.cache import cached
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.data.values import ids
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.tasks import Classification, Language, of_facts
from fedjax_mr.tasks.language import IGNORED

FOLDER_PREFIX = "hf:"  # of the path of a folder that `datasets` has written
SUFFIXES = (".jsonl", ".jsonl.gz")
FORMAT = 3  # to be incremented when words, clients or domains are read differently: part of the names of cached texts

SENTENCES = "sentiment_snippets.jsonl.gz"
NEUTRAL = 0.5  # ratings from -0.5 to 0.5 are neither positive nor negative
SOURCE = "vaderSentiment==3.3.2"
ARCHIVE = "hutto_ICWSM_2014.tar.gz"  # inside the source distribution
DOMAINS = {
    "tweets": "tweets", "movies": "movieReviewSnippets", "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TextLength:
    """The settings of texts."""

    text_length: int = field(
        48, "Tokens of a text. Longer texts are cut, shorter ones padded", unit="tokens", low=1, high=16_384,
        group="Data", compiled="no")  # fmt: skip


def from_texts(
    texts: Sequence[str],
    labels: Any = None,
    *,
    task: str | None = None,
    client: Sequence[str] | np.ndarray | None = None,
    domain: Sequence[str] | np.ndarray | None = None,
    texts_test: Sequence[str] | None = None,
    labels_test: Any = None,
    client_test: Sequence[str] | np.ndarray | None = None,
    domain_test: Sequence[str] | np.ndarray | None = None,
    name: str = "texts",
    num_classes: int | None = None,
    tokenizer: str | None = None,
    length: int = 48,
) -> Dataset:
    """Make a dataset of texts with class labels. Without test texts, 20 % of the texts become the test set.

    With ``task="language"``, the target at each of the T positions is the next token, -1 (ignored) after the end of a
    text, and labels are not used.

    Args:
      texts: [M] texts.
      labels: [M] integer labels 0..C-1.
      task: ``classification`` (default) or ``language``.
      client: [M] the natural client of each text; "" if it has none.
      domain: [M] the domain of each text, such as its source.
      texts_test: the texts of the test set.
      labels_test: their labels.
      client_test: their natural clients.
      domain_test: their domains.
      name: name of the dataset.
      num_classes: C. Default: the largest label plus one.
      tokenizer: a folder with a tokenizer, see `tokens.encode`. Default: hashed words.
      length: tokens of a text, T.

    Raises:
      UserError: as in `from_arrays` and `tokens.encode`.
    """
    language = task == Language.name
    if task not in (None, Classification.name, Language.name):
        raise UserError(f"{name}: texts have targets for classification or language, not {task}")
    if labels is None and not language:
        raise UserError(f"{name}: pass labels, or task='language' to predict the next token")
    # A language model needs one more token, the target of the last position.
    encode = functools.partial(tokens.encode, length=length + language, tokenizer=tokenizer)
    x, vocabulary = encode(texts)
    x_test = None if texts_test is None else encode(texts_test)[0]
    targets: Any = labels
    if language:
        if not x[:, 1:].any():
            raise UserError(f"{name}: no text has two tokens, so there is no next token to predict")
        x, targets = x[:, :-1], _next_tokens(x)
        x_test, labels_test = (None, None) if x_test is None else (x_test[:, :-1], _next_tokens(x_test))
    dataset = from_arrays(
        x, targets, task=Language(width=vocabulary) if language else None,
        client=client, x_test=x_test, y_test=labels_test, client_test=client_test, domain=domain,
        domain_test=domain_test, name=name, num_classes=None if language else num_classes,
    )  # fmt: skip
    return dataclasses.replace(dataset, vocabulary=vocabulary)


def _next_tokens(x: np.ndarray) -> np.ndarray:
    """The token after each position but the last one [M, T], `IGNORED` where the text has ended."""
    return np.where(x[:, 1:] == 0, IGNORED, x[:, 1:]).astype(np.int32)


def _cached(name: str, request: DataRequest, sources: list[Path], read: Callable[[], dict[str, Any]]) -> Dataset:
    """The dataset of the arguments of `from_texts` that ``read`` returns."""
    length = request.settings.text_length
    arguments = {"tokenizer": request.tokenizer, "length": length, "task": request.task}
    if request.tokenizer is not None and (file := Path(request.tokenizer) / tokens.TOKENIZER).is_file():
        sources = [*sources, file]
    unit = "words" if request.tokenizer is None else "tokens"
    kind = f"text{FORMAT}-{name}-{length}-{unit}"
    kind += "" if request.task in (None, Classification.name) else f"-{request.task}"

    def build() -> dict[str, Any]:
        dataset = from_texts(**read(), **arguments, name=name)
        fields = [each.name for each in dataclasses.fields(dataset)]
        values = {each: value for each in fields if (value := getattr(dataset, each)) is not None}
        return values | {"task": dataset.task.facts()}

    values = cached(kind, sources, build)
    values["task"] = of_facts(values["task"])
    return Dataset(**values)


# ---- Sentences of vaderSentiment


def sentiment(request: DataRequest) -> Dataset:
    """The positive and negative sentences of vaderSentiment (1 and 0), in four domains.

    Natural clients are the 300 product reviews and 498 editorials; tweets and film reviews have none.

    Raises:
      UserError: the file is not prepared, or damaged.
    """
    path = None if request.data_dir is None else Path(request.data_dir) / SENTENCES
    if path is None or not path.is_file():
        folder = "FOLDER" if request.data_dir is None else shlex.quote(request.data_dir)
        raise UserError(f"sentiment needs data_dir= of a folder with {SENTENCES}; create it with: {_how_to(folder)}")

    def read() -> dict[str, Any]:
        rows = [row for row in _lines(path) if abs(_value(path, row, "score", float)) > NEUTRAL]
        domains = [_value(path, row, "domain", str) for row in rows]
        documents = [row.get("document") for row in rows]
        return {
            "texts": [_value(path, row, "text", str) for row in rows],
            "labels": np.array([row["score"] > 0 for row in rows], np.int32),
            "domain": domains,
            "client": [f"{domain}/{each}" if each else "" for domain, each in zip(domains, documents, strict=True)],
        }

    return _cached("sentiment", request, [path], read)


def _how_to(folder: str) -> str:
    return (
        f"pip download --no-deps --no-binary :all: {SOURCE} -d {folder} && "
        f"python -m fedjax_mr.data prepare sentiment --data_dir={folder}"
    )


def prepare_sentiment(request: DataRequest) -> Path:
    """Write the sentences of vaderSentiment's source distribution in ``data_dir`` as JSON Lines, and return the file.

    Raises:
      UserError: the folder has no source distribution, or it is damaged.
    """
    folder = Path(request.data_dir or ".")
    found = sorted(each for each in folder.glob("*.tar.gz") if each.name.lower().startswith("vadersentiment-"))
    if not found:
        raise UserError(f"{folder} has no vaderSentiment-*.tar.gz; get both with: {_how_to(shlex.quote(str(folder)))}")
    rows = [row for domain, name in DOMAINS.items() for row in _rated(found[-1], domain, f"{name}_GroundTruth.txt")]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with files.atomic_write(folder / SENTENCES) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder / SENTENCES


def _rated(archive: Path, domain: str, name: str) -> list[dict[str, Any]]:
    """The sentences of a domain. Ids such as 12_3 are those of a document and of a sentence in it."""
    try:
        with tarfile.open(archive) as outer:
            (inner,) = (each for each in outer.getnames() if each.endswith(ARCHIVE))
            with tarfile.open(fileobj=io.BytesIO(_member(outer, inner))) as data:
                (file,) = (each for each in data.getnames() if each.rpartition("/")[2] == name)
                lines = _member(data, file).decode("utf-8-sig").split("\n")
        rows = []
        for number, score, text in (line.split("\t") for line in lines if line.strip()):
            document = number.rpartition("_")[0] or None
            sentence = html.unescape(text).strip()
            rows.append(
                {
                    "domain": domain,
                    "id": number,
                    "document": document,
                    "score": round(float(score), 4),
                    "text": sentence,
                }
            )
        return rows
    except (OSError, ValueError, KeyError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{archive} is damaged or of another version ({error}); download {SOURCE}") from None


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is no file")
    return file.read()


# ---- Files and folders of users


def load_file(request: DataRequest) -> Dataset:
    """Read a file of JSON Lines: text, label, and optionally client, domain and split (train or test; default: train).

    The rows of the test set may lack client. Language models need no label.

    Raises:
      UserError: the file is missing or damaged, a line lacks a value, or no line is a training sample.
    """
    path = files.expand_home(request.name)
    if not path.is_file():
        raise UserError(f"data file {path} does not exist (names of datasets have no '/' and no suffix)")

    def read() -> dict[str, Any]:
        parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
        for row in _lines(path):
            part = row.get("split", "train")
            if not isinstance(part, str) or part not in parts:
                shown = ascii(part)[:40]
                raise UserError(f"{path}: split is train or test, but a line has {shown}: remove such lines")
            parts[part].append(row)
        if not parts["train"]:
            raise UserError(f"{path}: every line has split test, and none is a training sample")

        def columns(rows: list[dict[str, Any]]) -> dict[str, list]:
            optional = [each for each in ("client", "domain") if any(each in row for row in rows)]
            kinds = {"text": str} | _labels(request, int) | dict.fromkeys(optional, object)
            return {each: [_value(path, row, each, kind) for row in rows] for each, kind in kinds.items()}

        return _arguments(path, columns(parts["train"]), columns(parts["test"]))

    return _cached(path.name.partition(".")[0], request, [path], read)


def _labels(request: DataRequest, kind: Any = None) -> dict[str, Any]:
    """The column of labels, which a language model does not need."""
    return {} if request.task == Language.name else {"label": kind}


def load_folder(request: DataRequest) -> Dataset:
    """Read a folder written by ``save_to_disk`` of Hugging Face's ``datasets``: a dataset, or parts train and test.

    Columns: text, label, and optionally client and domain. The test part may lack client.

    Raises:
      UserError: the package is missing, the folder is none of ``datasets``, or it has other parts or columns.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{request.name} needs datasets: pip install 'fedjax-mr[hf]'") from None
    path = files.expand_home(request.name.removeprefix(FOLDER_PREFIX))

    def read() -> dict[str, Any]:
        try:
            loaded: Any = datasets.load_from_disk(str(path))
        except Exception as error:  # the parsers of JSON and Arrow raise many kinds
            raise UserError(f"{path} is no folder of datasets.save_to_disk ({_brief(error)})") from None
        parts = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if "train" not in parts:
            raise UserError(f"{path} has the parts {', '.join(parts)}, but a part train is needed")
        used = {each: parts[each] for each in ("train", "test") if each in parts}

        def columns(name: str) -> dict[str, list]:
            has = used[name].column_names
            if missing := [each for each in ("text", *_labels(request)) if each not in has]:
                where, remedy = f"{path} ({name})", _remedy(used[name].features, missing[0])
                raise UserError(f"{where} has the columns {', '.join(has)}, but {missing[0]} is needed; {remedy}")
            if any(_type(used[name].features[each]) in _TEXTS for each in _labels(request)):
                raise UserError(f"{path} ({name}) has labels as texts: use dataset.class_encode_column('label')")
            kept = ("text", *_labels(request), "client", "domain")
            return {each: list(used[name][each]) for each in kept if each in has}

        train, test = (columns(each) if each in used else {} for each in ("train", "test"))
        label = used["train"].features.get("label")
        return _arguments(path, train, test) | {"num_classes": getattr(label, "num_classes", None)}

    # JSON files name the parts, the columns and the classes.
    sources = sorted(each for each in path.rglob("*") if each.suffix in (".arrow", ".json"))
    dataset = _cached(path.name, request, sources, read)
    _tell_of_unused_parts(path)
    return dataset


_TEXTS = ("string", "large_string", "string_view")
_NO_TEXTS = ("Image", "Audio", "Video", "Pdf", "Array2D", "Array3D", "Array4D", "Array5D")


def _type(feature: Any) -> str:
    """The type of a column: that of its values, such as ``string``, or the name of its class, such as ``Image``."""
    return feature.dtype if type(feature).__name__ == "Value" else type(feature).__name__


def _remedy(features: dict[str, Any], missing: str) -> str:
    """What to do with a dataset that has no column ``text`` or ``label``."""
    types = {name: _type(feature) for name, feature in features.items()}
    texts = [name for name, kind in types.items() if kind in _TEXTS]
    if missing == "text" and (not texts or any(kind in _NO_TEXTS for kind in types.values())):
        return "only texts are read from hf: folders, so pass images and numbers as arrays: fmr.from_arrays(x, y)"
    likely = texts if missing == "text" else [name for name, kind in types.items() if kind == "ClassLabel"]
    return f"rename one: dataset.rename_column({repr(likely[0]) if len(likely) == 1 else 'OLD'}, {missing!r})"


def _tell_of_unused_parts(path: Path) -> None:
    """Warn of parts of a dataset, such as validation, that are not read."""
    try:
        parts = untrusted.read_json(path / "dataset_dict.json", {"splits": [str]})["splits"]
    except (FileNotFoundError, UserError):  # a dataset without parts, or from the cache
        return
    if unused := [part for part in parts if part not in ("train", "test")]:
        remedy = (
            "" if "test" in parts else f"; to test on {unused[0]}, rename it: parts['test'] = parts.pop('{unused[0]}')"
        )
        logging.warning("%s: only train and test are read, not %s%s", path, ", ".join(unused), remedy)


def _arguments(path: Path, train: dict[str, list], test: dict[str, list]) -> dict[str, Any]:
    """The arguments of `from_texts` for the columns of the training and the test samples. The latter may be empty."""
    names = {"text": "texts", "label": "labels"}

    def values(part: str, name: str, column: list) -> Any:
        if name not in ("client", "domain"):
            return column
        return ids(column, f"{path} ({part}): {name}", nobody=name == "client").astype(str)

    arguments = {names.get(name, name): values("train", name, column) for name, column in train.items()}
    if test.get("text"):
        arguments |= {f"{names.get(name, name)}_test": values("test", name, each) for name, each in test.items()}
    return arguments


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        for number, line in enumerate(untrusted.lines(path), 1):
            try:
                rows += [untrusted.parse_json(line, dict)] if line.strip() else []
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not a JSON object ({_brief(error)})") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged ({_brief(error)})") from None
    if not rows:
        raise UserError(f"{path} is empty")
    return rows


def _value(path: Path, row: dict[str, Any], name: str, kind: type) -> Any:
    value = row.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is None or not isinstance(value, kind) or isinstance(value, bool):
        what = {str: "a text", int: "an integer", float: "a number"}.get(kind, "a value")
        raise UserError(
            f"{path}: each line needs {what} {name}, but one is {json.dumps(row, ensure_ascii=False)[:120]}"
        )
    return value


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
