"""Every setting refuses every kind of bad value in one line; so do settings that do not fit together."""

import jax
import pytest

from fedjax_mr import models
from fedjax_mr.config import config as configuration
from fedjax_mr.config import settings
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import DEEPEST_FLAG_FILES
from fedjax_mr.engine.devices import memory_errors
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.terminal.messages import flags_in_errors

EVERY = {
    setting.flag: setting
    for prefix, owner in [("", Config), *((f"{name}_", row.hyper) for name, row in STRATEGIES.items())]
    for setting in settings.settings_of(owner, prefix)
}
NO_INTEGERS = ("x", "1.5", "1e3", "nan", "0x10", "1 2", "9" * 5000)
NO_NUMBERS = ("x", "nan", "inf", "-inf", "1e39", "1e999", "1,5")
LONG_PATHS = ("a" * 256, "runs/" + "ä" * 128, "a/" * 2000)


def bad_values(setting):
    """Yield texts that are no value of a setting, whatever it is."""
    low, high = setting.info.low, setting.info.high
    if not setting.optional and (setting.kind is not str or setting.repeated):
        yield ""
    if setting.kind is bool:
        yield from ("perhaps", "2")
    elif setting.kind is str:
        yield from (" x", "two\nlines", "\0")
        yield from ("no such choice",) if setting.info.choices else ()
        yield from LONG_PATHS if setting.info.path else ()
    else:
        yield from NO_INTEGERS if setting.kind is int else NO_NUMBERS
        yield from (str(10**12), "3000000000", str(10**400)) if setting.kind is int else ()
        yield from () if low is None else (str(low - 1), "-1e12" if setting.kind is float else str(-(10**12)))
        yield from (str(low),) if setting.info.open_low else ()
        yield from () if high is None else (str(high + 1),)


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message and caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("flag", EVERY)
def test_every_setting_refuses_bad_values(flag):
    setting = EVERY[flag]

    def read(text):
        setting.check(settings.parse([f"--{flag}={text}"], [setting])[flag])

    for text in bad_values(setting):
        assert f"--{flag}" in refusal(read, text), text


def test_all_that_names_a_file_or_folder_is_a_path():
    paths = {flag for flag, setting in EVERY.items() if setting.info.path}
    named = {flag for flag, setting in EVERY.items() if setting.kind is str and "folder" in setting.info.help.lower()}
    graphs = {f"{strategy}_graph" for strategy in ("dpsgd", "gossipmr", "kgt")}
    assert paths == {"dataset", "fleet", "import", "partition_file", "public_from"} | graphs | named


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--num_processes=1 --process_id=5", "--process_id=5 is not below --num_processes=1"),
        ("--num_processes=2 --process_id=2 --coordinator=a:1", "--process_id=2 is not below --num_processes=2"),
        ("--compare_to=", "--compare_to=: the value is empty; 'none' clears the list"),
        ("--local_epochs=3000000000", "--local_epochs=3000000000 is out of range (allowed: >= 1 and <= 10,000)"),
        ("--rounds=1000000000000", "--rounds=1000000000000 is out of range (allowed: >= 1 and < 2^31)"),
        ("--lr=1e39", "--lr=1e+39 is out of range (allowed: > 0 and <= 3.4e+38)"),
        ("--devices=100000", "--devices=100000 is out of range (allowed: >= 1 and <= 65,536)"),
        ("--strategy=fedgen --fedgen_hidden=1000000", "--fedgen_hidden=1000000 is out of range"),
        ("--run_dir=" + "a" * 256, "is too long for a path: names have at most 255 bytes"),
    ],
)
def test_bad_flags_through_the_whole_configuration(arguments, part):
    with pytest.raises(UserError) as caught, flags_in_errors("fedgen"):
        resolve(configuration.parse(arguments.split()))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_long_chain_of_flag_files_is_refused(tmp_path):
    for number in range(201):
        line = "--lr=0.3" if number == 200 else f"--flagfile={tmp_path / str(number + 1)}"
        (tmp_path / str(number)).write_text(line)
    last = [f"--flagfile={tmp_path / str(201 - DEEPEST_FLAG_FILES)}"]
    assert configuration.parse(last).lr == 0.3
    for first in (0, 200 - DEEPEST_FLAG_FILES):
        message = refusal(configuration.parse, [f"--flagfile={tmp_path / str(first)}"])
        assert f"more than {DEEPEST_FLAG_FILES} deep" in message


def test_flag_files_that_include_each_other_often_are_refused(tmp_path):
    """Sixteen files of ten lines would be read 10^15 times."""
    for number in range(DEEPEST_FLAG_FILES):
        line = "--lr=0.3" if number == DEEPEST_FLAG_FILES - 1 else f"--flagfile={tmp_path / str(number + 1)}"
        (tmp_path / str(number)).write_text(10 * f"{line}\n")
    assert configuration.parse([f"--flagfile={tmp_path / '14'}"]).lr == 0.3
    for read in (configuration.parse, lambda flags: settings.values_of_flag(flags, "import")):
        assert "include each other more than 1,000 times" in refusal(read, [f"--flagfile={tmp_path / '0'}"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("", None),
        ("--strategy=fedme --public_share=0.1", None),
        ("--strategy=fedavg --public_share=0.1", "fedavg takes no public data: the samples of --public_share=0.1"),
        ("--strategy=fedavg --public_max=100", "without --public_share there is no public set"),
        ("--strategy=fedavg --nopublic_labels", "without --public_share there is no public set"),
        ("--strategy=fedavg --public_from=mnist", "without --public_share there is no public set"),
        ("--strategy=fedme --public_max=100", "fedme needs public data: 0.1 of the training samples"),
        ("--strategy=fedme --public_max=100 --partition_file=x.npz", None),
    ],
)
def test_public_settings_without_effect_are_told(arguments, part):
    notes = resolve(configuration.parse(arguments.split())).notes
    assert len(notes) == (part is not None)
    assert all(note.startswith(part) for note in notes)


@pytest.mark.parametrize("strategy", ["fedcross", "fedmut", "fedme"])
def test_methods_that_exchange_refuse_a_single_client(engine, strategy):
    assert "cohort= must be at least 2" in refusal(lambda: engine(strategy, "linear", cohort=1))


def test_a_projection_needs_a_representation():
    with pytest.raises(UserError, match="projection=8: logistic has no representation to project"):
        models.build("logistic", input_shape=(8, 8, 1), num_classes=10, projection=8)


def test_exhausted_memory_is_one_line():
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes")):
        with pytest.raises(UserError, match=r"^out of memory \(.*\): use a smaller batch_size="), memory_errors():
            raise error
    with pytest.raises(jax.errors.JaxRuntimeError), memory_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: other")
