"""The command ``table``."""

from fedjax_mr.analysis.__main__ import main
from fedjax_mr.experiment.config import Config


def test_the_command(keep, capsys):
    for strategy in ("fedmr", "fedavg"):
        keep(Config(strategy=strategy), [0.4, 0.6])
    assert main(["table", "runs", "--target=0.5", "--format=markdown"]) == 0
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("| setting | seeds | rounds | last % |") and set(rule) == set("|- ") and len(body) == 2
    assert main(["table", "runs", "--format=html"]) == 2
    assert "invalid choice: 'html'" in capsys.readouterr().err
