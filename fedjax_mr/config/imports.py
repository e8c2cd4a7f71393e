"""A user's Python files and modules that register methods, networks, datasets or partitions (``--import``).

They are imported before the flags are defined, because flags are defined from the registries. An installed package is
imported automatically if it names such a module as an entry point of the group ``fedjax_mr``. A run that uses
their rows keeps their paths, content hashes and copies. Repeating or resuming it with other code is then an error.

Code runs only if the user named it (``--import``, an ``import`` in a script, an installed package) or trusts the folder
that records it (``trust=True``, ``--trust``): a folder from another person holds both the code and its hash.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fedjax_mr import files
from fedjax_mr.channel import LINKS
from fedjax_mr.client.optimizers import OPTIMIZERS
from fedjax_mr.clock.asynchronous import STALENESS
from fedjax_mr.clock.fleet import FLEETS
from fedjax_mr.config.loggers import LOGGERS
from fedjax_mr.config.settings import settings_of
from fedjax_mr.data import SOURCES
from fedjax_mr.data.augment import AUGMENTATIONS
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError
from fedjax_mr.models import MODELS
from fedjax_mr.registry import Registry
from fedjax_mr.strategies import SETTINGS, STRATEGIES
from fedjax_mr.strategies.graphs import GRAPHS
from fedjax_mr.strategies.transforms import SERVER_OPTIMIZERS
from fedjax_mr.tasks import METRICS, TASKS
from fedjax_mr.tasks.losses import LOSSES

GROUP = "fedjax_mr"  # of entry points
FOLDER = "imports"  # in a run folder, with the copies
REGISTRIES: tuple[Registry, ...] = (
    STRATEGIES,
    MODELS,
    SOURCES,
    PARTITIONS,
    LINKS,
    OPTIMIZERS,
    SERVER_OPTIMIZERS,
    AUGMENTATIONS,
    TASKS,
    METRICS,
    LOSSES,
    FLEETS,
    STALENESS,
    GRAPHS,
    LOGGERS,
)
_PINNED = re.compile(r"(.+)#([0-9a-f]{12})")
Names = set[tuple[str, str]]  # the kind of a row and its name


@dataclasses.dataclass(frozen=True)
class Imported:
    """An imported file or module.

    Attributes:
      name: the absolute path of the file, or the dotted name.
      file: the path of its code.
      code: the content of a single file; None for a package.
      hash: the content hash.
      names: the rows that it registered.
    """

    name: str
    file: Path
    code: bytes | None
    hash: str
    names: frozenset[tuple[str, str]]

    @property
    def pinned(self) -> str:
        """The value of ``--import`` that accepts this content alone."""
        return f"{self.name}#{self.hash}"


_IMPORTED: dict[str, Imported] = {}  # by name, as Python keeps its modules


def _all_names() -> Names:
    return {(registry.kind, name) for registry in REGISTRIES for name in registry}


_OURS = _all_names()


# --- Before the flags are defined ------------------------------------------------------------------------------------


def load(values: Iterable[str]) -> None:
    """Import files and modules that the user names, each once, after the entry points of installed packages.

    Args:
      values: paths of Python files and dotted names, also several separated by commas. With ``#`` and a content hash
        appended, a file must have this content.

    Raises:
      UserError: a file is missing, has changed, fails to import, registers nothing, or registers a name again.
    """
    _load_entry_points()
    for value in split(values):
        _load(value)


def load_recorded(recorded: Iterable[str], copies: Path, *, trust: bool) -> None:
    """Import the files and modules that a run folder records, if their code may run.

    The folder and the hashes in it may come from another person. Therefore code runs only if the user trusts the
    folder. Code that this process has already imported needs no trust: the user named it or installed it.

    Args:
      recorded: the imports in the folder's ``config.json``.
      copies: the folder of the run's own copies. A copy is used if the recorded file is gone or has changed.
      trust: allow code that this process has not imported yet.

    Raises:
      UserError: code is needed and not trusted, or not found with the recorded content, or as `load`.
    """
    _load_entry_points()
    for value in split(recorded):
        place = None if _imported(value) else _place_of(value, copies)
        if place is None and "#" not in value:
            raise UserError(f"{copies.parent} records no content hash of its code: name it by --import={value}")
        if place is not None:
            value, file = place
            if not (trust or _is_executed(value, file)):
                raise UserError(
                    f"{copies.parent} needs imported code, and loading it would run {file}: read that file, then "
                    f"allow it by --trust (in Python trust=True), or name it by --import={file}"
                )
        _load(value)


def split(values: Iterable[str]) -> list[str]:
    """The single files and modules in the values of ``--import``."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _source_and_hash(value: str) -> tuple[str, str | None]:
    """The path or dotted name in a value, and the content hash if it has one."""
    pinned = _PINNED.fullmatch(value)
    return (pinned[1], pinned[2]) if pinned else (value, None)


def _is_path(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _key(source: str) -> str:
    """The key of a file or module in the table of imports."""
    return str(Path(source).absolute()) if _is_path(source) else source


def _imported(value: str) -> Imported | None:
    """The import with this name, or with this content from another place; None if there is none."""
    source, wanted = _source_and_hash(value)
    same = (each for each in _IMPORTED.values() if each.hash == wanted)
    return _IMPORTED.get(_key(source)) or next(same, None)


def _load(value: str) -> None:
    source, wanted = _source_and_hash(value)
    is_path, name, imported = _is_path(source), _key(source), _imported(value)
    if imported is not None:
        if wanted:
            _require_hash(source, wanted, imported.hash)
        return
    if is_path and not os.path.isfile(name):  # unlike `Path.is_file`, it accepts any text
        raise UserError(f"--import={source}: there is no such file{_remedy(source) if wanted else ''}")
    if not is_path and not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"--import={source} is neither the path of a Python file nor the dotted name of a module")
    if wanted:
        file = Path(name) if is_path else _file_of_module(name)
        _require_hash(source, wanted, "none" if file is None else _hash(file))  # before it runs
    _register(source)


def _place_of(value: str, copies: Path) -> tuple[str, Path] | None:
    """The value that imports the recorded content, and its file: the original, the run's copy, or None."""
    source, wanted = _source_and_hash(value)
    copy, older = copies / _copy_name(source), copies / f"{source.rpartition('.')[2]}.py"
    file = Path(_key(source)) if _is_path(source) else _file_of_module(source)
    for name, place in ((source, file), (str(copy), copy), (str(older), older)):
        if place is not None and os.path.isfile(place) and wanted == _hash(place):
            return f"{name}#{wanted}", place
    return None


def _copy_name(source: str) -> str:
    """The name of the copy of a file or module. Modules of different packages may have one name, so it has both."""
    return Path(source).name if _is_path(source) else f"{source.replace('.', '_')}.py"


def _is_executed(value: str, file: Path) -> bool:
    """Whether an ``import`` in the user's script has executed a file already; `_load` does not execute it again."""
    source, _ = _source_and_hash(value)
    name = file.stem if _is_path(source) else source
    return getattr(sys.modules.get(name), "__file__", None) == str(file)


def _file_of_module(name: str) -> Path | None:
    """The file of a module, found without importing it or its packages; None if there is none."""
    path, spec, parts = None, None, name.split(".")
    if not all(part.isidentifier() for part in parts):  # finders raise many kinds of errors for such names
        return None
    for count in range(1, len(parts) + 1):
        full, spec = ".".join(parts[:count]), None
        with contextlib.suppress(ImportError, KeyError):  # KeyError: a namespace within one that is not imported
            spec = next(filter(None, (finder.find_spec(full, path) for finder in sys.meta_path)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _require_hash(source: str, wanted: str, actual: str) -> None:
    if wanted != actual:
        raise UserError(f"--import={source} has changed (its content hash is {actual}, not {wanted}){_remedy(source)}")


def _remedy(source: str) -> str:
    """The flags that use a run's copy of a file that is missing or has changed."""
    return f"; --import=none --import=RUN/{FOLDER}/{_copy_name(source)}, after the other flags, uses the run's copy"


@functools.cache
def _load_entry_points() -> None:
    """Import the modules that installed packages name. One that fails is reported and ignored."""
    for entry in metadata.entry_points(group=GROUP):
        if entry.module in _IMPORTED:
            continue
        try:
            _register(entry.module)
        except UserError as error:
            package = entry.dist.name if entry.dist else entry.value
            print(f"fedjax-mr: the installed package {package} is ignored: {error}", file=sys.stderr)


def _register(source: str) -> None:
    """Import a file or module; after an error the registries are unchanged."""
    name = _key(source)
    before = {registry.kind: dict(registry) for registry in REGISTRIES}
    modules = set(sys.modules)
    claimed = _OURS.union(*(each.names for each in _IMPORTED.values()))
    try:
        with _guarded():
            module = _import_file(Path(name)) if _is_path(source) else _import_module(name)
        names = _new_names(source, claimed, before)
    except BaseException:
        for registry in REGISTRIES:
            registry.clear()
            dict.update(registry, before[registry.kind])
        for new in set(sys.modules) - modules:
            if getattr(sys.modules[new], "__file__", None) == name:
                del sys.modules[new]
        raise
    file = Path(str(module.__file__))
    code = file.read_bytes() if file.name != "__init__.py" else None
    _IMPORTED[name] = Imported(name, file, code, _hash(file), frozenset(names))


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Let the registries reject names that exist already and invalid rows."""
    for registry in REGISTRIES:
        registry.guarded = True
    try:
        yield
    finally:
        for registry in REGISTRIES:
            registry.guarded = False


def _new_names(source: str, claimed: Collection[tuple[str, str]], before: dict[str, dict]) -> Names:
    """The rows that an import has registered.

    Raises:
      UserError: it registered none, or changed rows that are not its own.
    """
    for registry in REGISTRIES:
        for name, row in before[registry.kind].items():
            if registry.get(name) is not row:
                raise UserError(f"{source} changes the {registry.kind} {name!r}, which exists already")
        for name, row in registry.items():
            if name not in before[registry.kind]:
                registry.refuse_unless_row(name, row)
                if registry is STRATEGIES:
                    _refuse_unless_flags(name, row.hyper)
    # Rows that an earlier `import` of the same module has registered are its own, too.
    if names := _all_names() - set(claimed):
        return names
    places = [registry.place for registry in REGISTRIES]
    raise UserError(f"{source} registers nothing: no new name in {', '.join(places[:-1])} or {places[-1]}")


def _refuse_unless_flags(strategy: str, hyper: type | None) -> None:
    """Check that the hyper-parameters of a strategy can be flags.

    Raises:
      UserError: they cannot.
    """
    try:
        for setting in settings_of(hyper, f"{strategy}_"):
            setting.check(setting.default)
    except (TypeError, KeyError, NameError, UserError) as error:
        raise UserError(SETTINGS.format(name=strategy, error=error)) from None


def _import_file(path: Path) -> ModuleType:
    """Import a file, under its own name unless another module has it. Its folder is searched for its own imports."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        if spec is not None and spec.origin and Path(spec.origin) == path:
            return _executed(path, path.stem)
    name = f"{GROUP}_import_{path.stem}_{_hash(path)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"--import={path.name} is not a Python file: the name must end with .py")
    return _executed(path, name)


def _executed(path: Path, name: str) -> ModuleType:
    """The module of a file, executed at its first import."""
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their types there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(_located(error, path)) from error
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # the script fedjax-mr does not search it
        sys.path.append(str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UserError(f"--import={name}: no such module is in this folder or installed")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(_located(error, Path(spec.origin))) from error


def _hash(file: Path) -> str:
    """The content hash of a file, or of all Python files of a package.

    Raises:
      UserError: a file cannot be read.
    """
    paths = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    try:
        for path in paths:
            digest.update(path.read_bytes())
    except OSError as error:
        raise UserError(f"--import={file} cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:12]


# --- Errors ----------------------------------------------------------------------------------------------------------


def blame(error: BaseException) -> UserError | None:
    """An error in the code of an imported file as one line with file and line number; None for other errors."""
    files = {str(each.file): each.file for each in _IMPORTED.values()}
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return UserError(_located(error, files[frames[-1]])) if frames else None


@contextlib.contextmanager
def blamed() -> Iterator[None]:
    """Raise an error in the code of an imported file as a `UserError`, see `blame`; other errors are unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (reason := blame(error)) is None:
            raise
        raise reason from error


def _located(error: BaseException, file: Path) -> str:
    """The message of an error after the file and the line that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename:
        file, lines = Path(error.filename), [error.lineno]
    place = f"{_short(file)}, line {lines[-1]}" if lines else _short(file)
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{place}: {message if isinstance(error, UserError) else f'{type(error).__name__}: {message}'}"


def _short(file: Path) -> str:
    """A path relative to the current folder if it is below it."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


# --- In the run folder -----------------------------------------------------------------------------------------------


def recorded(values: Iterable[str], used: Names) -> tuple[str, ...]:
    """The imports that a run needs, with their content hashes; () if it uses none of their rows.

    Files that are named together may import each other, so all of them are kept if one is needed.

    Args:
      values: the values of ``--import``, after `load`.
      used: the rows that the run uses.

    Raises:
      UserError: two files have the same name, so the run folder cannot keep copies of both.
    """
    chosen = [each for each in map(_imported, split(values)) if each is not None]
    needed = chosen if any(each.names & used for each in chosen) else []
    left = used.difference(*(each.names for each in needed))
    needed += [each for each in _IMPORTED.values() if each.names & left]  # entry points, and those of earlier calls
    copied: dict[str, Imported] = {}
    for each in needed:
        if each.code is not None and (other := copied.setdefault(_copy_name(each.name), each)) is not each:
            raise UserError(
                f"--import={other.name} and --import={each.name}: the run folder keeps a copy of each file, so their "
                f"names must differ: rename one {each.file.name}"
            )
    return tuple(dict.fromkeys(each.pinned for each in needed))


def strategies(values: Iterable[str]) -> list[str]:
    """The strategies that files and modules have registered, in order.

    Args:
      values: the values of ``--import``, after `load`.
    """
    requested = {_key(_source_and_hash(value)[0]) for value in split(values)}
    names = set().union(*(each.names for name, each in _IMPORTED.items() if name in requested))
    return [name for name in STRATEGIES if (STRATEGIES.kind, name) in names]


def hashes(recorded: Iterable[str]) -> list[str]:
    """The content hashes of recorded imports, whatever their paths."""
    return [_source_and_hash(value)[1] or value for value in recorded]


def keep(recorded: Iterable[str], folder: Path) -> None:
    """Copy the imported files of a run into a folder.

    Raises:
      UserError: it cannot be written.
    """
    for name in (_source_and_hash(value)[0] for value in recorded):
        code = _IMPORTED[name].code if name in _IMPORTED else None
        if code is not None:
            try:
                files.make_folder(folder)
            except OSError as error:
                raise UserError(f"cannot write into {folder} ({error.strerror})") from None
            with files.atomic_write(folder / _copy_name(name)) as path:
                path.write_bytes(code)
