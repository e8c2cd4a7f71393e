"""Measure the tests: change one line of an algorithm and see whether a quick test fails.

    python experiments/lab/mutants.py draw --number=200 --seed=0 > mutants.jsonl
    python experiments/lab/mutants.py run mutants.jsonl --results=results.jsonl      # hours on one core; resumes
    python experiments/lab/mutants.py table results.jsonl

A mutant is a text edit of one file of the package. `draw` finds all places to which one of the `OPERATORS` applies and
draws some of them, the same number of each file if it has as many. Two lists are kept beside this script:
`mutants/drawn.jsonl`, which `draw` has written, and `mutants/ideas.jsonl`, which was written by hand: each of its
mutants removes an idea of a method (wrong model, wrong samples, wrong round).

`run` edits a copy of the repository and runs the quick tests that belong to the file, in stages: the test file with
its name, the tests of its folder that name it, the contract of its methods, and tests of other folders that name it. A
mutant is killed by the first test that fails. `run` adds a line to the results for each mutant and skips the mutants
that have one. All quick tests must pass without a mutant; `run` does not check it.
"""

import argparse
import ast
import collections
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("fedjax_mr/strategies/**/*.py", "fedjax_mr/channel/*.py", "fedjax_mr/clock/*.py",
         "fedjax_mr/engine/round.py", "fedjax_mr/client/local.py")  # fmt: skip
NO_ALGORITHM = ("__init__.py", "hyper.py")  # tables and declarations
MOST_IMPORTERS = 8  # of a file without a method; a file that more methods import is tested with a few of them
SECONDS = 300  # of computing time; a mutant whose tests take longer is killed, because its loops do not end


class Edit(NamedTuple):
    """A replacement of the source between two offsets."""

    start: int
    end: int
    text: str


# ---------------------------------------------------------------------------------------------------------------------
# Operators: a node of the syntax tree and the function around it -> new texts for the node.

Operator = Callable[[ast.AST, "Scope"], Iterator[str]]


class Scope(NamedTuple):
    """The place of a node."""

    source: str
    lines: tuple[int, ...]  # offset of each line
    names: tuple[str, ...]  # arguments of the functions around the node

    def span(self, node: Any) -> tuple[int, int]:
        """The offsets of a node."""
        start, end = self.lines[node.lineno - 1], self.lines[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        """The source of a node."""
        start, end = self.span(node)
        return self.source[start:end]


SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
REVERSED = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<=", ast.Eq: "!=", ast.NotEq: "=="}
SYMMETRIC = ("add", "maximum", "minimum", "max", "min", "zip", "isinstance", "logical_and", "logical_or", "array_equal")
RANDOM = ("fold_in", "split", "key")


def called(node: ast.AST) -> str:
    """The last name of a called function, or an empty string."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def sign(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Change a sign: a + b -> a - b, a / b -> a * b, -a -> a."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        yield f"({scope.text(node.left)} {SIGNS[type(node.op)][1]} {scope.text(node.right)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield scope.text(node.operand)


def dropped_term(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Drop a term: a + b -> a or b; a * b -> a or b."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult | ast.Sub):
        yield f"({scope.text(node.left)})"
        if not isinstance(node.op, ast.Sub):
            yield f"({scope.text(node.right)})"


def missing_normalisation(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Drop a division or weights: a / b -> a; mean -> sum; weights and masks of a call are left out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield f"({scope.text(node.left)})"
    if isinstance(node, ast.Call):
        function, text = scope.text(node.func), scope.text(node)
        if function == "jnp.mean":
            yield text.replace("jnp.mean", "jnp.sum", 1)
        for keyword in node.keywords:
            if keyword.arg in ("weights", "where", "weight", "mask"):
                arguments = [scope.text(argument) for argument in node.args]
                arguments += [scope.text(argument) for argument in node.keywords if argument is not keyword]
                yield f"{function}({', '.join(arguments)})"


def swapped_arguments(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Swap two arguments: f(a, b) -> f(b, a)."""
    if isinstance(node, ast.Call) and len(node.args) >= 2 and called(node) not in SYMMETRIC:
        first, second, *rest = (scope.text(argument) for argument in node.args)
        if first != second and called(node) not in RANDOM and not first.startswith("lambda"):
            rest += [scope.text(argument) for argument in node.keywords]
            yield f"{scope.text(node.func)}({', '.join([second, first, *rest])})"


def wrong_branch(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Swap two branches: where(c, a, b) -> where(c, b, a); a if c else b -> b if c else a; the same of lax.cond."""
    if isinstance(node, ast.Call) and called(node) in ("where", "cond") and len(node.args) >= 3:
        test, yes, no, *rest = (scope.text(argument) for argument in node.args)
        rest += [scope.text(argument) for argument in node.keywords]
        yield f"{scope.text(node.func)}({', '.join([test, no, yes, *rest])})"
    if isinstance(node, ast.IfExp):
        yield f"({scope.text(node.orelse)} if {scope.text(node.test)} else {scope.text(node.body)})"


def off_by_one(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Move a bound: a < b -> a <= b; a + 1 -> a + 2."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield f"{scope.text(node.left)} {COMPARISONS[type(node.ops[0])]} {scope.text(node.comparators[0])}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        right = node.right
        if isinstance(right, ast.Constant) and type(right.value) is int:
            yield f"({scope.text(node.left)} {SIGNS[type(node.op)][0]} {right.value + 1})"


def reversed_comparison(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Reverse an order: a < b -> a > b; argmax -> argmin."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in REVERSED:
        yield f"{scope.text(node.left)} {REVERSED[type(node.ops[0])]} {scope.text(node.comparators[0])}"
    if isinstance(node, ast.Call):
        for one, other in (("argmax", "argmin"), ("argmin", "argmax"), ("jnp.maximum", "jnp.minimum")):
            if scope.text(node.func).endswith(one):
                yield scope.text(node).replace(one, other, 1)


def wrong_axis(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Take another axis: axis=0 -> axis=-1, and the reverse."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "axis":
                old, text = scope.text(keyword), scope.text(node)
                yield text.replace(old, "axis=-1" if old == "axis=0" else "axis=0", 1)


def identity(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Leave out a function: f(a, ...) -> a, for functions of trees and numbers."""
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Lambda | ast.Starred):
        return
    if re.match(r"(trees|jnp|jax\.nn|jax\.lax\.stop_gradient)\b", scope.text(node.func)):
        yield f"({scope.text(node.args[0])})"


def wrong_key(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Use the same random key each time: fold_in(key, n) -> key; a key as argument -> key(0)."""
    if isinstance(node, ast.Call) and scope.text(node.func) == "jax.random.fold_in":
        yield scope.text(node.args[0])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id == "key":
        yield "jax.random.key(0)"


def wrong_name(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Take another argument of the function, such as the received instead of the trained model."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in scope.names and node.id != "key":
        yield from (name for name in scope.names if name not in (node.id, "key", "self"))


OPERATORS: tuple[Operator, ...] = (
    sign, dropped_term, missing_normalisation, swapped_arguments, wrong_branch, off_by_one, reversed_comparison,
    wrong_axis, identity, wrong_key, wrong_name,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def is_check(node: ast.AST) -> bool:
    """Whether a statement only refuses bad input."""
    if isinstance(node, ast.If):
        return any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    return isinstance(node, ast.Raise | ast.Assert)


def sites(source: str) -> Iterator[tuple[str, Edit]]:
    """All mutants of one file: (operator, edit). Checks that raise, annotations and class bodies are left alone."""
    lines = (0, *itertools.accumulate(map(len, source.splitlines(keepends=True))))

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, Edit]]:
        inside = bool(names)
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = (*names, *(argument.arg for argument in arguments)) or ("",)
            children = node.body if isinstance(node.body, list) else [node.body]
        elif is_check(node):
            children = []
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.ClassDef):
            children = [statement for statement in node.body if isinstance(statement, ast.FunctionDef)]
        else:
            children = list(ast.iter_child_nodes(node))
        if inside and hasattr(node, "lineno"):
            scope = Scope(source, lines, tuple(dict.fromkeys(names)))
            start, end = scope.span(node)
            for operator in OPERATORS:
                for text in operator(node, scope):
                    if text and text != source[start:end]:
                        yield operator.__name__, Edit(start, end, text)
        for child in children:
            yield from visit(child, names)

    yield from visit(ast.parse(source), ())


def as_lines(source: str, edit: Edit) -> tuple[str, str]:
    """An edit as two texts, old and new, of whole lines. More lines are taken until the old text occurs only once."""
    lines = source.splitlines(keepends=True)
    first = source.count("\n", 0, edit.start)
    last = source.count("\n", 0, edit.end)
    while True:
        begin, end = sum(map(len, lines[:first])), sum(map(len, lines[: last + 1]))
        old = source[begin:end]
        if source.count(old) == 1:
            return old, source[begin : edit.start] + edit.text + source[edit.end : end]
        first, last = max(0, first - 1), min(len(lines) - 1, last + 1)


def draw(number: int, seed: int) -> list[dict]:
    """Draw mutants: files in turn, in each file an operator that it has, then one of this operator's places."""
    rng, places = random.Random(seed), {}
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern) if path.name not in NO_ALGORITHM})
    for path in paths:
        source, by_operator = path.read_text(), collections.defaultdict(list)
        if not source.isascii():  # the syntax tree counts bytes
            raise SystemExit(f"{path.relative_to(ROOT)} has characters outside of ASCII")
        for operator, edit in sites(source):
            by_operator[operator].append(edit)
        places[path] = by_operator
    drawn = []
    while len(drawn) < number and any(places.values()):
        for path in rng.sample(paths, len(paths)):
            if not places[path] or len(drawn) == number:
                continue
            operator = rng.choice(sorted(places[path]))
            edit = places[path][operator].pop(rng.randrange(len(places[path][operator])))
            if not places[path][operator]:
                del places[path][operator]
            old, new = as_lines(path.read_text(), edit)
            drawn.append({"path": str(path.relative_to(ROOT)), "operator": operator, "old": old, "new": new})
    return drawn  # in this order, the first ones already belong to all files


# ---------------------------------------------------------------------------------------------------------------------
# Running


def stages(path: str, root: Path) -> list[list[str]]:
    """The arguments of pytest for the quick tests that belong to a file, the most likely killers first."""
    parts, name = Path(path).parts, Path(path).stem
    room = parts[1]
    if room == "strategies" and len(parts) == 4:  # the folder of one method
        name = parts[2]
    folder = root / "tests" / room
    by_name = [file for file in sorted(folder.glob("test_*.py")) if re.search(rf"\b{name}\b", file.read_text())]
    methods = []
    if room == "strategies":
        of_all = [folder / "test_parts.py", folder / "test_identities.py"]  # they have a row for many methods
        registered = methods_by_file(root)
        files = [name] if name in registered else importers(name, root)
        if len(files) > MOST_IMPORTERS:  # a part of all methods
            files, registered = [name], {name: ["fedavg", "fedmr", "scaffold", "clusamp"]}
        of_files = [folder / f"test_{each}.py" for each in files if (folder / f"test_{each}.py").is_file()]
        by_name = list(dict.fromkeys([*of_files, *of_all, *by_name]))
        methods = [method for each in files for method in registered.get(each, ())]
    elif room == "engine":  # every method trains through these files
        by_name = [*sorted(folder.glob("test_*.py")), root / "tests/strategies/test_identities.py"]
        methods = ["fedavg", "fedmr", "scaffold"]
    else:
        by_name = sorted(folder.glob("test_*.py"))
    own_tests = [file for file in (folder / f"test_{name}.py",) if file.is_file()]
    other_tests = [file for file in sorted((root / "tests").glob("*/test_*.py")) if file not in (*own_tests, *by_name)]
    elsewhere = [file for file in other_tests if re.search(rf"\b{name}\b", file.read_text())]
    relative = lambda files: [str(file.relative_to(root)) for file in files]
    result = [relative(own_tests), relative(file for file in by_name if file not in own_tests)]
    if methods:
        parameters = [f"[{method}{end}" for method in methods for end in ("-", "]")]
        result.append(["tests/test_contract.py", "-k", " or ".join(parameters)])
    if room != "engine" and name != "base":  # these names are in most files
        result.append(relative(elsewhere))
    return [stage for stage in result if stage]


def methods_by_file(root: Path) -> dict[str, list[str]]:
    """The registered methods of each file of `strategies`, read from the source of the registry."""
    methods = collections.defaultdict(list)
    for method, file in re.findall(
        r'"(\w+)": Row\(\s*(\w+)\.', (root / "fedjax_mr/strategies/__init__.py").read_text()
    ):
        methods[file].append(method)
    return methods


def importers(name: str, root: Path) -> list[str]:
    """The files of `strategies` that import the file ``name``, which has no method, such as the graphs of clients."""
    imports = re.compile(rf"^from fedjax_mr\.strategies(\.{name} import|\s+import .*\b{name}\b)", re.MULTILINE)
    return [
        file.stem for file in sorted((root / "fedjax_mr/strategies").glob("*.py")) if imports.search(file.read_text())
    ]


def run_tests(root: Path, arguments: list[str], log: Path) -> str:
    """Run tests of a copy in a fork of this process, which has imported JAX already: "", or the first failure."""
    child = os.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            os.chdir(root)
            sys.path.insert(0, str(root))
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
            code = int(pytest.main(["-n0", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *arguments]))
        except BaseException:
            traceback.print_exc()
            code = int(pytest.ExitCode.INTERNAL_ERROR)
        sys.stdout.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest does not run: {log.read_text(errors='replace')[-200:]}")
    if status < 0:
        return f"the tests ended by signal {-status}"
    return re.findall(r"^(?:FAILED|ERROR) (.+)", log.read_text(errors="replace"), re.MULTILINE)[0][:300]


def attempt(root: Path, mutant: dict, log: Path) -> dict:
    """Run the tests of one mutant in a copy of the repository, and mend the copy afterwards."""
    file, began = root / mutant["path"], time.monotonic()
    source = file.read_text() if file.is_file() else ""
    if source.count(mutant["old"]) != 1:
        return mutant | {"killed_by": "", "seconds": 0.0, "error": "the old text does not occur exactly once"}
    file.write_text(source.replace(mutant["old"], mutant["new"]))
    try:
        killed = next(filter(None, (run_tests(root, stage, log) for stage in stages(mutant["path"], root))), "")
    except RuntimeError as error:  # such as a recursion of the mutant that Python's parser does not survive
        return mutant | {"killed_by": "", "seconds": 0.0, "error": str(error)}
    finally:
        file.write_text(source)
    return mutant | {"killed_by": killed, "seconds": round(time.monotonic() - began, 1)}


def run(lists: list[Path], results: Path, *, only: str, sample: int | None, jobs: int) -> None:
    """Run all mutants that have no result yet."""
    mutants = [json.loads(line) for path in lists for line in path.read_text().splitlines()]
    name = lambda each: (each["path"], each["old"], each["new"])
    done = {name(json.loads(line)) for line in results.read_text().splitlines()} if results.exists() else set()
    if sample is not None:
        mutants = random.Random(0).sample(mutants, min(sample, len(mutants)))
    left = [mutant for mutant in mutants if name(mutant) not in done and only in mutant["path"]]
    # The tests' flags of XLA, which each fork would otherwise try in a process of its own.
    script = "import os, runpy; runpy.run_path('tests/conftest.py'); print(os.environ['XLA_FLAGS'])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    flags = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=True)
    os.environ["XLA_FLAGS"] = flags.stdout.decode().strip()
    for module in ("jax", "flax.linen", "flax.nnx", "optax", "orbax.checkpoint", "scipy.stats"):
        importlib.import_module(module)
    for number in range(jobs):
        if os.fork() == 0:
            with tempfile.TemporaryDirectory() as folder:
                copy, log = Path(folder, "copy"), Path(folder, "log")
                ignore = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "__pycache__", "exp", "*.png")
                shutil.copytree(ROOT, copy, ignore=ignore)
                (copy / "fedjax_mr/exp").symlink_to("../experiments")
                for mutant in left[number::jobs]:
                    result = attempt(copy, mutant, log)
                    with results.open("a") as file:  # one write for each line, so several processes can add lines
                        file.write(json.dumps(result) + "\n")
                    word = result.get("error") or result["killed_by"] or "SURVIVED"
                    print(f"{result['path']} {result['operator']} {result['seconds']}s: {word}", flush=True)
            os._exit(0)
    while jobs:
        os.wait()
        jobs -= 1


def table(paths: list[Path], reasons: Path) -> str:
    """The results in Markdown: killed mutants of each room and operator, and the survivors with their reasons."""
    results = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    reason_of = json.loads(reasons.read_text()) if reasons.exists() else {}
    valid = [result for result in results if "error" not in result]
    lines = []
    for title, group in (("file", lambda each: each["path"]), ("operator", lambda each: each["operator"])):
        lines += [f"| {title} | mutants | killed |", "|---|---|---|"]
        for name in sorted({group(result) for result in valid}):
            members = [result for result in valid if group(result) == name]
            lines.append(f"| {name} | {len(members)} | {sum(bool(member['killed_by']) for member in members)} |")
        lines.append("")
    killed = sum(bool(result["killed_by"]) for result in valid)
    lines += [f"{killed} of {len(valid)} mutants are killed ({100 * killed / max(1, len(valid)):.1f} %).", ""]
    for result in valid:
        if not result["killed_by"]:
            before, after = " ".join(result["old"].split()), " ".join(result["new"].split())
            reason = reason_of.get(f"{result['path']}: {after}", "no reason written yet")
            lines.append(f"* {result['path']}, {result['operator']}: `{before}` -> `{after}`: {reason}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw mutants and print them, one JSON object a line")
    drawing.add_argument("--number", type=int, default=200)
    drawing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run", help="run the tests of mutants")
    running.add_argument("lists", type=Path, nargs="+", help="files of mutants")
    running.add_argument("--results", type=Path, required=True, help="file to which results are added")
    running.add_argument("--only", default="", help="part of the path of the files, such as strategies/fedmr")
    running.add_argument("--sample", type=int, help="number of mutants, drawn at random (default: all)")
    running.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    tabulating = commands.add_parser("table", help="print the results in Markdown")
    tabulating.add_argument("results", type=Path, nargs="+")
    tabulating.add_argument("--reasons", type=Path, default=Path(__file__).parent / "mutants/reasons.json")
    options = parser.parse_args()
    if options.command == "draw":
        print("\n".join(json.dumps(mutant) for mutant in draw(options.number, options.seed)))
    elif options.command == "run":
        run(options.lists, options.results, only=options.only, sample=options.sample, jobs=options.jobs)
    else:
        print(table(options.results, options.reasons))


if __name__ == "__main__":
    main()
