"""Any dataclass of settings as flags, help, checks and plain values."""

import dataclasses
import json

import numpy as np
import pytest
from absl import flags

from fedjax_mr import settings as declarations
from fedjax_mr.config import settings
from fedjax_mr.errors import UserError
from fedjax_mr.settings import LARGEST_INT32, field

COLOURS = {"red": 1, "green": 2}


@dataclasses.dataclass(frozen=True)
class Example:
    lr: float = field(0.05, "learning rate", low=0, open_low=True)
    momentum: float = field(0.5, "momentum of sgd", low=0, high=1, source="the authors' code")
    decay: float = field(0.9, "decay of an average", low=0, high=1, open_high=True)
    weight_decay: float = field(0.0, "factor of the weights", low=0)
    clip_norm: float | None = field(None, "largest norm", low=0, open_low=True)
    share: float = field(0.0, "any number")
    optimizer: str = field("sgd", "the optimizer", choices=("sgd", "adam", "adamw"))
    strategy: str = field("fedmr", "method by name")
    model: str = field("mlp", "network by name")
    colour: str = field("red", "colour by name", names=COLOURS)
    rounds: int = field(300, "how many rounds", unit="rounds", low=1, affects_results=False)
    clients: int = field(20, "how many clients", unit="clients", low=0)
    seed: int = field(0, "seed of everything", low=0, high=LARGEST_INT32)
    checkpoint_every: int | None = field(None, "rounds between two checkpoints", low=1)
    run_dir: str | None = field(None, "folder of the run")
    compare_to: tuple[str, ...] = field((), "folders of other runs")
    powers: tuple[int, ...] = field((1, 2), "powers of the paper", low=0)
    resume: bool = field(False, "go on")
    offline: bool = field(False, "never use the network")
    progress: bool = field(True, "show a bar")
    private: int = 3
    hyper: object = None


@dataclasses.dataclass(frozen=True)
class Own:
    mu: float | None = field(None, "mu of the paper", low=0, open_low=True, source="the paper")
    secure: bool = field(False, "whether to hide")


def parse(arguments):
    known = [*settings.settings_of(Example), *settings.settings_of(Own, "fedmr_")]
    return settings.build(Example, settings.parse(arguments, known))


def check(example):
    for setting, value in settings.values_of(example):
        setting.check(value)


def as_flags(example):
    return [line for setting, value in settings.values_of(example) for line in setting.as_flags(value)]


def setting_of(name):
    return {setting.name: setting for setting in settings.settings_of(Example)}[name]


def error_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    assert caught.value.exit_code == 2
    return message


# --- The settings of a dataclass -------------------------------------------------------------------------------------


def test_fields_become_settings():
    found = {setting.name: setting for setting in settings.settings_of(Example)}
    assert list(found) == [each.name for each in dataclasses.fields(Example)][:-2]  # not those without Info
    kinds = {name: (setting.kind, setting.optional, setting.repeated) for name, setting in found.items()}
    assert kinds["lr"] == (float, False, False) and kinds["clip_norm"] == (float, True, False)
    assert kinds["run_dir"] == (str, True, False) and kinds["resume"] == (bool, False, False)
    assert kinds["compare_to"] == (str, False, True) and kinds["powers"] == (int, False, True)
    assert found["rounds"].info == declarations.Info("how many rounds", unit="rounds", low=1, affects_results=False)
    assert found["rounds"].default == 300


def test_a_prefix_is_of_the_flag_alone():
    assert [(each.flag, each.name) for each in settings.settings_of(Own, "mine_")] == [
        ("mine_mu", "mu"),
        ("mine_secure", "secure"),
    ]
    assert list(settings.settings_of(None, "mine_")) == list(settings.values_of(None)) == []


def test_two_dataclasses_share_a_command_line():
    known = [*settings.settings_of(Example), *settings.settings_of(Own, "mine_")]
    values = settings.parse(["--lr=0.2", "--mine_mu=0.5", "--mine_secure"], known)
    assert settings.build(Example, values) == Example(lr=0.2)
    assert settings.build(Own, values, "mine_") == Own(0.5, True)


# --- Flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--lr=0.1", "--lr=0.2"], "lr", 0.2),
        (["--lr", "1e-3"], "lr", 1e-3),
        (["-lr=1"], "lr", 1.0),
        (["--rounds=7"], "rounds", 7),
        (["--resume"], "resume", True),
        (["--resume", "--noresume"], "resume", False),
        (["--offline=true"], "offline", True),
        (["--noprogress"], "progress", False),
        (["--clip_norm=3"], "clip_norm", 3.0),
        (["--clip_norm=3", "--clip_norm=none"], "clip_norm", None),
        (["--checkpoint_every=4", "--checkpoint_every=None"], "checkpoint_every", None),
        (["--run_dir=somewhere/else"], "run_dir", "somewhere/else"),
        (["--run_dir=x", "--run_dir="], "run_dir", None),
        (["--compare_to=a", "--compare_to=b"], "compare_to", ("a", "b")),
        (["--compare_to=a", "--compare_to=none", "--compare_to=b"], "compare_to", ("b",)),
        (["--powers=4"], "powers", (4,)),
        (["--powers=none"], "powers", ()),
        (["--model=none"], "model", "none"),
    ],
)
def test_values(arguments, name, value):
    result = getattr(parse(arguments), name)
    assert result == value
    assert type(result) is type(value)


def test_no_flags_are_the_defaults():
    assert parse([]) == Example()


def test_flag_files_expand_in_place(tmp_path):
    (tmp_path / "inner.flags").write_text("# a comment\n\n--lr=0.3\n--rounds=3\n")
    outer = tmp_path / "outer.flags"
    outer.write_text(f"--lr=0.2\n--flagfile={tmp_path / 'inner.flags'}\n  --rounds=4\n")
    assert parse(["--lr=0.1", f"--flagfile={outer}"]).lr == 0.3
    assert parse(["--flagfile", str(outer), "--lr=0.1"]).lr == 0.1
    assert parse([f"--flagfile={outer}"]).rounds == 4


def test_the_global_flags_stay_untouched():
    before = set(flags.FLAGS)
    parse(["--lr=0.1"])
    assert set(flags.FLAGS) == before


def test_a_flag_file_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "binary.flags").write_bytes(b"\x80\x04")
    arguments = [f"--flagfile={tmp_path / 'binary.flags'}"]
    for read in (parse, lambda arguments: settings.values_of_flag(arguments, "import")):
        assert "binary.flags: it is not UTF-8 text" in error_of(read, arguments)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--stratgy=fedmr"], ["--stratgy", "did you mean --strategy?"]),
        (["--xyzzy"], ["unknown flag --xyzzy"]),
        (["--flagfile=no/such.flags"], ["no/such.flags", "No such file"]),
        (["--flagfile=."], ["flag file"]),
        (["--flagfile="], ["--flagfile= is empty"]),
        (["--flagfile"], ["--flagfile"]),
        (["--rounds=1.5"], ["--rounds=1.5", "whole number"]),
        (["--lr=fast"], ["--lr=fast", "not a number"]),
        (["--fedmr_secure=before_upload"], ["--fedmr_secure=before_upload", "neither true nor false"]),
        (["--rounds=none"], ["--rounds=none", "whole number"]),
        (["--resume=perhaps"], ["--resume=perhaps"]),
        (["--noresume=1"], ["--noresume=1"]),
        (["--lr"], ["--lr"]),
        (["fedmr"], ["'fedmr'", "--name=value"]),
        (["--lr=1", "--", "--rounds=3"], ["'--rounds=3'"]),
    ],
)
def test_bad_flags(arguments, parts):
    message = error_of(parse, arguments)
    for part in parts:
        assert part in message


def test_a_bad_line_in_a_flag_file_is_named(tmp_path):
    path = tmp_path / "bad.flags"
    path.write_text("--lr 0.1\n")
    assert "--lr 0.1" in error_of(parse, [f"--flagfile={path}"])
    path.write_bytes(b"--run_dir=\xff\xfe\n")
    error_of(parse, [f"--flagfile={path}"])


# --- Checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"optimizer": "sgdd"}, ["--optimizer", "'sgdd'", "did you mean 'sgd'?"]),
        ({"lr": -0.1}, ["--lr=-0.1", "> 0"]),
        ({"lr": 0}, ["--lr=0", "> 0"]),
        ({"lr": float("nan")}, ["--lr=nan"]),
        ({"weight_decay": float("inf")}, ["--weight_decay=inf", ">= 0"]),
        ({"share": float("inf")}, ["--share=inf", "allowed: finite numbers"]),
        ({"momentum": 1.5}, ["--momentum=1.5", ">= 0 and <= 1"]),
        ({"decay": 1.0}, ["--decay=1.0", ">= 0 and < 1"]),
        ({"decay": -0.1}, ["--decay=-0.1", ">= 0 and < 1"]),
        ({"rounds": 0}, ["--rounds=0", ">= 1"]),
        ({"clients": -1}, ["--clients=-1", ">= 0"]),
        ({"clip_norm": 0.0}, ["--clip_norm=0.0", "> 0"]),
        ({"seed": 2**31}, ["--seed=2147483648", "< 2^31"]),
        ({"seed": 10**400}, ["--seed=1000", "< 2^31"]),
        ({"checkpoint_every": 0}, ["--checkpoint_every=0"]),
        ({"powers": (1, -1)}, ["--powers=-1", ">= 0"]),
        ({"lr": "0.1"}, ["--lr='0.1' is not a number"]),
        ({"rounds": 1.5}, ["--rounds=1.5 is not a whole number"]),
        ({"rounds": True}, ["--rounds=True is not"]),
        ({"resume": "yes"}, ["--resume='yes' is not True or False"]),
        ({"rounds": None}, ["--rounds=None is not"]),
        ({"model": 3}, ["--model=3 is not a text"]),
        ({"compare_to": "a"}, ["--compare_to='a' is not a tuple; a single value is ('a',)"]),
        ({"compare_to": (1,)}, ["--compare_to=1 is not"]),
        ({"run_dir": "two\nlines"}, ["--run_dir", "unprintable"]),
        ({"run_dir": " x"}, ["--run_dir", "spaces at an end"]),
    ],
)
def test_bad_values(changes, parts):
    message = error_of(check, Example(**changes))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 1}, {"momentum": 1}, {"decay": 0.0}, {"clip_norm": 0.1}, {"colour": "any"}, {"seed": 2**31 - 1}],
)
def test_good_values(changes):
    check(Example(**changes))


# --- Plain values ----------------------------------------------------------------------------------------------------


def test_round_trip_through_flags_and_json():
    example = Example(
        lr=0.1, clip_norm=2.5, run_dir="a b", compare_to=("x", "y"), powers=(), resume=True, progress=False
    )
    assert parse(as_flags(example)) == example
    values = {setting.flag: setting.plain(value) for setting, value in settings.values_of(example)}
    assert settings.build(Example, json.loads(json.dumps(values))) == example
    assert settings.build(Example, {"lr": 0.1, "of_another": 3}) == Example(lr=0.1)


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("lr", 0.1, ["--lr=0.1"]),
        ("clip_norm", None, ["--clip_norm=none"]),
        ("resume", True, ["--resume"]),
        ("resume", False, ["--noresume"]),
        ("compare_to", ("a", "b"), ["--compare_to=a", "--compare_to=b"]),
        ("compare_to", (), ["--compare_to=none"]),
    ],
)
def test_flags_of_a_value(name, value, lines):
    assert setting_of(name).as_flags(value) == lines


def test_numpy_numbers_are_numbers():
    example = Example(lr=np.float32(0.5), rounds=np.int64(3))  # type: ignore[arg-type]
    check(example)
    plain = [setting_of("lr").plain(example.lr), setting_of("rounds").plain(example.rounds)]
    assert plain == [0.5, 3] and [type(each) for each in plain] == [float, int]


# --- Help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("lr", "--lr=NUMBER learning rate (> 0; default 0.05 [our choice])"),
        ("momentum", "--momentum=NUMBER momentum of sgd (>= 0 and <= 1; default 0.5 [the authors' code])"),
        ("decay", "--decay=NUMBER decay of an average (>= 0 and < 1; default 0.9 [our choice])"),
        ("clip_norm", "--clip_norm=NUMBER largest norm (> 0; default none [our choice])"),
        ("optimizer", "--optimizer=TEXT the optimizer (one of sgd, adam, adamw; default sgd [our choice])"),
        ("colour", "--colour=TEXT colour by name (one of red, green; default red [our choice])"),
        ("clients", "--clients=INTEGER how many clients (clients; >= 0; default 20 [our choice])"),
        ("seed", "--seed=INTEGER seed of everything (>= 0 and < 2^31; default 0 [our choice])"),
        ("powers", "--powers=INTEGER powers of the paper (>= 0; repeatable; default (1, 2) [our choice])"),
        ("compare_to", "--compare_to=TEXT folders of other runs (repeatable; default none [our choice])"),
        ("progress", "--progress show a bar (default on [our choice])"),
    ],
)
def test_help_of_a_setting(name, entry):
    assert " ".join(" ".join(setting_of(name).help(100)).split()) == entry


def test_names_are_looked_up_when_help_is_asked_for(monkeypatch):
    monkeypatch.setitem(COLOURS, "blue", 3)
    assert "one of red, green, blue" in " ".join(settings.help_of(Example, 100).split())


@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_fits_the_width(width):
    lines = settings.help_of(Example, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)
    assert not any("private" in line for line in lines)
