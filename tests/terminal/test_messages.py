"""Messages of the library as a command shows them: flags in the place of arguments."""

import pytest

from fedjax_mr import main
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.terminal.messages import flags_in_errors, with_flags


@pytest.mark.parametrize(
    ("strategy", "message", "shown"),
    [
        ("fedavg", "cohort=8 is more than the 4 clients", "--cohort=8 is more than the 4 clients"),
        ("fedavg", "fedme: pass public_share=0.1.", "fedme: pass --public_share=0.1."),
        ("fedavg", "a smaller batch_size=, cohort= or lanes=", "a smaller --batch_size, --cohort or --lanes"),
        ("fedavg", "public_labels=False, or offline=True (seed=1)", "--nopublic_labels, or --offline (--seed=1)"),
        ("fedavg", "optimizer='sgd': momentum=0.5, now 0.9", "--optimizer=sgd: --momentum=0.5, now 0.9"),
        ("fedavg", "run_dir='a b' or run_dir=''", "--run_dir='a b' or --run_dir="),
        ("fedavg", "imports=('a.py', 'b.py'), imports=()", "--import=a.py --import=b.py, --import=none"),
        ("pfedbayes", "lr=0.1, hyper.lr=0.2, or hyper.lr", "--lr=0.1, --pfedbayes_lr=0.2, or --pfedbayes_lr"),
        ("heterofl", "pass hyper.widths=(1.0, 0.5)", "pass --heterofl_widths=1.0 --heterofl_widths=0.5"),
        ("fedme", "or hyper.clustering=False", "or --nofedme_clustering"),
        ("fedavg", "attack_target=99 is no class", "--attack_target=99 is no class"),
        ("fedavg", "outliers=9 needs cohort=19", "--robust_outliers=9 needs --cohort=19"),
    ],
)  # fmt: skip
def test_arguments_become_flags(strategy: str, message: str, shown: str):
    assert with_flags(message, strategy) == shown
    assert with_flags(shown, strategy) == shown  # a message that names flags already


@pytest.mark.parametrize(
    "message",
    [
        "the cohort has 3 of 4 clients, seed 5",
        "start such a run by fmr.run(config, model=...), resume it by fmr.load('runs/a').resume(model=...)",
        "num_classes=10 and hyper.unheard=3 are no settings",
        "runs/cohort=3/lr=0.1 is no folder",
        "runs/table.jsonl.gz has no run fedmr*lr=0.1*",
        "--dataset=given:cohort=5",
    ],
)
def test_the_rest_of_a_message_stays(message: str):
    assert with_flags(message, "fedavg") == message


def test_an_error_keeps_its_class_and_other_errors_pass():
    with pytest.raises(DivergedError, match=r"^a smaller --lr, please$"), flags_in_errors("fedavg"):
        raise DivergedError("a smaller lr=, please")
    with pytest.raises(ValueError, match=r"^lr=1$"), flags_in_errors("fedavg"):
        raise ValueError("lr=1")
    assert issubclass(DivergedError, UserError)


def test_the_command_shows_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refuse(config):
        raise UserError(f"cohort={config.cohort} and hyper.unit='leaf' do not go together")

    monkeypatch.setattr(main, "run", refuse)
    assert main.main(["--cohort=3"]) == 2
    assert capsys.readouterr().err == "fedjax-mr: --cohort=3 and --fedmr_unit=leaf do not go together\n"
