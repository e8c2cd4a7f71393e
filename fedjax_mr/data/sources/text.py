"""Labelled texts: the sentences of vaderSentiment, and JSON Lines files.

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
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr import files, untrusted
from fedjax_mr.data import tokens
from fedjax_mr.data.cache import cached_dataset
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.data.values import ids
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.tasks import Classification, Language
from fedjax_mr.tasks.language import IGNORED

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
    join_texts: bool = field(
        False, "Next token: join the texts of each client by line breaks, and cut them into samples of --text_length "
        "tokens, so that nothing is lost or padded", group="Data", compiled="no")  # fmt: skip


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
    prompts: Sequence[str] | None = None,
    prompts_test: Sequence[str] | None = None,
    name: str = "texts",
    num_classes: int | None = None,
    tokenizer: str | None = None,
    length: int = 48,
    join: bool = False,
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
      prompts: [M] language: what each text answers. Prompts are no targets. They are written in the chat template of
        the tokenizer, if it has one.
      prompts_test: those of the test set.
      name: name of the dataset.
      num_classes: C. Default: the largest label plus one.
      tokenizer: see `tokens.encode`. Default: hashed words.
      length: tokens of a text, T.
      join: language: whether the texts of a client, and of a domain, are joined and cut into samples of T tokens.

    Raises:
      UserError: as in `from_arrays` and `tokens.encode`.
    """
    language = task == Language.name
    if task not in (None, Classification.name, Language.name):
        raise UserError(f"{name}: texts have targets for classification or language, not {task}")
    if labels is None and not language:
        raise UserError(f"{name}: pass labels, or task='language' to predict the next token")
    if (prompts is not None or join) and not language:
        raise UserError(f"{name}: prompts and joined texts need task='language'")
    if prompts is not None and join:
        raise UserError(f"{name}: texts with prompts cannot be joined: leave out join (--join_texts)")
    if labels is not None and not language:
        x, vocabulary = tokens.encode(texts, length=length, tokenizer=tokenizer)
        x_test = None if texts_test is None else tokens.encode(texts_test, length=length, tokenizer=tokenizer)[0]
        dataset = from_arrays(
            x, labels, client=client, x_test=x_test, y_test=labels_test, client_test=client_test, domain=domain,
            domain_test=domain_test, name=name, num_classes=num_classes,
        )  # fmt: skip
        return dataclasses.replace(dataset, vocabulary=vocabulary)
    made = functools.partial(_next_tokens, length=length, tokenizer=tokenizer, join=join)
    (x, y, client, domain), vocabulary = made(texts, prompts, client, domain)
    test = _Part(*(None,) * 4) if texts_test is None else made(texts_test, prompts_test, client_test, domain_test)[0]
    if not (y != IGNORED).any():
        raise UserError(f"{name}: no text has two tokens, so there is no next token to predict")
    dataset = from_arrays(
        x, y, task=Language(width=vocabulary), client=client, x_test=test.x, y_test=test.y, client_test=test.client,
        domain=domain, domain_test=test.domain, name=name,
    )  # fmt: skip
    return dataclasses.replace(dataset, vocabulary=vocabulary)


class _Part(NamedTuple):
    """Samples x [M, T] with the token after each position y [M, T], and their clients and domains [M], if any."""

    x: Any
    y: Any
    client: Any
    domain: Any


def _next_tokens(
    texts: Sequence[str], prompts: Any, client: Any, domain: Any, *, length: int, tokenizer: str | None, join: bool
) -> tuple[_Part, int]:
    """The samples of texts for language models, and the number of tokens. A sample needs one token more than T."""
    options: dict[str, Any] = {"length": length + 1, "tokenizer": tokenizer}
    if prompts is not None:
        x, asked, vocabulary = tokens.encode_answers(prompts, texts, **options)
        return _Part(x[:, :-1], next_tokens(x, asked), client, domain), vocabulary
    if not join:
        x, vocabulary = tokens.encode(texts, **options)
        return _Part(x[:, :-1], next_tokens(x), client, domain), vocabulary
    of_each = [None] * len(texts)
    owners = list(zip(of_each if client is None else client, of_each if domain is None else domain, strict=True))
    x, owners, vocabulary = tokens.encode_joined(texts, owners, **options)
    clients, domains = (np.array(each) for each in zip(*owners, strict=True))
    kept = (None if client is None else clients, None if domain is None else domains)
    return _Part(x[:, :-1], next_tokens(x), *kept), vocabulary


def next_tokens(x: np.ndarray, asked: np.ndarray | None = None) -> np.ndarray:
    """The token after each position but the last one [M, T]: `IGNORED` where the text has ended, or in its prompt.

    Args:
      x: [M, T + 1].
      asked: [M] number of tokens of the prompt.
    """
    known = x[:, 1:] != 0
    if asked is not None:
        known &= np.arange(1, x.shape[1])[None] >= asked[:, None]
    return np.where(known, x[:, 1:], IGNORED).astype(np.int32)


def cached_texts(
    name: str, request: DataRequest, sources: Sequence[Path], read: Callable[[], dict[str, Any]]
) -> Dataset:
    """The dataset of the arguments of `from_texts` that ``read`` returns."""
    length, join = request.settings.text_length, request.settings.join_texts
    options = {"tokenizer": request.tokenizer, "length": length, "task": request.task, "join": join}
    unit = {None: "words", tokens.BYTES: tokens.BYTES}.get(request.tokenizer, "tokens")
    kind = f"text{FORMAT}-{name}-{length}-{unit}"
    kind += "" if request.task in (None, Classification.name) else f"-{request.task}"
    kind += "-joined" if join else ""
    sources = [*sources, *tokens.source_of(request.tokenizer)]

    return cached_dataset(kind, sources, lambda: from_texts(**read(), **options, name=name))


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

    return cached_texts("sentiment", request, [path], read)


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


# ---- Files of users


def load_file(request: DataRequest) -> Dataset:
    """Read a file of JSON Lines: text, label, and optionally client, domain and split (train or test; default: train).

    The rows of the test set may lack client. Language models need no label. For them, each line may have a prompt and a
    response in place of a text.

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

        answers = request.task == Language.name and "text" not in parts["train"][0]
        content = ("prompt", "response") if answers else ("text",)

        def columns(rows: list[dict[str, Any]]) -> dict[str, list]:
            optional = [each for each in ("client", "domain") if any(each in row for row in rows)]
            kinds = dict.fromkeys(content, str) | labels(request, int) | dict.fromkeys(optional, object)
            return {each: [_value(path, row, each, kind) for row in rows] for each, kind in kinds.items()}

        return arguments(path, columns(parts["train"]), columns(parts["test"]), ARGUMENTS)

    return cached_texts(path.name.partition(".")[0], request, [path], read)


def labels(request: DataRequest, kind: Any = None) -> dict[str, Any]:
    """The column of labels, which a language model does not need."""
    return {} if request.task == Language.name else {"label": kind}


ARGUMENTS = {"text": "texts", "label": "labels", "response": "texts", "prompt": "prompts"}


def arguments(path: Path, train: dict[str, Any], test: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The arguments of `from_texts` or `from_arrays` for the columns of training and test samples; no test is {}.

    Args:
      path: where they come from, for errors.
      train: the columns of the training samples.
      test: the columns of the test samples.
      names: the arguments that differ from their columns.
    """

    def values(part: str, name: str, column: Any) -> Any:
        if name not in ("client", "domain"):
            return column
        return ids(column, f"{path} ({part}): {name}", nobody=name == "client").astype(str)

    found = {names.get(name, name): values("train", name, column) for name, column in train.items()}
    if test and len(next(iter(test.values()))):
        found |= {f"{names.get(name, name)}_test": values("test", name, each) for name, each in test.items()}
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        for number, line in enumerate(untrusted.lines(path), 1):
            try:
                rows += [untrusted.parse_json(line, dict)] if line.strip() else []
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not a JSON object ({brief(error)})") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged ({brief(error)})") from None
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


def brief(error: Exception) -> str:
    """The kind of an exception and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
