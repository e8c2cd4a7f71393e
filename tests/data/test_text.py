"""Texts: tokens, the sentences of vaderSentiment, JSON Lines, and partitions by domain."""

# ruff: noqa: RUF001 (letters of other scripts that look like Latin ones)
import dataclasses
import errno
import gzip
import io
import json
import os
import re
import tarfile
import unicodedata

import numpy as np
import pytest

from fedjax_mr import data, untrusted
from fedjax_mr.data import chat, tokens
from fedjax_mr.data.__main__ import main
from fedjax_mr.data.federated import DataRequest
from fedjax_mr.data.sources import text
from fedjax_mr.errors import UserError
from fedjax_mr.testing import llama_files

RATED = {  # by domain: id, mean rating, text
    "tweets": [(f"{i}", 1.5 - i, f"RT @anonymous tweet &amp; {i}") for i in range(4)],
    "movies": [(f"{i}", -2.0 if i % 2 else 2.0, f"caf\u00e9 film {i}") for i in range(12)],
    "products": [(f"{i // 4}_{i % 4}", 1.0, f"camera {i}") for i in range(12)],
    "editorials": [(f"{i // 5}_{i % 5}", -1.0 if i % 3 else 1.0, f"the senate {i}") for i in range(10)],
}


@pytest.fixture
def archive(tmp_path):
    """A source distribution of vaderSentiment with few sentences."""

    def packed(members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    files = {
        f"hutto_ICWSM_2014/{text.DOMAINS[domain]}_GroundTruth.txt": "".join(
            f"{number}\t{score}\t{sentence}\r\n" for number, score, sentence in rows
        ).encode()
        for domain, rows in RATED.items()
    }
    name = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    (tmp_path / "vaderSentiment-3.3.2.tar.gz").write_bytes(packed({name: packed(files)}))
    return tmp_path


def test_sentences_are_prepared_and_loaded(archive, capsys, cache_folder):
    place = str(archive)
    with pytest.raises(UserError, match=r"pip download --no-deps --no-binary :all: vaderSentiment==3.3.2 -d"):
        data.load("sentiment", data_dir=place)
    assert main(["prepare", "sentiment", f"--data_dir={place}"]) == 0
    assert "sentiment is in" in capsys.readouterr().out
    lines = gzip.decompress((archive / text.SENTENCES).read_bytes()).decode().splitlines()
    assert json.loads(lines[0]) == {
        "domain": "tweets", "id": "0", "document": None, "score": 1.5, "text": "RT @anonymous tweet & 0"
    }  # fmt: skip
    first, second = (data.load("sentiment", data_dir=place, text_length=6) for _ in range(2))
    assert len(list(cache_folder.iterdir())) == 1
    for field in dataclasses.fields(first):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))
    assert (first.num_classes, first.vocabulary, first.x.shape[1]) == (2, tokens.WORDS, 6)
    assert first.domain_names == ("editorials", "movies", "products", "tweets")
    counts = np.bincount(first.domain, minlength=4) + np.bincount(first.test_domain, minlength=4)
    np.testing.assert_array_equal(counts, [10, 12, 12, 2])  # tweets rated 0.5 and -0.5 are neutral
    assert first.client_names == ("editorials/0", "editorials/1", "products/0", "products/1", "products/2")
    np.testing.assert_array_equal(first.client < 0, np.isin(first.domain, [1, 3]))
    numbers = {row[2] for row in (*first.x[first.domain == 1], *first.test_x[first.test_domain == 1])}
    assert tokens.hashed("0") in numbers and (first.x[:, 0] != 0).all()


def test_natural_clients_are_the_documents(archive):
    text.prepare_sentiment(DataRequest("sentiment", str(archive)))
    dataset = data.load("sentiment", data_dir=str(archive))
    federated = data.federate(dataset, partition="natural", num_clients=0)
    assert federated.names == dataset.client_names
    np.testing.assert_array_equal(federated.sizes + federated.test.sizes, [5, 5, 4, 4, 4])
    assert set(federated.dataset.domain) == {0, 2}


def test_a_missing_or_damaged_source_distribution(tmp_path, archive, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["prepare", "sentiment", f"--data_dir={tmp_path / 'empty'}"]) == 2
    assert "has no vaderSentiment-*.tar.gz; get both with: pip download" in capsys.readouterr().err
    (archive / "vaderSentiment-3.3.2.tar.gz").write_bytes(b"no archive")
    assert main(["prepare", "sentiment", f"--data_dir={archive}"]) == 2
    assert "is damaged or of another version" in capsys.readouterr().err


# ---- Partitions by domain


@pytest.fixture
def domains():
    """Texts of three domains with different labels."""
    rng = np.random.default_rng(0)
    domain = np.repeat(["a", "b", "c"], [300, 200, 100])
    labels = (rng.random(600) < np.repeat([0.2, 0.5, 0.8], [300, 200, 100])).astype(np.int32)
    return data.from_texts([f"word {i}" for i in range(600)], labels, domain=domain)


def test_one_domain_per_client(domains):
    federated = data.federate(domains, partition="domain", num_clients=7, alpha=0.5)
    assert federated.names == ("a/0", "a/1", "a/2", "b/0", "b/1", "c/0", "c/1")
    assert federated.sizes.sum() == len(domains.y) and federated.sizes.min() >= 10
    for client, name in enumerate(federated.names):
        owned, tested = federated.train.rows(client), federated.test.rows(client)
        letters = {domains.domain_names[each] for each in (*domains.domain[owned], *domains.test_domain[tested])}
        assert letters == {name[0]} and len(tested)
    assert len(federated.test.index) == len(domains.test_y)  # the clients of a domain share its test samples
    with pytest.raises(UserError, match="2 clients are fewer than the 3 domains"):
        data.federate(domains, partition="domain", num_clients=2)


def test_dirichlet_over_domains(domains):
    shares = {}
    for alpha in (0.1, 1000.0):
        federated = data.federate(domains, partition="dirichlet_domain", num_clients=5, alpha=alpha)
        counts = [np.bincount(domains.domain[rows], minlength=3) for rows in federated.train.parts()]
        shares[alpha] = np.array(counts) / federated.sizes[:, None]
        tests = [np.bincount(domains.test_domain[rows], minlength=3) for rows in federated.test.parts()]
        np.testing.assert_allclose(np.array(tests) / federated.test.sizes[:, None], shares[alpha], atol=0.1)
    assert shares[0.1].std(0).min() > 0.2
    assert shares[1000.0].std(0).max() < 0.1


def test_data_without_domains(domains):
    without = dataclasses.replace(domains, domain=None, test_domain=None, domain_names=())
    with pytest.raises(UserError, match="partition 'domain' needs domains, but texts has none"):
        data.federate(without, partition="domain", num_clients=4)
    assert without.recorded_name() != domains.recorded_name()
    with pytest.raises(UserError, match="domain and domain_test belong together"):
        data.from_texts(["a"], [0], domain=["x"], texts_test=["b"], labels_test=[0])


# ---- Tokens


def test_words_are_hashed():
    x, count = tokens.encode(["It's GREAT, great!", "", "a b c d e f"], length=5)
    assert (x.dtype, count) == (np.int32, tokens.WORDS)
    words = ["it's", "great", ",", "great", "!"]
    np.testing.assert_array_equal(x[0], [tokens.hashed(word) for word in words])
    assert not x[1].any() and x[2].all() and x.max() < count


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("हिन्दी में किताब", ["हिन्दी", "में", "किताब"]),
        ("தமிழ் மொழி!", ["தமிழ்", "மொழி", "!"]),
        ("كِتَابٌ جميل", ["كِتَابٌ", "جميل"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("今天很好。abc 2020年", [*"今天很好。", "abc", "2020", "年"]),
        ("ひらカナー", [*"ひらカナー"]),
        ("ดีมาก", ["ดี", *"มาก"]),
        ("ດີ ខ្មែរ မြန်", ["ດີ", "ខ្", "មែ", "រ", "မြ", "န်"]),
        ("It’s o'clock, cafe\u0301 İs x_1 ❤!", ["it’s", "o'clock", ",", "café", "i\u0307s", "x_1", "❤", "!"]),
    ],
)
def test_words_of_every_script_are_whole(sentence, expected):
    """Marks stay with their letter; scripts without spaces are split into letters; NFC and NFD are the same."""
    assert tokens.words(sentence) == expected
    for form in ("NFC", "NFD"):
        assert tokens.words(unicodedata.normalize(form, sentence)) == expected


def test_words_of_latin_texts_stay_as_recorded():
    """Kept results depend on them."""
    recorded = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
    letters = "".join(chr(code) for code in range(0x180) if chr(code) != "İ")
    for sentence in (*letters, letters, "a".join(letters), "Naïve café's ’twas #1 -- o’Neil_2’s 'x' 50% €3.5…"):
        assert tokens.words(sentence) == recorded.findall(sentence.lower())


def test_half_of_an_emoji_is_a_question_mark(tmp_path):
    x, _ = tokens.encode(["cut \ud83d off", "cut ? off"])
    np.testing.assert_array_equal(x[0], x[1])
    path = write(tmp_path / "mine.jsonl", [line | {"text": "cut \ud83d off"} for line in rows()])
    assert data.load(path).x[:, 1].tolist() == [tokens.hashed("?")] * 10


def test_the_tokenizer_of_a_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        tokens.encode(["a"], tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer.json is damaged"):
        tokens.encode(["a"], tokenizer=str(tmp_path))
    for vocabulary in ({"[PAD]": 0, "[UNK]": 1, "good": 2, "film": 3}, {"good": 0, "[UNK]": 1}):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if "[PAD]" in vocabulary:
            tokens.encode(["half of a pair: \ud83d"], tokenizer=str(tmp_path))
            x, count = tokens.encode(["good film", "bad good film film"], length=3, tokenizer=str(tmp_path))
            np.testing.assert_array_equal(x, [[2, 3, 0], [1, 2, 3]])
            assert count == 4
    with pytest.raises(UserError, match="token 0 is 'good', but it must be padding"):
        tokens.encode(["a"], tokenizer=str(tmp_path))


# ---- Files and folders of users


def rows(count=12, **more):
    return [{"text": f"text {i}", "label": i % 3, "client": i % 2, "domain": "xy"[i % 2]} | more for i in range(count)]


def write(path, lines):
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def test_json_lines(tmp_path):
    lines = [line | {"split": "test" if i >= 9 else "train"} for i, line in enumerate(rows())]
    dataset = data.load(write(tmp_path / "mine.jsonl.gz", lines), text_length=4)
    assert (dataset.name, dataset.x.shape, dataset.test_x.shape, dataset.num_classes) == ("mine", (9, 4), (3, 4), 3)
    np.testing.assert_array_equal(dataset.test_client, [1, 0, 1])
    assert (dataset.client_names, dataset.domain_names) == (("0", "1"), ("x", "y"))
    np.testing.assert_array_equal(dataset.test_x[0, :2], [tokens.hashed("text"), tokens.hashed("9")])
    for line in lines[9:]:  # the test set may have no clients
        del line["client"]
    dataset = data.load(write(tmp_path / "without.jsonl", lines[::-1]), text_length=4)
    assert (dataset.client_names, dataset.test_client, len(dataset.test_x)) == (("0", "1"), None, 3)
    held_out = data.load(write(tmp_path / "other.jsonl", rows(20)))
    assert len(held_out.test_y) == 4


def test_the_next_token_of_texts(tmp_path, cache_folder):
    words = [tokens.hashed(word) for word in ("a", "b", "c", "d", "e")]
    texts = ["a b c d e", "c a", "b", "e d c b"] * 5
    dataset = data.from_texts(texts, task="language", client=["x", "y", "x", "y"] * 5, length=4)
    assert (dataset.task.name, dataset.task.width, dataset.vocabulary) == ("language", tokens.WORDS, tokens.WORDS)
    pairs = {(*x, *y) for x, y in zip(dataset.x.tolist(), dataset.y.tolist(), strict=True)}
    a, b, c, d, e = words
    assert pairs == {
        (a, b, c, d, b, c, d, e), (c, a, 0, 0, a, -1, -1, -1), (b, 0, 0, 0, -1, -1, -1, -1), (e, d, c, b, d, c, b, -1),
    }  # fmt: skip
    path = write(tmp_path / "mine.jsonl", [{"text": text, "client": "x"} for text in texts])  # no labels
    for _ in range(2):  # also from the cache
        read = data.load(path, task="language", text_length=4)
        assert {(*x, *y) for x, y in zip(read.x.tolist(), read.y.tolist(), strict=True)} == pairs
        assert read.task == dataset.task
    assert len(list(cache_folder.iterdir())) == 1
    labelled = write(tmp_path / "labelled.jsonl", [{"text": text, "label": row % 2} for row, text in enumerate(texts)])
    assert data.load(labelled, text_length=4).num_classes == 2
    assert data.load(labelled, text_length=4, task="language").y.shape == (16, 4)  # its own file of the cache
    parts = data.from_texts(texts, task="language", texts_test=["a b"], length=2)
    assert (parts.test_x.tolist(), parts.test_y.tolist()) == ([[a, b]], [[b, -1]])


def test_texts_without_targets_are_refused():
    for arguments, message in (
        ({}, "texts: pass labels, or task='language' to predict the next token"),
        ({"labels": [0], "task": "regression"}, "texts have targets for classification or language, not regression"),
        ({"task": "language"}, "no text has two tokens, so there is no next token to predict"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            data.from_texts(["word"], **arguments)


def test_clients_of_lines_have_one_form_and_none_is_missing(tmp_path):
    lines = [line | {"client": [1, "1", 1.0][i % 3]} for i, line in enumerate(rows())]
    assert data.load(write(tmp_path / "mine.jsonl", lines)).client_names == ("1",)
    with pytest.raises(
        UserError, match=r"other.jsonl \(train\): client: 1 of 12 are missing \(the first is nan in row 11\)"
    ):
        data.load(write(tmp_path / "other.jsonl", [*lines[1:], lines[0] | {"client": float("nan")}]))


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_only_line_feeds_end_a_line(tmp_path, separator):
    lines = [line | {"text": f"one{separator}two"} for line in rows()]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    (tmp_path / "mine.jsonl").write_bytes(content.encode())
    words = data.load(str(tmp_path / "mine.jsonl")).x[0, :3].tolist()
    assert words == [tokens.hashed("one"), tokens.hashed("two"), 0]


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog, cache_folder):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write(tmp_path / "mine.jsonl", rows())
    monkeypatch.setattr(os, "fsync", full)
    assert len(data.load(path).y) == 10 and not list(cache_folder.iterdir())
    assert "the next run decodes text3-mine-48-words again" in caplog.text and "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"label": 0}], 'each line needs a text text, but one is {"label": 0}'),
        ([{"text": "a", "label": "good"}], "each line needs an integer label"),
        (
            [{"text": "a", "label": 0}, {"text": "b", "label": 1, "client": "me"}],
            'each line needs a value client, but one is {"text": "a", "label": 0}',
        ),
        ([], "mine.jsonl is empty"),
        ([{"text": "a", "label": 0}, 3], "mine.jsonl, line 2 is not a JSON object"),
        ([{"text": "a", "label": 0, "split": "validation"}], "split is train or test, but a line has 'validation'"),
        ([{"text": "a", "label": 0, "split": "test"}], "every line has split test, and none is a training sample"),
    ],
)
def test_wrong_lines(tmp_path, lines, message):
    with pytest.raises(UserError) as caught:
        data.load(write(tmp_path / "mine.jsonl", lines))
    assert message in str(caught.value) and "mine.jsonl" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        data.load(str(tmp_path / "mine.jsonl"))
    (tmp_path / "mine.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is damaged"):
        data.load(str(tmp_path / "mine.jsonl"))


def test_a_small_file_that_decompresses_to_very_much_is_refused(tmp_path, monkeypatch):
    """A line of 64 MiB and a content of 8 GiB are the bounds; here they are smaller."""
    monkeypatch.setattr(untrusted.lines, "__kwdefaults__", {"max_line": 1 << 10, "max_total": 1 << 12})
    path = tmp_path / "bomb.jsonl.gz"
    line = b'{"text": "%s", "label": 0}\n'
    for content, part in ((line % (b"x" * 2000), "line 1 has more than 1,024 bytes"), (line * 999, "more than 4,096")):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=rf"bomb.jsonl.gz is damaged \(ValueError: .*{part}"):
            data.load(str(path))


@pytest.mark.parametrize("split", [[], {}, 3, None, "valid", "x" * 10**5])
def test_a_split_of_any_type_is_one_line(split, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 0, "split": split}))
    with pytest.raises(UserError, match="split is train or test, but a line has") as caught:
        data.load(str(path))
    assert len(str(caught.value)) < 300


class Encoder:
    """A damaged tokenizer."""

    def __init__(self, ids):
        self.ids = ids

    def enable_truncation(self, length):
        pass

    def encode_batch(self, texts):
        if not self.ids:
            raise Exception("a panic\nin Rust")  # as tokenizers does
        return [self for _ in texts]

    def get_vocab_size(self):
        return 100


@pytest.mark.parametrize(
    ("ids", "part"),
    [([], "cannot number these texts (a panic in Rust)"), ([1, 2**40], "token 1099511627776 is outside")],
)
def test_a_tokenizer_that_fails_or_numbers_beyond_its_vocabulary_is_one_line(ids, part, monkeypatch):
    monkeypatch.setattr(tokens, "opened", lambda tokenizer: Encoder(ids))
    with pytest.raises(UserError) as caught:
        tokens.encode(["a"], tokenizer="folder")
    assert part in str(caught.value) and "\n" not in str(caught.value)


# ---- Language models


def test_tokens_of_bytes_are_turned_back():
    x, vocabulary = tokens.encode(["né", "a"], length=4, tokenizer=tokens.BYTES)
    assert (x.tolist(), vocabulary) == ([[111, 196, 170, 0], [98, 0, 0, 0]], 257)
    assert tokens.decode(x[0], tokens.BYTES) == "né"
    assert tokens.decode(x[0, :2], tokens.BYTES) == "n\ufffd"
    with pytest.raises(UserError, match="hashes of words cannot be turned back into words"):
        tokens.decode(x[0], None)


def test_joined_texts_lose_and_pad_nothing_but_the_end(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [{"text": text, "client": who} for text, who in (("abc", "x"), ("q", "y"), ("de", "x"), ("r", "y"))]
    write(path, [*lines, {"text": "zz", "client": "y", "split": "test"}])
    read = data.load(str(path), task="language", text_length=3, join_texts=True, tokenizer=tokens.BYTES)
    texts = [tokens.decode(row, tokens.BYTES) for row in read.x]
    assert texts == ["abc", "\nde", "q\nr"]
    targets = [tokens.decode(row, tokens.BYTES) for row in read.y]
    assert targets == ["bc\n", "de", "\nr"]
    assert (read.y == -1).sum() == 2 and read.client.tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="prompts and joined texts need task='language'"):
        data.from_texts(["a"], [0], join=True)


def test_only_answers_are_targets(tmp_path):
    rows = [{"prompt": "2+2?", "response": "4", "client": "x"}, {"prompt": "b", "response": "cd", "client": "y"}] * 5
    path = write(tmp_path / "mine.jsonl", rows)
    read = data.load(path, task="language", text_length=6, tokenizer=tokens.BYTES)
    pairs = {(tokens.decode(x, tokens.BYTES), tuple(y.tolist())) for x, y in zip(read.x, read.y, strict=True)}
    c, d, four = (1 + ord(letter) for letter in "cd4")
    assert pairs == {("2+2?\n4", (-1,) * 4 + (four, -1)), ("b\ncd", (-1, c, d, -1, -1, -1))}
    with pytest.raises(UserError, match="a prompt of 5 tokens leaves no room for its answer: set text_length= above 5"):
        data.load(path, task="language", text_length=4, tokenizer=tokens.BYTES)
    with pytest.raises(UserError, match="texts with prompts cannot be joined"):
        data.load(path, task="language", join_texts=True, tokenizer=tokens.BYTES)


def test_the_tokenizer_and_the_chat_template_of_gguf(tmp_path):
    pytest.importorskip("gguf"), pytest.importorskip("tokenizers"), pytest.importorskip("jinja2")
    path = str(tmp_path / "tiny.gguf")
    llama_files.write_gguf(tmp_path / "tiny.gguf", {})
    names, _ = llama_files.tokens_and_merges()
    rows, vocabulary = tokens.numbered(["and  the 12<|im_end|>", "é"], path)
    assert vocabulary == llama_files.VOCABULARY
    assert [names[number] for number in rows[0]] == ["and", "Ġ", "Ġthe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokens.decode(rows[0], path) == "and  the 12" and tokens.decode(rows[1], path) == "é"
    assert tokens.special(path) == [0, 0, 1, 2]
    assert chat.asked(path, "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    x, asked, _ = tokens.encode_answers(["Hi"], ["the"], length=64, tokenizer=path)
    assert tokens.decode(x[0, asked[0] :], path) == "the\n"
    tokens.save(path, tmp_path)  # as others read it
    assert tokens.numbered(["and  the 12<|im_end|>", "é"], str(tmp_path)) == (rows, vocabulary)
    assert chat.asked(str(tmp_path), "Hi") == chat.asked(path, "Hi")


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages[9].role }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"]
)
def test_a_damaged_chat_template_is_one_line(template, tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(UserError, match=r"the chat template of .* is damaged \(.*\)$"):
        chat.asked(str(tmp_path), "Hi")
