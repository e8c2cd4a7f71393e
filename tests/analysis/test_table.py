"""The command ``table``."""

import pytest

from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config.config import Config


def test_the_command(keep, capsys):
    for strategy in ("fedmr", "fedavg"):
        keep(Config(strategy=strategy), [0.4, 0.6])
    assert main(["table", "runs", "--target=0.5", "--format=markdown"]) == 0
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("| setting | seeds | rounds | last % |") and set(rule) == set("|- ") and len(body) == 2
    assert main(["table", "runs", "--format=html"]) == 2
    assert "invalid choice: 'html'" in capsys.readouterr().err


def test_the_target_of_a_regression_is_an_error_in_its_unit(keep, capsys):
    file = keep(Config(), [60.0, 50.0]) / "metrics.jsonl"
    file.write_text(file.read_text().replace("accuracy", "rmse"))
    assert main(["table", "runs", "--target=55", "--format=csv"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["rounds to 55"] == "10"
    assert main(["table", "runs", "--target=nan"]) == 2
    assert "--target=nan is out of range (allowed: >= 0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "--target=95"], "--target=95.0 is out of range (allowed: >= 0 and <= 1)"),
        (["runs", "--target=nan"], "--target=nan is out of range"),
        (["x" * 300], "xxx"),  # in Python 3.13, such a path just does not exist
    ],
)
def test_bad_input_is_one_line(keep, capsys, arguments, message):
    keep(Config(), [0.4])
    assert main(["table", *arguments]) == 2
    out, shown = capsys.readouterr()
    assert out == "" and message in shown and shown.count("\n") == 1
