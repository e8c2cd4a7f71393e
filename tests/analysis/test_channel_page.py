"""The page with every link and every method."""

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.links import LINKS
from record import channel


def test_reasons_that_differ_in_numbers_only_are_one():
    refusals = {
        ("one", "a"): None,
        ("one", "b"): "needs 3 clients",
        ("two", "a"): "ef21 needs one model",
        ("two", "b"): "needs 2.5 clients",
    }
    text = channel.page(refusals)
    assert "| method | a | b |\n| --- | --- | --- |\n| one | ✓ | 1 |\n| two | 2 | 1 |\n" in text
    assert text.endswith("\n1. needs n clients\n2. ef21 needs one model\n") and "1 of 4 pairs work" in text


def test_the_page_has_all_methods_and_links():
    rows = [line.split(" | ") for line in channel.PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert [cell.strip("| ") for cell in rows[0]] == ["method", *LINKS]
    ours = [name for name in STRATEGIES if STRATEGIES.is_ours(name)]
    assert [row[0].strip("| ") for row in rows[2:]] == ours
