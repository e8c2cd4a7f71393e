"""Files of one's own are imported before the flags are made, and mistakes in them are one line with the place."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fedjax_mr as fmr
from fedjax_mr import export, main, sweep
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.__main__ import main as analysis
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.data.__main__ import main as show_data
from fedjax_mr.deploy.__main__ import main as deploy
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import RunFolder
from fedjax_mr.experiment.resolve import resolve

METHOD = """
import dataclasses
import fedjax_mr as fmr
from fedjax_mr.strategies import fedavg

@dataclasses.dataclass(frozen=True)
class Hyper:
    further: float = fmr.field(1.2, "how far the server goes", low=0)
    steps: tuple[int, ...] = fmr.field((1, 2), "steps")

def build(hyper, problem):
    return fedavg.build(fedavg.Hyper(), problem)

fmr.STRATEGIES["further"] = fmr.Row(build, Hyper, "me, 2026")
"""
OTHERS = """
import numpy as np
import fedjax_mr as fmr

def halves(labels, num_clients, *, rng):
    return np.array_split(np.arange(len(labels)), num_clients)

fmr.PARTITIONS["halves"] = fmr.Partitioner(halves)
fmr.SOURCES["mine"] = lambda request: fmr.SOURCES["digits"](request)
fmr.MODELS["small"] = fmr.MODELS["cnn_digits_small"]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(imports, "_IMPORTED", {})
    before, modules = {registry.kind: dict(registry) for registry in imports.REGISTRIES}, set(sys.modules)
    Path("my_method.py").write_text(METHOD)
    Path("others.py").write_text(OTHERS)
    yield
    for registry in imports.REGISTRIES:
        registry.clear()
        registry.update(before[registry.kind])
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and tmp_path in Path(sys.modules[name].__file__).parents:
            del sys.modules[name]


def forget():
    """Be another process, which has imported nothing."""
    for each in imports._IMPORTED.values():
        for registry in imports.REGISTRIES:
            for name in [name for kind, name in each.names if kind == registry.kind]:
                del registry[name]
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == str(each.file):
                del sys.modules[name]
    imports._IMPORTED.clear()


def resolved(flags):
    return resolve(configuration.parse(flags)).config


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message and caught.value.exit_code == 2
    return message


def test_a_method_of_ones_own_has_flags_help_and_checks():
    flags = ["--import=my_method.py", "--strategy=further", "--further_further=1.5"]
    config = resolved(flags)
    assert config.hyper.further == 1.5 and config.hyper.steps == (1, 2)
    (value,) = config.imports
    name, hash = value.split("#")
    assert name == str(Path("my_method.py").absolute()) and len(hash) == 12
    assert resolved(configuration.to_flags(config)) == config
    assert "hyper.further=-1.0 is out of range" in refusal(resolved, [*flags, "--further_further=-1"])
    assert "did you mean --further_further?" in refusal(configuration.parse, [*flags, "--further_furthr=1"])


def test_imports_stand_in_flag_files_and_are_lists():
    Path("job.flags").write_text("# mine\n--flagfile=inner.flags\n--strategy=further\n--further_further=3")
    Path("inner.flags").write_text("--import=others.py,my_method.py\n--partition=halves")
    config = resolved(["--rounds=2", "--flagfile=job.flags", "--dataset=mine", "--model=small"])
    assert (config.hyper.further, config.partition, len(config.imports)) == (3.0, "halves", 2)
    federated = federated_data(config)
    assert federated.num_clients == 20 and federated.dataset.name == "digits"
    assert resolved(["--import", "my_method.py", "--strategy=further"]).imports == config.imports[1:]


@pytest.mark.parametrize("row", ["--partition=halves", "--dataset=mine", "--model=small"])
def test_a_run_that_uses_one_row_of_an_import_keeps_it(row):
    assert len(resolved(["--import=others.py", row]).imports) == 1


def test_a_run_that_uses_nothing_of_an_import_does_not_keep_it():
    assert resolved(["--import=my_method.py", "--strategy=fedavg"]).imports == ()
    assert resolved(["--import=my_method.py", "--import=none"]).imports == ()


def test_modules_by_their_dotted_names_and_entry_points(monkeypatch, capsys):
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/method.py").write_text(METHOD)
    Path("broken.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    (value,) = resolved(["--import=package.method", "--strategy=further"]).imports
    assert value.startswith("package.method#")
    forget()
    entries = [metadata.EntryPoint("mine", "package.method", "fedjax_mr")]
    entries.append(metadata.EntryPoint("theirs", "broken", "fedjax_mr"))
    monkeypatch.setattr(imports.metadata, "entry_points", lambda group: entries if group == "fedjax_mr" else [])
    imports._load_entry_points.cache_clear()
    assert resolved(["--strategy=further"]).imports == (value,)
    assert "broken" in (told := capsys.readouterr().err) and told.count("\n") == 1
    imports._load_entry_points.cache_clear()


BAD = {
    "syntax": ("x = (", "bad.py, line 1: SyntaxError: '(' was never closed"),
    "error": ("import math\n\nmath.sqroot(2)", "bad.py, line 3: AttributeError: module 'math' has no"),
    "missing": ("\nimport no_such_module", "bad.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
    "leaves": ("raise SystemExit(3)", "bad.py, line 1: SystemExit: 3"),
    "nothing": ("x = 1", "bad.py registers nothing: no new name in fmr.STRATEGIES, fmr.MODELS, fmr.SOURCES, fmr.P"),
    "ours": (METHOD.replace('"further"', '"fedavg"'), "bad.py, line 14: the strategy 'fedavg' already exists"),
    "twice": (METHOD + METHOD, "bad.py, line 28: the strategy 'further' already exists: choose another name"),
    "quietly": (METHOD + 'fmr.STRATEGIES.update(fedmr=fmr.STRATEGIES["further"])', "changes the strategy 'fedmr'"),
    "name": (METHOD.replace('"further"', '"a-b"'), "line 14: the strategy 'a-b' needs a name of letters"),
    "no row": (METHOD.replace("fmr.Row(build, Hyper, ", "(build, Hyper, "), "fmr.STRATEGIES['further'] takes fmr.Row("),
    "no default": (
        METHOD.replace("(1.2,", "(dataclasses.MISSING,"),
        "hyper-parameters of fmr.STRATEGIES['further'] must",
    ),
    "bad default": (METHOD.replace("1.2", "-1.2"), "--further_further=-1.2 is out of range"),
    "bad type": (METHOD.replace(": float", ": dict"), "parameters of fmr.STRATEGIES['further'] must be a dataclass"),
    "small": (
        METHOD.replace('2026")', '2026", contract=fmr.Contract(small=3))'),
        "small must be an instance of its hyper-parameters, not 3",
    ),
    "no entry": ("import fedjax_mr as fmr\nfmr.MODELS['mine'] = 3", "line 2: fmr.MODELS['mine'] takes"),
    "no source": ("import fedjax_mr as fmr\nfmr.SOURCES['mine'] = 3", "line 2: fmr.SOURCES['mine'] takes"),
    "no partition": (OTHERS.replace("fmr.Partitioner(halves)", "halves"), "line 8: fmr.PARTITIONS['halves'] takes"),
}


@pytest.mark.parametrize("text, part", BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line_and_leaves_nothing_behind(text, part):
    Path("bad.py").write_text(text)
    before = [dict(registry) for registry in imports.REGISTRIES]
    assert part in refusal(configuration.parse, ["--import=bad.py"])
    assert [dict(registry) for registry in imports.REGISTRIES] == before
    assert "bad" not in sys.modules
    Path("bad.py").write_text(METHOD)  # mended
    assert configuration.parse(["--import=bad.py", "--strategy=further"]).hyper.further == 1.2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--import=gone.py", "--import=gone.py: there is no such file"),
        ("--import=.", "neither the path of a Python file nor the dotted name of a module"),
        ("--import=./", "--import=./: there is no such file"),
        ("--import=no_such.module", "no such module is in this folder or installed"),
        ("--import=my_method.py#0123456789ab", "my_method.py has changed (its content hash is"),
        ("--import=my_method.py --import=others.py,my_method.py,gone.py", "gone.py"),
        ("--strategy=further", "unknown strategy 'further'"),
    ],
)
def test_bad_values(flags, part):
    assert part in refusal(lambda: resolve(configuration.parse(flags.split())))


def test_two_files_cannot_register_one_name():
    Path("again.py").write_text(METHOD)
    assert "again.py, line 14: the strategy 'further' already exists" in refusal(
        configuration.parse, ["--import=my_method.py,again.py"]
    )


def test_flags_of_a_method_cannot_be_those_of_others():
    Path("server.py").write_text(METHOD.replace('"further"', '"server"').replace("further:", "lr:"))
    message = refusal(configuration.parse, ["--import=server.py"])
    assert "server_lr" in message


def test_an_error_in_the_code_of_a_method_is_one_line_with_its_place(monkeypatch, capsys):
    Path("my_method.py").write_text(METHOD.replace("return fedavg", "return hyper.nothing + fedavg"))

    def run(config):
        fmr.STRATEGIES["further"].build(config.hyper, None)

    monkeypatch.setattr(main, "run", run)
    assert main.main(["--import=my_method.py", "--strategy=further"]) == 2
    told = "fedjax-mr: my_method.py, line 12: AttributeError: 'Hyper' object has no attribute 'nothing'\n"
    assert capsys.readouterr() == ("", told)


def test_an_error_in_a_source_is_one_line_in_the_commands_that_divide_data(capsys):
    Path("mine.py").write_text("import fedjax_mr as fmr\ndef load(request):\n    1 / 0\nfmr.SOURCES['mine'] = load\n")
    flags = ["--import=mine.py", "--dataset=mine"]
    for command, words in ((show_data, flags), (deploy, ["divide", "folder", *flags])):
        assert command(words) == 2
        assert capsys.readouterr() == ("", "fedjax-mr: mine.py, line 3: ZeroDivisionError: division by zero\n")


def row(round, accuracy):
    return {name: 0.0 for name in fmr.experiment.folder.COLUMNS} | {"round": round, "accuracy": accuracy}


def finished(path, *flags):
    """Make a run folder of a method that is not ours, without training."""
    config = resolved(["--import=my_method.py", "--strategy=further", f"--run_dir={path}", *flags])
    folder = RunFolder.open(config)
    folder.begin(config)
    folder.append(row(5, 0.5) | {"bytes_down": 1, "bytes_up": 1})
    folder.write_summary({"accuracy_last": 0.5})
    return folder.path


def test_the_run_folder_keeps_path_hash_and_copy():
    path = finished("kept")
    (value,) = json.loads((path / "config.json").read_text())["import"]
    assert f"--import={value}" in (path / "run.flags").read_text().splitlines()
    assert (path / "imports" / "my_method.py").read_text() == METHOD
    (path / "checkpoints" / "5").mkdir(parents=True)
    assert configuration.parse([f"--flagfile={path}/run.flags"]).strategy == "further"
    forget()
    Path("my_method.py").write_text(METHOD + "# changed")
    assert "my_method.py has changed (its content hash is" in refusal(
        configuration.parse, [f"--flagfile={path}/run.flags"]
    )
    forget()
    Path("my_method.py").unlink()
    assert "my_method.py: there is no such file" in refusal(configuration.parse, [f"--flagfile={path}/run.flags"])
    again = resolved([f"--flagfile={path}/run.flags", "--import=none", f"--import={path}/imports/my_method.py"])
    assert imports.hashes(again.imports) == imports.hashes([value])


def test_modules_of_one_name_in_two_packages(monkeypatch):
    for package, name in (("one", "my_method.py"), ("two", "others.py")):
        Path(package).mkdir(), Path(name).rename(f"{package}/method.py")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    config = resolved(["--import=one.method,two.method", "--strategy=further", "--run_dir=run"])
    RunFolder.open(config).begin(config)
    assert sorted(path.name for path in Path("run/imports").iterdir()) == ["one_method.py", "two_method.py"]


def test_files_of_one_name_are_refused_because_the_run_folder_would_keep_only_one():
    Path("a").mkdir(), Path("my_method.py").rename("a/mine.py")
    Path("b").mkdir(), Path("others.py").rename("b/mine.py")
    message = refusal(lambda: resolved(["--import=a/mine.py,b/mine.py", "--strategy=further"]))
    assert "/a/mine.py and --import=" in message and message.endswith("names must differ: rename one mine.py")


def test_tables_and_curves_need_no_code(capsys):
    finished("a/1"), finished("a/2", "--seed=1"), finished("a/3", "--further_further=3")
    assert analysis(["table", "a", "--import=my_method.py"]) == 0
    with_code = capsys.readouterr().out
    forget()
    Path("my_method.py").unlink()
    assert analysis(["table", "a"]) == 0
    assert capsys.readouterr().out == with_code
    assert "further=3.0" in with_code and len(with_code.splitlines()) == 3
    assert configuration.digest(configuration.load("a/1")) != configuration.digest(configuration.load("a/3"))
    (run,) = runs.read(["a/1"])
    assert run.config.hyper.further == 1.2
    assert configuration.load_code(run.path, trust=True).hyper.steps == (1, 2)  # by the folder's copy


def recorded_as(path, value):
    """Let a run folder record another import."""
    config = json.loads((path / "config.json").read_text())
    (path / "manifest.json").unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"import": [value]}))


def test_code_in_a_run_folder_runs_only_if_it_is_trusted_or_named(tmp_path, capsys):
    path, own = finished("foreign"), Path("my_method.py").absolute()
    digest = imports.hashes(configuration.load(path).imports)[0]
    foreign = path / "imports" / "my_method.py"
    for recorded, file in ((f"{own}#{digest}", own), (f"/gone/my_method.py#{digest}", foreign)):
        recorded_as(path, recorded)
        forget()
        for call in (fmr.load, configuration.load_code, lambda folder: runs.rebuild(runs.read([folder])[0])):
            assert f"loading it would run {file}: read that file, then allow it by --trust" in refusal(call, str(path))
        assert export.main([str(path), "out"]) == 2 and analysis(["spread", str(path)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2 and all(str(file) in line for line in said)
        assert not imports._IMPORTED and "further" not in fmr.STRATEGIES
        assert fmr.load(path, trust=True).config.hyper.steps == (1, 2)
        assert "further" in fmr.STRATEGIES
        assert fmr.load(path).config.hyper.steps == (1, 2)  # nothing is left to run
    forget()
    imports.load([str(own)])  # as --import=my_method.py does
    assert fmr.load(path).config.hyper.steps == (1, 2)
    assert imports.hashes(resolve(fmr.load(path).config).config.imports) == [digest]


def test_what_the_users_own_script_has_imported_needs_no_trust(monkeypatch):
    path = finished("mine")
    forget()
    monkeypatch.syspath_prepend(str(Path.cwd()))
    __import__("my_method")
    assert fmr.load(path).config.hyper.steps == (1, 2)


def test_code_without_a_content_hash_is_not_imported():
    path = finished("kept")
    recorded_as(path, str(Path("my_method.py").absolute()))
    forget()
    assert "records no content hash of its code" in refusal(lambda: fmr.load(path, trust=True))


def test_the_hash_of_a_module_is_checked_before_it_or_its_package_is_imported(monkeypatch):
    Path("package").mkdir()
    Path("package/__init__.py").write_text("import pathlib; pathlib.Path('package_ran').touch()")
    Path("package/method.py").write_text(METHOD)
    Path("package/other.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    config = resolved(["--import=package.method", "--strategy=further", "--run_dir=run"])
    RunFolder.open(config).begin(config)
    digest = imports.hashes(config.imports)[0]
    assert Path("package_ran").exists() and Path("run/imports/package_method.py").read_text() == METHOD
    forget()
    Path("package_ran").unlink()
    del sys.modules["package"]
    monkeypatch.delitem(sys.modules, "package.method", raising=False)
    assert "package.other has changed" in refusal(configuration.parse, [f"--import=package.other#{digest}"])
    assert "package/method.py" in refusal(configuration.load_code, "run")
    Path("package/method.py").write_text(
        "import pathlib; pathlib.Path('ran').touch()"
    )  # another one, found by accident
    assert "run/imports/package_method.py" in refusal(configuration.load_code, "run")
    Path("run/imports/package_method.py").rename("run/imports/method.py")  # as earlier versions wrote it
    assert "run/imports/method.py" in refusal(configuration.load_code, "run")
    assert not Path("ran").exists() and not Path("package_ran").exists()
    assert configuration.load_code("run", trust=True).hyper.steps == (1, 2)
    assert not Path("ran").exists() and not Path("package_ran").exists()


def test_a_sweep_passes_imports_on():
    Path("job.flags").write_text("--import=my_method.py")
    _, planned = sweep.plan(["--flagfile=job.flags", "--strategies=fedavg,further", "--grid=further_further=1,2"])
    assert [len(run.config.imports) for run in planned] == [0, 1, 1]
    assert all("--import=" in " ".join(configuration.to_flags(run.config)) for run in planned[1:])


@pytest.mark.parametrize(
    "value",
    [
        "x" * 300 + ".py#0123456789ab", "x" * 300, "a/" * 3000 + "#0123456789ab", "/proc/self/mem#0123456789ab",
        "a\0b.py#0123456789ab", "..#0123456789ab", "\ud800#0123456789ab", "os#0123456789ab", "#0123456789ab", ".", "/",
    ],
    ids=len,
)  # fmt: skip
@pytest.mark.parametrize("trust", [False, True])
def test_an_odd_name_in_a_folder_from_another_person_is_one_line(value, trust, tmp_path):
    with pytest.raises(UserError):
        imports.load_recorded([value], tmp_path / "imports", trust=trust)
