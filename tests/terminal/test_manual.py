"""The pages of --help: a short one, all flags (see test_config.py), and one for each name."""

import pytest

from fedjax_mr import __version__, main
from fedjax_mr.config import imports
from fedjax_mr.data import SOURCES
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.sweep.__main__ import main as sweep_command
from fedjax_mr.terminal import manual


@pytest.mark.parametrize("width", [80, 100])
def test_the_short_page_fits_the_terminal(width):
    lines = manual.page("", width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("usage: ")
    text = "\n".join(lines)
    assert all(f"  --{name} " in text for name in ("strategy", "import", "dataset", "lr", "rounds", "seed", "resume"))
    assert all(lines[lines.index(group) + 1].startswith("  --") for group in manual.GROUPS)
    assert all(f"  {name} " in text for name in manual.COMMANDS)
    assert "(default 0.05)" in text and "(default 0)" in text and "--help=all" in text


def test_every_strategy_data_set_and_partition_has_a_page():
    short = manual.page("", 100)
    for name, row in STRATEGIES.items():
        page = manual.page(name, 100)
        assert f"strategies, {row.group}: " in short and f"  {row.group}\n" in page
        assert row.paper in page and f"/{row.build.__module__.rpartition('.')[2]}.py" in page
        assert all(f"  --{flag}" in page for flag in manual._flags_of(name))
        assert 0 < len(page.splitlines()[1]) <= 100
    for name in (*SOURCES, *PARTITIONS):
        assert f"={name}\n" in manual.page(name)


@pytest.mark.parametrize(
    ("topic", "parts"),
    [
        ("fedmr", ["Hu et al., KDD 2024", "--fedmr_unit=TEXT", "[leaf: authors' code;"]),
        ("centralized", ["no flags of its own"]),
        ("cifar100", ["fedjax_mr.data prepare cifar100", "--label_mode"]),
        ("femnist", ["--min_samples_per_client"]),
        ("cnn_digits_small", ["3,658", "8x8x1 of float32, 10 classes"]),
        ("shards", ["--shards_per_client", "--shard_size"]),
        ("--lr", ["--lr=NUMBER"]),
    ],
)
def test_a_page(topic, parts):
    page = manual.page(topic, 110)
    for part in parts:
        assert part in page


@pytest.mark.parametrize(
    ("arguments", "topic"),
    [
        (["--lr=1"], None),
        (["--help"], ""),
        (["-h", "--lr=1"], ""),
        (["--help=all"], "all"),
        (["--help", "moon"], "moon"),
    ],
)
def test_what_is_asked(arguments, topic):
    assert manual.help_topic(arguments) == topic


def test_unknown_topics_are_one_line_with_the_nearest_names(capsys):
    assert main.main(["--help=fedmmr"]) == 2
    out, told = capsys.readouterr()
    assert (out, told.count("\n")) == ("", 1) and "did you mean fedmr or" in told
    assert main.main(["--help=xyzzy"]) == 2
    assert capsys.readouterr().err == "fedjax-mr: no help on 'xyzzy' (--help lists the topics)\n"


def test_versions_and_the_sweeps_help(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"fedjax_mr {__version__} (JAX ")
    assert sweep_command(["--help=fedprox"]) == 0
    assert "--fedprox_mu" in capsys.readouterr().out
    assert main.main(["--help", "--import=gone.py"]) == 2
    assert "gone.py" in capsys.readouterr().err and not imports._IMPORTED
