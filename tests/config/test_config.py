"""The configuration's flags, checks across fields, help, and the copies in the run folder."""

import dataclasses
import json
import typing
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from fedjax_mr import settings as declarations
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import settings_of
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.strategies import STRATEGIES, Row, fedavg, fedmr
from fedjax_mr.terminal import manual

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.flags"

FIXED_BY_NAME = (
    "strategy dataset model partition alpha clients cohort rounds local_epochs batch_size optimizer lr momentum "
    "weight_decay clip_norm seed partition_seed eval_every checkpoint_every target_accuracy stop_at_accuracy run_dir "
    "resume overwrite lanes devices data_dir label_mode offline fedmr_unit fedmr_segment fedmr_stage1_rounds "
    "compare_to tensorboard allow_nonfinite"
)


def error_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    assert caught.value.exit_code == 2
    return message


# --- Flags -----------------------------------------------------------------------------------------------------------


def test_no_flags_are_the_defaults():
    config = configuration.parse([])
    assert config == dataclasses.replace(Config(), hyper=fedmr.Hyper())
    assert (config.strategy, config.dataset, config.model, config.partition) == (
        "fedmr",
        "digits",
        "cnn_digits",
        "dirichlet",
    )
    assert (config.alpha, config.clients, config.cohort) == (0.5, 20, 5)
    resolve(config)


def test_the_quickstart_file_spells_out_the_defaults():
    assert configuration.parse([f"--flagfile={QUICKSTART}"]) == configuration.parse([])
    assert "--strategy" not in [line.split("=")[0] for line in QUICKSTART.read_text().splitlines()]


def test_the_packages_flag_files_are_there_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configuration.parse(["--flagfile=exp/cifar10.flags"]).model == "lenet5"
    Path("exp").mkdir()
    Path("exp/cifar10.flags").write_text("--model=logistic\n")  # one's own comes first
    assert configuration.parse(["--flagfile=exp/cifar10.flags"]).model == "logistic"
    assert "exp/no.flags" in error_of(configuration.parse, ["--flagfile=exp/no.flags"])


def test_every_name_that_scripts_rely_on_is_a_flag():
    text = manual.all_flags()
    for name in FIXED_BY_NAME.split():
        assert f"\n  --{name}" in text, name


def test_each_strategy_reads_its_own_flags_and_ignores_the_others():
    shared = ["--fedmr_unit=segment", "--fedmr_segment=0.25", "--fedavg_weights=uniform"]
    assert configuration.parse(shared).hyper == fedmr.Hyper(unit="segment", segment=0.25)
    assert configuration.parse(["--strategy=fedavg", *shared]).hyper == fedavg.Hyper(weights="uniform")
    assert configuration.parse(["--strategy=centralized", *shared]).hyper is None
    resolve(configuration.parse(["--strategy=fedavg", "--fedmr_segment=-1"]))


def test_a_new_strategy_brings_its_flags(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Hyper:
        mu: float | None = declarations.field(None, "mu of the paper", low=0, open_low=True)
        powers: tuple[int, ...] = declarations.field((1, 2), "powers of the paper", low=0)
        fast: bool = declarations.field(True, "whether to hurry")
        private: int = 3

    monkeypatch.setitem(STRATEGIES, "mine", Row(fedavg.build, Hyper, "Nobody, 2030"))
    assert configuration.parse(["--strategy=mine"]).hyper == Hyper()
    config = configuration.parse(["--strategy=mine", "--mine_mu=0.5", "--mine_powers=4", "--nomine_fast"])
    assert config.hyper == Hyper(0.5, (4,), False)
    assert configuration.parse(["--strategy=mine", "--mine_powers=none"]).hyper == Hyper(powers=())
    assert configuration.parse(configuration.to_flags(config)) == config
    assert "--mine_private" not in manual.all_flags()
    assert "Strategy mine (Nobody, 2030)" in manual.all_flags()
    assert "hyper.mu=0 is out of range" in error_of(resolve, Config(strategy="mine", hyper=Hyper(0)))
    assert "hyper.powers=-1" in error_of(resolve, Config(strategy="mine", hyper=Hyper(powers=(-1,))))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--stratgy=fedmr"], ["--stratgy", "did you mean --strategy?"]),
        (["--flagfile=no/such.flags"], ["no/such.flags", "No such file"]),
        (["--rounds=1.5"], ["--rounds=1.5", "whole number"]),
        (["--lr=fast"], ["--lr=fast", "not a number"]),
        (["--fedmr_server_recombines=before"], ["--fedmr_server_recombines=before", "neither true nor false"]),
        (["fedmr"], ["'fedmr'", "--name=value"]),
    ],
)
def test_bad_flags(arguments, parts):
    message = error_of(configuration.parse, arguments)
    for part in parts:
        assert part in message


# --- Checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"strategy": "fedmrr"}, ["strategy 'fedmrr'", "did you mean 'fedmr'?"]),
        ({"model": "cnn_digit"}, ["model 'cnn_digit'", "did you mean 'cnn_digits'?"]),
        ({"dataset": "digit"}, ["dataset 'digit'", "did you mean 'digits'?"]),
        ({"partition": "dirichlett"}, ["partition 'dirichlett'", "did you mean 'dirichlet'?"]),
        ({"optimizer": "sgdd"}, ["optimizer 'sgdd'", "did you mean 'sgd'?"]),
        ({"cohort": 21}, ["cohort=21", "clients=20"]),
        ({"lr": -0.1}, ["lr=-0.1", "> 0"]),
        ({"lr": 0}, ["lr=0", "> 0"]),
        ({"lr": float("nan")}, ["lr=nan"]),
        ({"alpha": 0.0}, ["alpha=0.0", "> 0"]),
        ({"momentum": 1.5}, ["momentum=1.5", ">= 0 and <= 1"]),
        ({"rounds": 0}, ["rounds=0", ">= 1"]),
        ({"clients": -1}, ["clients=-1", ">= 0"]),
        ({"batch_size": -5}, ["batch_size=-5"]),
        ({"clip_norm": 0.0}, ["clip_norm=0.0", "> 0"]),
        ({"server_optimizer": "yogy"}, ["unknown server_optimizer 'yogy'", "did you mean 'yogi'?"]),
        ({"server_lr": 0.0}, ["server_lr=0.0", "> 0"]),
        ({"server_momentum": 1.0}, ["server_momentum=1.0", ">= 0 and < 1"]),
        ({"server_beta2": 1.0}, ["server_beta2=1.0", ">= 0 and < 1"]),
        ({"server_tau": 0.0}, ["server_tau=0.0", "> 0"]),
        ({"seed": 2**31}, ["seed=2147483648", "< 2^31"]),
        ({"lr": "0.1"}, ["lr='0.1' is not a number"]),
        ({"resume": True, "overwrite": True}, ["resume=True", "overwrite=True"]),
        ({"hyper": fedavg.Hyper()}, ["fedavg.Hyper", "'fedmr'", "fedmr.Hyper"]),
        ({"strategy": "centralized", "hyper": fedmr.Hyper()}, ["'centralized'", "has no hyper-parameters"]),
        ({"hyper": fedmr.Hyper(unit="leef")}, ["hyper.unit='leef'", "did you mean 'leaf'?"]),
        ({"hyper": fedmr.Hyper(segment=1.5)}, ["hyper.segment=1.5", "> 0 and <= 1"]),
    ],
)
def test_bad_values(changes, parts):
    message = error_of(resolve, Config(**changes))
    for part in parts:
        assert part in message


def test_methods_of_one_network_refuse_several():
    with pytest.raises(UserError, match=r"fedmr needs the same network for all clients, but model= names 2; .* local"):
        resolve(Config(strategy="fedmr", model="logistic,mlp"))


def test_a_path_is_a_data_set():
    resolve(Config(dataset="somewhere/own.npz"))
    resolve(Config(dataset="own.npz"))


def test_numpy_numbers_are_numbers():
    import numpy as np

    config = Config(lr=np.float32(0.5), rounds=np.int64(3))  # type: ignore[arg-type]
    resolve(config)
    assert configuration.digest(config) == configuration.digest(Config(lr=0.5, rounds=3))


# --- Round trips -----------------------------------------------------------------------------------------------------


def values_of(owner):
    """Return hypothesis strategies for the settings of a dataclass, by field."""
    hints = typing.get_type_hints(owner)
    result = {}
    for each in dataclasses.fields(owner):
        info = declarations.info(each)
        if info is None:
            continue
        text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12)
        text = text.filter(lambda value: value.isprintable() and value.lower() != "none")
        by_type = {
            bool: st.booleans(),
            int: st.integers(
                0 if info.low is None else int(info.low), 2**31 - 1 if info.high is None else int(info.high)
            ),
            float: st.floats(
                info.low,
                declarations.LARGEST_FLOAT32 if info.high is None else info.high,
                allow_nan=False,
                allow_infinity=False,
                exclude_min=info.open_low,
                exclude_max=info.open_high,
            ),
            str: st.sampled_from(info.choices) if info.choices else text,
        }
        kinds = typing.get_args(hints[each.name]) or (hints[each.name],)
        if typing.get_origin(hints[each.name]) is tuple:
            result[each.name] = st.lists(by_type[kinds[0]], max_size=3).map(tuple)
        else:
            result[each.name] = st.one_of(*(st.none() if kind is type(None) else by_type[kind] for kind in kinds))
    return result


@st.composite
def configs(draw):
    strategy = draw(st.sampled_from(sorted(STRATEGIES)))
    owner = STRATEGIES[strategy].hyper
    hyper = draw(st.builds(owner, **values_of(owner))) if owner else None
    fixed = {"strategy": st.just(strategy), "hyper": st.just(hyper), "imports": st.just(())}  # see test_imports.py
    return draw(st.builds(Config, **(values_of(Config) | fixed)))


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(config=configs())
def test_round_trip_through_flags_and_json(config, tmp_path_factory):
    elsewhere = dataclasses.replace(
        config, run_dir=None, resume=False, overwrite=False, coordinator=None, num_processes=None, process_id=None
    )
    assert configuration.parse(configuration.to_flags(config)) == elsewhere
    folder = tmp_path_factory.mktemp("run")
    configuration.save(config, folder)
    assert configuration.load(folder) == config
    assert configuration.parse([f"--flagfile={folder / 'run.flags'}"]) == elsewhere
    assert configuration.differences(config, configuration.load(folder)) == []


def test_saved_files(tmp_path):
    configuration.save(Config(run_dir="here", resume=True), tmp_path)
    first, *lines = (tmp_path / "run.flags").read_text().splitlines()
    assert first == f"# python -m fedjax_mr.main --flagfile={tmp_path / 'run.flags'}"
    assert {"--strategy=fedmr", f"--lr={Config().lr}", "--fedmr_unit=leaf", "--clip_norm=none", "--nooffline"} <= set(
        lines
    )
    assert not any(line.startswith(("--run_dir", "--resume", "--noresume", "--overwrite")) for line in lines)
    assert json.loads((tmp_path / "config.json").read_text())["fedmr_unit"] == "leaf"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "run.flags"]


def test_settings_left_out_are_the_defaults():
    assert configuration.hyper(Config()) == fedmr.Hyper()
    assert configuration.hyper(Config(strategy="centralized")) is None
    assert configuration.digest(Config()) == configuration.digest(configuration.parse([]))


def test_a_run_of_a_version_without_some_settings_has_their_defaults(tmp_path):
    configuration.save(Config(rounds=7), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in (
        "server_optimizer",
        "server_lr",
        "server_momentum",
        "server_beta2",
        "server_tau",
        "fedmr_unit",
    ):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = configuration.load(tmp_path)
    assert loaded == dataclasses.replace(Config(rounds=7), hyper=fedmr.Hyper())
    assert configuration.digest(loaded) == configuration.digest(Config(rounds=7))


def test_differences_name_what_can_change_results():
    saved = Config()
    config = Config(lr=0.77, rounds=3, hyper=fedmr.Hyper(unit="layer"), run_dir="x", lanes=2, tensorboard=True)
    assert configuration.differences(config, saved) == [
        f"lr: 0.77 (saved {saved.lr})",
        f"rounds: 3 (saved {saved.rounds})",
        "fedmr_unit: layer (saved leaf)",
    ]
    other = configuration.differences(Config(strategy="indep"), saved)
    assert "strategy: indep (saved fedmr)" in other
    assert "fedmr_unit: - (saved leaf)" in other


@pytest.mark.parametrize(
    "strategy, name, earlier, now",
    [("fedexlora", "weights", "samples", "uniform"), ("flexlora", "split", "roots", "released")],
)
def test_a_run_that_is_older_than_a_setting_keeps_what_it_did(tmp_path, strategy, name, earlier, now):
    """Its folder does not name the setting, whose default is not what the run did."""
    (tmp_path / "config.json").write_text(json.dumps({"strategy": strategy}))
    assert getattr(configuration.load(tmp_path).hyper, name) == earlier
    assert getattr(configuration.parse([f"--strategy={strategy}"]).hyper, name) == now
    (tmp_path / "config.json").write_text(json.dumps({"strategy": strategy, f"{strategy}_{name}": now}))
    assert getattr(configuration.load(tmp_path).hyper, name) == now


def test_a_run_that_is_older_than_the_choice_of_convolutions_keeps_the_direct_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"strategy": "fedavg"}))
    saved, now = configuration.load(tmp_path), configuration.parse(["--strategy=fedavg"])
    assert (saved.convolution, now.convolution) == ("direct", "auto")
    assert "convolution: auto (saved direct)" in configuration.differences(now, saved)
    again = configuration.parse(["--strategy=fedavg", "--convolution=direct"])
    assert not any(each.startswith("convolution") for each in configuration.differences(again, saved))


def test_digest():
    digests = {
        configuration.digest(Config(**changes)) for changes in ({}, {"lr": 0.77}, {"seed": 1}, {"strategy": "indep"})
    }
    assert len(digests) == 4
    assert configuration.digest(Config(run_dir="x", devices=2, progress=False)) in digests
    assert all(len(digest) == 8 and digest.isalnum() for digest in digests)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "not a run folder"),
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"strategy": "fedmr", "colour": 3}', "colour"),
        ('{"strategy": "gone", "colour": 3}', "colour"),  # a method that is not here may have settings of its own
        ('{"strategy": "gone", "gone_weights": {}}', "cannot be read"),
        ('{"strategy": "fedmr", "lr": "fast"}', "--lr='fast' is not a number"),
    ],
)
def test_unreadable_configurations(tmp_path, content, part):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert part in error_of(configuration.load, tmp_path)


# --- Help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_help_fits_the_terminal(width):
    lines = manual.all_flags(width).splitlines()
    assert max(map(len, lines)) <= width or width < 60  # long names are not broken
    assert not any(line != line.rstrip() for line in lines)


def test_help_tells_everything():
    entries = {part.split("=")[0].split()[0]: part for part in manual.all_flags(100).split("\n  --")[1:]}
    text = " ".join(manual.all_flags(100).split())
    for group in (*configuration.GROUPS, "Strategy fedmr (Hu et al., KDD 2024)"):
        assert group in text
    owners = [("", Config)] + [(f"{name}_", row.hyper) for name, row in STRATEGIES.items() if row.hyper]
    for prefix, owner in owners:
        for each in dataclasses.fields(owner):
            info = declarations.info(each)
            if info is not None:
                entry = " ".join(entries[prefix + (info.flag or each.name)].split())
                assert info.help in entry, each.name
                assert f"[{info.source or 'our choice'}]" in entry, each.name
                assert info.source or not prefix, each.name  # a paper's symbol has a source
                assert info.unit in entry, each.name
                assert "default " in entry, each.name
                assert all(choice in entry for choice in info.choices or ()), each.name
    assert "(clients; >= 0; default 20 [our choice])" in text
    assert "default 0 [" in text  # a zero is not taken for False


def test_every_flag_belongs_to_a_group():
    groups = {declarations.info(each).group for each in dataclasses.fields(Config) if declarations.info(each)}
    assert groups == set(configuration.GROUPS)


def test_settings_without_effect_make_no_other_run(monkeypatch):
    base = Config(strategy="fedavg", partition="iid")
    same = dataclasses.replace(base, alpha=0.1, lora_head=False, attackers=0.5, robust_outliers=3, staleness_a=1.0)
    assert configuration.digest(same) == configuration.digest(base)
    assert not configuration.differences(same, base)
    used = dict(partition="dirichlet", adapter="lora", attack="mimic", robust="krum", mode="async")
    for flag, value in used.items():
        one, other = (dataclasses.replace(each, **{flag: value}) for each in (same, base))
        assert configuration.digest(one) != configuration.digest(other), flag
    monkeypatch.setitem(PARTITIONS, "own", PARTITIONS["dirichlet"])  # a user's, with settings of ours
    one, other = (dataclasses.replace(each, partition="own") for each in (same, base))
    assert configuration.differences(one, other) == ["alpha: 0.1 (saved 0.5)"]


def test_a_portable_configuration_names_no_folder():
    """Records of runs are found by such a configuration on every machine."""
    paths = {each.name: each for each in settings_of(Config) if each.info.path}
    assert {"dataset", "fleet", "run_dir", "compare_to", "partition_file"} <= set(paths)
    value = lambda setting: ("/home/me/a.csv",) if setting.repeated else "/home/me/a.csv"
    portable = configuration.portable(Config(**{name: value(each) for name, each in paths.items()}))
    assert "/home" not in json.dumps(configuration.to_json(portable))
    assert portable.fleet == "a.csv" and portable.run_dir is None and portable.compare_to == ()


def test_what_compiled_programs_take_as_arguments():
    """Floats, unless they decide a shape or a branch; seeds; and the partition, but not the number of clients."""
    compiled = {each.flag: each.compiled for each in settings_of(Config)}
    numbers = {each.flag for each in settings_of(Config) if each.is_number and each.info.group != "Partition"}
    assert numbers == {
        "lr", "momentum", "weight_decay", "clip_norm", "server_lr", "server_momentum", "server_beta2", "server_tau",
        "dp_clip", "dp_noise", "dp_poisson", "dp_quantile", "attackers", "attack_scale", "staleness_a", "staleness_b",
        "deadline", "lr_decay", "lr_every", "lr_over", "lr_warmup",
    }  # fmt: skip
    for flag in ("seed", "dp_seed", "partition", "alpha", "partition_seed"):
        assert compiled[flag] == "argument"
    for flag in ("clients", "cohort", "model", "local_epochs", "compress_ratio", "lora_dropout", "over_select"):
        assert compiled[flag] == "constant"
    for flag in ("dataset", "rounds", "eval_every", "patience", "dp_delta"):
        assert compiled[flag] == "no"


def test_a_command_line_leaves_nothing_to_the_next_one():
    """All command lines are read into the same flags, which are defined once."""
    before = configuration.parse([])
    once = configuration.parse(
        ["--lr=0.5", "--noprogress", "--fedme_cluster_rounds=3", "--fedme_cluster_rounds=5", "--strategy=fedme"]
    )
    again = configuration.parse(["--fedme_cluster_rounds=7", "--strategy=fedme"])
    assert (once.lr, once.progress, once.hyper.cluster_rounds) == (0.5, False, (3, 5))
    assert (again.lr, again.progress, again.hyper.cluster_rounds) == (before.lr, before.progress, (7,))
    assert configuration.parse([]) == before
