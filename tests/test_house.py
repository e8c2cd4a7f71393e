"""The house's rules: who may import whom, what flag files may hold, what README says."""

import argparse
import ast
import functools
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import sweep
from fedjax_mr.analysis import papers
from fedjax_mr.analysis.__main__ import COMMANDS
from fedjax_mr.config import config
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.strategies import STRATEGIES, Row, by_group

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedjax_mr"
# All modules may import these. These import only each other.
FREE = {"errors", "files", "gguf_files", "keys", "registry", "settings", "trees", "untrusted"}

# The library is pure; the laboratory (the command `main`, `export` and the rooms below) uses it, and never the reverse.
INTERFACE = {"strategies.interface", "strategies.parts", "strategies.traffic"}  # what a strategy is; no method
LIBRARY = {
    "tasks": set(),
    "models": {"tasks"},
    "data": {"tasks"},
    "client": {"models", "tasks"},
    "strategies": {"client", "models", "tasks"},
    "secure": {"models"},
    "channel": {"client", "models", "secure"} | INTERFACE,
    "clock": {"channel.base", "client"} | INTERFACE,
    "engine": {"client", "data", "models", "tasks"} | INTERFACE,
    "engine.simulator": {"client", "data", "engine", "models", "strategies", "tasks"},
    "plots": set(),
}
# Downwards only; a room may use its own files. The longest name that fits a module counts.
RUN = {"config", "experiment", "results", "terminal"}  # what a run is, does and leaves, and what its commands share
LABORATORY = {
    "__init__": {"api"},
    "api": {"compare", "whatif"} | RUN,
    "main": RUN,
    "export": RUN,
    "generate": RUN,
    "predict": RUN,
    "results": set(),
    "config": {"results"},
    "terminal": {"config", "results"},
    "experiment": {"config", "plots", "results", "terminal"},
    "analysis": {"plots"} | RUN,
    "sweep": RUN,
    "sweep.__main__": {"analysis", "sweep"} | RUN,
    "tune": {"analysis", "sweep"} | RUN,
    "compare": {"analysis", "sweep"} | RUN,
    "whatif": {"plots"} | RUN,
    "whatif.__main__": {"sweep.grids", "whatif"} | RUN,  # the form of --seeds
    "deploy": RUN,
    "testing": {"deploy"} | RUN,  # its fake messages of real clients
}
ROOMS_OF_THE_LIBRARY = {"channel", "client", "clock", "data", "engine", "models", "secure", "strategies", "tasks"}
MAY_IMPORT = LIBRARY | {name: rooms | ROOMS_OF_THE_LIBRARY for name, rooms in LABORATORY.items()}
# The command of a room of the library (its __main__) belongs to the laboratory.
COMMANDS_OF_ROOMS = {"plots"} | RUN
ONLY_IN = {
    "matplotlib": {"plots"},
    "orbax": {"experiment.checkpoint"},
    "tensorflow_datasets": {"data.sources.tfds"},
    "absl.flags": {"config.settings"},
    "pandas": {"analysis.frames"},
    "cryptography": {"secure.primitives"},
    "flwr": {"deploy.flower"},
    "dp_accounting": {"channel.accounting"},
    "safetensors": {"models.pretrained", "testing.llama_files"},
    "gguf": {"gguf_files", "testing.llama_files"},
    "jinja2": {"data.chat"},
    "tokenizers": {"data.tokens"},
    "datasets": {"data.sources.hf"},
    "pyarrow": {"data.sources.hf"},
    "optuna": {"tune.studies"},
    "submitit": {"sweep.slurm"},
}


@functools.cache
def modules():
    """The dotted name (without the package) and the syntax tree of every module."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found.append((".".join(parts), ast.parse(path.read_text(encoding="utf-8"))))
    return found


@functools.cache
def imported(tree):
    """The dotted names that a module imports; ``from a import b`` gives both a and a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


NAMES = {name for name, _ in modules()}


def within(name, rooms):
    """Whether a dotted name is one of these rooms or lies inside one."""
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


@functools.cache
def used(tree):
    """The modules of the package that a module imports, without folders that only contain them."""
    found = {dotted.removeprefix("fedjax_mr.") for dotted in imported(tree) if dotted.startswith("fedjax_mr.")} & NAMES
    names = {
        (node.module.removeprefix("fedjax_mr."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fedjax_mr.")
        for alias in node.names
    }
    only_folders = {module for module, _ in names} - {
        module for module, name in names if f"{module}.{name}" not in NAMES
    }
    return found - only_folders


def test_who_imports_whom():
    wrong_by_name = {}
    for name, tree in modules():
        rule = max((room for room in MAY_IMPORT if within(name, {room})), key=len, default=None)
        assert rule or name in FREE, f"{name} has no rule"
        own = {rule} if rule == name.split(".")[0] else set()
        allowed = FREE | own | MAY_IMPORT.get(rule, set()) | (COMMANDS_OF_ROOMS if name.endswith("__main__") else set())
        wrong = {each for each in used(tree) if not within(each, allowed) and each != name}
        wrong_by_name[name] = wrong
    assert not {name: wrong for name, wrong in wrong_by_name.items() if wrong}


def test_keys_are_made_in_one_module_which_fixes_their_kind():
    """Otherwise JAX_DEFAULT_PRNG_IMPL would change the numbers of a run."""
    makes = re.compile(r"(key|PRNGKey|wrap_key_data)")
    for name, tree in modules():
        for node in ast.walk(tree) if name != "keys" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("jax.random."):
                fixed = any(word.arg == "impl" for word in node.keywords)
                assert fixed or not makes.fullmatch(node.func.attr), f"{name}:{node.lineno}: use fedjax_mr.keys"


def test_no_import_goes_round_in_a_circle():
    uses = {name: used(tree) for name, tree in modules()}
    done, under_way = set(), []

    def visit(name):
        assert name not in under_way, f"circle: {' -> '.join([*under_way, name])}"
        if name not in done:
            under_way.append(name)
            for other in sorted(uses.get(name, ())):
                visit(other)
            done.add(under_way.pop())

    for name in sorted(uses):
        visit(name)


def test_a_command_of_the_analysis_is_a_file_of_its_own():
    """Shared code lives in runs, groups, papers and tables: only ``__main__`` imports the file of a command."""
    files = {f"analysis.{name}" for name in COMMANDS}
    assert files <= NAMES
    for name, tree in modules():
        if name != "analysis.__main__":
            assert not used(tree) & files, name


def test_imports_stand_at_the_top():
    """A late import is for a heavy library that not every run needs, never for a circle in the package.

    One for type checkers is never late.
    """
    for name, tree in modules():
        checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        top = {id(node) for body in (tree, *checked) for node in body.body}
        late = [
            node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
        ]
        ours = [dotted for dotted in imported(ast.Module(late, [])) if dotted.startswith("fedjax_mr")]
        assert ours == [], name


def test_no_private_module_of_jax():
    for name, tree in modules():
        assert [dotted for dotted in imported(tree) if dotted.startswith("jax._src")] == [], name


def test_only_public_modules_of_flower():
    """Flower changes its other modules with every release."""
    used = {dotted for _, tree in modules() for dotted in imported(tree) if dotted.partition(".")[0] == "flwr"}
    assert used == {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "testing").glob("*.py")), ids=lambda path: path.name)
def test_the_contract_names_no_strategy(path):
    """A method of a user then gets the same treatment as ours: what the contract must know is in the registry's row."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert "local" not in texts  # within a text it is an English word
    assert not set(re.findall(r"\w+", " ".join(texts).lower())) & (set(STRATEGIES) - {"local"})
    assert not set(imported(tree)) & {row.build.__module__ for row in STRATEGIES.values()}


def test_the_package_names_no_folder_of_the_repository():
    """An installed package has none of them; the scripts of experiments/record/ need them and are no part of it."""
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"\bexperiments/|\bdocs/hooks", path.read_text(encoding="utf-8")), path


def test_which_networks_there_are_is_the_models_concern():
    """No ``isinstance(..., Zoo)`` outside models/: a network is a zoo of one."""
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "models" not in path.parents:
            assert not re.search(r"isinstance\(.*Zoo", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("library", ONLY_IN)
def test_one_door_for_each_heavy_library(library):
    uses = lambda tree: any(f"{dotted}.".startswith(f"{library}.") for dotted in imported(tree))
    users = {name for name, tree in modules() if uses(tree)}
    commands = {f"{name}.__main__" for name in ("data", "models", "analysis")}
    assert {user for user in users if not within(user, ONLY_IN[library])} <= commands


def test_shared_flag_files_never_choose_the_strategy():
    files = list((ROOT / "experiments").glob("*.flags"))
    assert files
    for path in files:
        chosen = [line for line in path.read_text().splitlines() if re.match(r"\s*--strategy\b", line)]
        assert chosen == [], path


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.flags")), ids=lambda path: path.name)
def test_every_flag_file_is_valid_and_names_its_sources(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    if path.name.startswith(("table_", "methods_", "ablation_")):  # flags of the sweep among them
        sweep.plan([f"--flagfile=exp/{path.name}", "--clients=100"])
    else:
        flags = [f"--flagfile=exp/{path.name}"]
        several = "," in config.parse(flags).model  # networks that the default strategy cannot mix
        resolve(config.parse([*flags, "--strategy=local"] if several else flags))
    assert "python -m fedjax_mr." in text or "included by" in text
    assert "ource" in text


PROTOCOLS = {  # the table of the data set, for both protocols
    ("cifar10", "table_cifar"): 12,
    ("cifar100", "table_cifar"): 12,
    ("femnist", "table_femnist"): 3,
    ("cifar10_paper", "table_cifar_paper"): 12,
    ("cifar100_paper", "table_cifar_paper"): 12,
    ("femnist_paper", "table_femnist"): 3,
}


@pytest.mark.slow
def test_the_flag_files_cover_every_setting_of_the_papers_tables(monkeypatch):
    """27 settings x 2 protocols; with the methods of a paper, all numbers of its table stand beside some run.

    All but those of CIFAR-100 with fine labels, because the papers' numbers are of the coarse ones.
    """
    monkeypatch.chdir(ROOT)

    def numbers(data, settings, *flags, paper):
        files = [f"--flagfile=exp/{name}.flags" for name in (data, settings)]
        _, runs = sweep.plan([*files, *flags])
        found = [papers.lookup(run.config, [row for row in tables if row["paper"] == paper]) for run in runs]
        assert {number is None for number in found} == {data == "cifar100_paper"}
        return found

    tables = papers.rows()
    for (data, settings), count in PROTOCOLS.items():
        assert len(numbers(data, settings, "--strategies=fedmr", paper="fedmr_kdd")) == count
    authors = [files for files in PROTOCOLS if not files[0].endswith("_paper")]
    for paper, printed in (("fedmr_v1", 189), ("fedmr_kdd", 216), ("fedcross", 162)):
        methods = f"--flagfile=exp/methods_{paper}.flags"
        assert sum(len(numbers(*files, methods, paper=paper)) for files in authors) == printed


def test_the_numbers_of_pfedhr_and_fedme_stand_beside_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = papers.rows()

    def numbers(*flags):
        _, runs = sweep.plan(flags)
        found = [papers.lookup(run.config, tables) for run in runs if run.config.strategy != "local"]
        assert None not in found
        return {(each.mean, each.source) for each in found}

    for data in ("mnist", "svhn", "cifar10"):
        job = f"--flagfile=exp/pfedhr_{data}.flags"
        own = numbers(job, "--flagfile=exp/methods_pfedhr.flags")
        with_header = numbers(job, "--strategies=fedgh", "--projection=64", "--grid=partition=iid,classes")
        assert len(own) == 10 and len(with_header) == 2
    for data in ("femnist", "cifar10", "shakespeare"):
        parts = numbers(f"--flagfile=exp/fedme_{data}.flags", "--flagfile=exp/ablation_fedme.flags")
        assert len(parts) == 8


def test_the_two_protocols(monkeypatch):
    monkeypatch.chdir(ROOT)
    parse = lambda name: config.parse([f"--flagfile=exp/{name}.flags"])
    facts = lambda name: (parse(name).momentum, parse(name).model, parse(name).label_mode)
    assert facts("cifar10") == (0.5, "lenet5", "fine") and facts("cifar10_paper") == (0.9, "cnn_mcmahan", "fine")
    assert facts("cifar100") == (0.5, "lenet5", "coarse") and facts("cifar100_paper") == (0.9, "cnn_mcmahan", "fine")
    assert facts("femnist")[:2] == (0.5, "cnn_femnist") and facts("femnist_paper")[:2] == (0.9, "cnn_femnist")


@pytest.mark.slow
def test_the_commands_of_the_figures_are_valid(monkeypatch):
    """Every sweep in experiments/README.md can be planned, and every picture's command exists."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "experiments" / "README.md").read_text()
    prefix = ["--flagfile=exp/cifar10.flags", "--data_dir=DIR"]
    sweeps = [(prefix, found) for found in re.findall(r"`SWEEP (.*?)`", text)]
    sweeps += [
        ([], found) for found in re.findall(r"`python -m fedjax_mr.sweep (--.*?)`", text) if "SWEEP" not in found
    ]
    fedme = [(["--flagfile=exp/fedme_digits.flags"], found) for found in re.findall(r"`FEDME (.*?)`", text)]
    assert sweeps and fedme
    sweeps += fedme
    for before, found in sweeps:
        sweep.plan([*before, *shlex.split(found)])
    analyses = re.findall(r"`A (\w+) RUNS(?:/\S+)?(.*?)`", text)
    assert analyses
    for name, arguments in analyses:
        parser = argparse.ArgumentParser(exit_on_error=False)
        COMMANDS[name].add_arguments(parser)
        parser.parse_args(["runs", *shlex.split(arguments)])


def test_every_script_that_a_text_names_exists():
    """Scripts move; pages, heads of flag files, comments and messages must follow."""
    texts = [path for kind in ("md", "py", "sh", "flags", "toml", "yml") for path in ROOT.rglob(f"*.{kind}")]
    excluded = {".git", ".venv", "runs", "CHANGELOG.md"}  # the last one tells of scripts that were
    named = set()
    for path in [*texts, ROOT / ".ci" / "run"]:
        if not excluded & set(path.relative_to(ROOT).parts):
            named |= set(re.findall(r"experiments/[\w/]+\.(?:py|sh)\b", path.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).exists() and not name.endswith("/NAME.py")) == []


FIRST_STEPS = "docs/first_steps.md"
SHORT_METHOD = "docs/recipes/method_in_twenty_lines.md"


def blocks(kind, *pages):
    """The blocks of code of the README, or of other pages."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages or ["README.md"])
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


def test_the_readme_is_short_and_names_the_number_of_methods():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    assert f"[{len(STRATEGIES)} methods](docs/methods/index.md)" in text


def test_the_page_of_methods_lists_every_strategy_by_its_group():
    text = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(\w+)`\]\((\w+\.md)\)", text)
    assert links == [(name, f"{name}.md") for name in STRATEGIES]  # in the order of their groups
    assert re.findall(r"^\| ([a-z ]+) \| \[`", text, flags=re.MULTILINE) == list(by_group())


def test_the_readmes_python_names_what_there_is():
    """Every import, every name of an imported module, and every keyword that a call of such a name passes."""
    known, found = {}, []

    def resolved(node):
        if isinstance(node, ast.Attribute) and isinstance(owner := resolved(node.value), types.ModuleType):
            return getattr(owner, node.attr)  # a missing name is an AttributeError that says which
        return known.get(node.id) if isinstance(node, ast.Name) else None

    for node in ast.walk(ast.parse("\n".join(blocks("python", "README.md", FIRST_STEPS, SHORT_METHOD)))):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.append(resolved(node))
        elif isinstance(node, ast.Call) and getattr(target := resolved(node.func), "__module__", "").startswith(
            "fedjax"
        ):
            parameters = inspect.signature(target).parameters
            known_words = {*parameters, *(fmr.Config.__dataclass_fields__ if target is fmr.data.federate else ())}
            assert {keyword.arg for keyword in node.keywords} <= known_words, target
            found.append(target)
    assert any(each is not None for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", FIRST_STEPS])
def test_the_first_pages_python_runs(page, tmp_path):
    """Every Python block of the page runs as printed, in order, as one script in an empty folder."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python", page)), encoding="utf-8")
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": "",
        "HOME": str(Path.home()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tutorials_strategy_learns(monkeypatch, engine):
    """BUILD.md's file is FedAvg at momentum 0, and its setting is a flag."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "BUILD.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    module = types.ModuleType("fedavgm")
    monkeypatch.setitem(sys.modules, "fedavgm", module)
    exec(textwrap.dedent(block), module.__dict__)
    monkeypatch.setitem(STRATEGIES, "fedavgm", Row(module.build, module.Hyper, "Hsu et al., 2019"))
    assert config.parse(["--strategy=fedavgm", "--fedavgm_beta=0.7"]).hyper == module.Hyper(0.7)
    models = []
    for strategy, hyper in (("fedavgm", module.Hyper(0.0)), ("fedavg", None)):
        one = engine(strategy, "linear", hyper=hyper)
        models.append(one.deployed(one.run(one.init(), 2)[0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *models)
