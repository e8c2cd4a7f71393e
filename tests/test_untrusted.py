"""Files of other people: JSON is checked by a schema, and the size of texts is bounded."""

import gzip
import os
import re

import pytest

from fedjax_mr import untrusted
from fedjax_mr.errors import UserError


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ('{"a": 1, "b": [0.5, 2], "more": 0}', {"a": int, "b": [float]}, {"a": 1, "b": [0.5, 2], "more": 0}),
        ('{"a": {"3": 1e2}}', {"a": {int: float}}, {"a": {3: 100.0}}),
        ('{"run": "7_1"}', {str: re.compile(r"\d+_\d+")}, {"run": "7_1"}),
        ('{"a": null}', {"a": (str, None), "b?": int}, {"a": None}),
        ("{}", {str: int}, {}),
        ("[true]", [bool], [True]),
    ],
)
def test_a_value_that_fits_is_returned(text, schema, expected):
    assert untrusted.parse_json(text, schema) == expected


@pytest.mark.parametrize(
    ("text", "schema", "part"),
    [
        ("[]", dict, "it is a list, not an object"),
        ("[]", {"a": int}, "it is a list, not an object"),
        ("null", [int], "it is None, not a list"),
        ("{}", {"a": int}, "a is missing"),
        ('{"a": true}', {"a": int}, "a is True, not a whole number"),
        ('{"a": 1e2}', {"a": int}, "a is 100.0, not a whole number"),
        (f'{{"a": {2**63}}}', {"a": int}, "a is 9223372036854775808, not a whole number"),
        ('{"a": [1, "x"]}', {"a": [float]}, "a.1 is 'x', not a finite number"),
        ('{"a": NaN}', {"a": float}, "a is nan, not a finite number"),
        ('{"a": 1e999}', {"a": float}, "a is inf, not a finite number"),
        ('{"a": 1' + 400 * "0" + "}", {"a": float}, "not a finite number"),
        ('{"x": 1}', {int: int}, "a name in it is 'x', not a whole number"),
        ('{"a": {"../7": "x"}}', {"a": {re.compile("[a-z]+"): str}}, "a name in a is '../7'"),
        ('{"a": 3}', {"a": (str, None)}, "a is 3, not a text or null"),
        ('{"a": "' + 10**5 * "x" + '"}', {"a": int}, "not a whole number"),
        ('{"a": "\\u001b[2J\\ud800"}', {"a": int}, r"a is '\x1b[2J\ud800', not"),
        ("[" * 100_000, object, "it is nested too deeply"),
        ("9" * 5000, object, "Exceeds the limit"),
        ("", object, "Expecting value"),
    ],
)
def test_any_other_value_is_one_short_line_with_its_place(text, schema, part):
    with pytest.raises(ValueError) as caught:
        untrusted.parse_json(text, schema)
    assert part in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_damaged_file_is_one_line_with_the_remedy(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        untrusted.read_json(path, dict)
    for content, reason in ((b"[]", "it is a list, not an object"), (b"\xff", "can't decode"), (b"{", "Expecting")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"a.json is damaged \(.*{reason}.*\): start anew"):
            untrusted.read_json(path, dict, "start anew")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"damaged \(it is not a file\)$"):
        untrusted.read_json(path, dict)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_bounded_one_by_one_and_in_total(suffix, tmp_path):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(b"ab\ncd") if suffix else b"ab\ncd")
    assert list(untrusted.lines(path, max_line=3, max_total=5)) == ["ab", "cd"]
    for bounds, part in (({"max_line": 2}, "line 1 has more than 2 bytes"), ({"max_total": 4}, "more than 4 bytes")):
        with pytest.raises(ValueError, match=part):
            list(untrusted.lines(path, **bounds))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a file"):
        list(untrusted.lines(path))
