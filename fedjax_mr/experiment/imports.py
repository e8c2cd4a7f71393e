"""Python files and modules of one's own that register methods, networks, data sets or partitions (``--import``).

They are imported before the flags are made, because flags are made from the registries. An installed package is found
by itself if it names such a module as an entry point of the group ``fedjax_mr``. A run that uses what they register
keeps their paths, content hashes and copies, so that it is never repeated or continued with other code unnoticed.

Code runs only if the user named it (``--import``, an ``import`` of his own, an installed package) or trusts the folder
that records it (``trust=True``, ``--trust``): a folder from somebody else holds both the code and its hash.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fedjax_mr.data import SOURCES, files
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.settings import settings_of
from fedjax_mr.models import MODELS
from fedjax_mr.registry import Registry
from fedjax_mr.strategies import SETTINGS, STRATEGIES

GROUP = "fedjax_mr"  # of entry points
FOLDER = "imports"  # of a run folder: the copies
REGISTRIES: tuple[Registry, ...] = (STRATEGIES, MODELS, SOURCES, PARTITIONS)
_PINNED = re.compile(r"(.+)#([0-9a-f]{12})")
Names = set[tuple[str, str]]  # the kind of a row and its name


@dataclasses.dataclass(frozen=True)
class Imported:
    """A file or module that was imported.

    Attributes:
      name: the absolute path of the file, or the dotted name.
      file: the path of its code.
      code: the content of a single file; None of a package.
      hash: of its content.
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


# --- Before the flags are made ---------------------------------------------------------------------------------------


def load(given: Iterable[str]) -> None:
    """Import files and modules that the user names, each once, after the entry points of installed packages.

    Args:
      given: paths of Python files and dotted names, several with commas between them; with ``#`` and a content hash
        behind it, a file must have that content.

    Raises:
      UserError: a file is not there, has changed, fails to import, registers nothing, or takes a name that is taken.
    """
    _load_entry_points()
    for value in split(given):
        _load(value)


def load_recorded(recorded: Iterable[str], copies: Path, *, trust: bool) -> None:
    """Import the files and modules that a run folder records, if their code may run.

    The folder may come from somebody else, and so may the hashes in it. Therefore code runs only if the user trusts the
    folder. Code that this process has imported already needs no trust: the user named it, or has installed it.

    Args:
      recorded: the imports in the folder's ``config.json``.
      copies: the folder of the run's own copies. A copy is used if the recorded file is gone or has changed.
      trust: whether code may run that this process has not imported yet.

    Raises:
      UserError: code is needed and not trusted, is nowhere to be found with the recorded content, or as `load`.
    """
    _load_entry_points()
    for value in split(recorded):
        place = None if _imported(value) else _place_of(value, copies)
        if place is None and "#" not in value:
            raise UserError(
                f"{copies.parent} records no content hash of its code: name it yourself by --import={value}"
            )
        if place is not None:
            value, file = place
            if not (trust or _is_executed(value, file)):
                raise UserError(
                    f"{copies.parent} needs code of its own, and loading it would run {file}: read that file, then "
                    f"allow it by --trust (in Python trust=True), or name it yourself by --import={file}"
                )
        _load(value)


def split(given: Iterable[str]) -> list[str]:
    """Return the single files and modules of the values of ``--import``."""
    return [part.strip() for value in given for part in value.split(",") if part.strip()]


def _parted(value: str) -> tuple[str, str | None]:
    """Return the path or dotted name of a value, and the content hash if it has one."""
    found = _PINNED.fullmatch(value)
    return (found[1], found[2]) if found else (value, None)


def _is_path(given: str) -> bool:
    return given.endswith(".py") or "/" in given or "\\" in given


def _key(given: str) -> str:
    """Return the name by which a file or module is kept."""
    return str(Path(given).absolute()) if _is_path(given) else given


def _imported(value: str) -> Imported | None:
    """Return what was imported by this name, or else with this content from another place."""
    given, wanted = _parted(value)
    same = (each for each in _IMPORTED.values() if each.hash == wanted)
    return _IMPORTED.get(_key(given)) or next(same, None)


def _load(value: str) -> None:
    given, wanted = _parted(value)
    is_path, name, imported = _is_path(given), _key(given), _imported(value)
    if imported is not None:
        if wanted:
            _refuse_other(given, wanted, imported.hash)
        return
    if is_path and not Path(name).is_file():
        raise UserError(f"--import={given}: there is no such file{_instead(given) if wanted else ''}")
    if not is_path and not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"--import={given} is neither the path of a Python file nor the dotted name of a module")
    if wanted:
        file = Path(name) if is_path else _file_of_module(name)
        _refuse_other(given, wanted, "none" if file is None else _hash(file))  # before it runs
    _IMPORTED[name] = _register(given, name, is_path=is_path)


def _place_of(value: str, copies: Path) -> tuple[str, Path] | None:
    """Return how to import the recorded content, and its file: at its own place, or the run's copy; None: nowhere."""
    given, wanted = _parted(value)
    copy = copies / _copy_name(given)
    file = Path(_key(given)) if _is_path(given) else _file_of_module(given)
    for name, place in ((given, file), (str(copy), copy)):
        if place is not None and place.is_file() and wanted == _hash(place):
            return f"{name}#{wanted}", place
    return None


def _copy_name(given: str) -> str:
    """Return the name of the copy of a file or module."""
    return Path(given).name if _is_path(given) else f"{given.rpartition('.')[2]}.py"


def _is_executed(value: str, file: Path) -> bool:
    """Return whether an ``import`` of the user's own has executed a file already; `_load` does not execute it again."""
    name = file.stem if _is_path(_parted(value)[0]) else _parted(value)[0]
    return getattr(sys.modules.get(name), "__file__", None) == str(file)


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module without importing anything, not even the packages that it is in; None: not found."""
    path, spec, parts = None, None, name.split(".")
    for count in range(1, len(parts) + 1):
        full, found = ".".join(parts[:count]), None
        with contextlib.suppress(ImportError, KeyError):  # KeyError: a namespace within one that is not imported
            found = next(filter(None, (finder.find_spec(full, path) for finder in sys.meta_path)), None)
        if found is None:
            return None
        spec, path = found, found.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _refuse_other(given: str, wanted: str, found: str) -> None:
    if wanted != found:
        raise UserError(f"--import={given} has changed (its content hash is {found}, not {wanted}){_instead(given)}")


def _instead(given: str) -> str:
    """Return what to do if the file that a run was made with is not there."""
    return f"; --import=none --import=RUN/{FOLDER}/{_copy_name(given)}, after the other flags, takes the run's own copy"


@functools.cache
def _load_entry_points() -> None:
    """Import the modules that installed packages name; one that fails is told and left out, as no run asked for it."""
    for entry in metadata.entry_points(group=GROUP):
        if entry.module in _IMPORTED:
            continue
        try:
            _IMPORTED[entry.module] = _register(entry.module, entry.module, is_path=False)
        except UserError as error:
            package = entry.dist.name if entry.dist else entry.value
            print(f"fedjax-mr: the installed package {package} is left out: {error}", file=sys.stderr)


def _register(given: str, name: str, *, is_path: bool) -> Imported:
    """Import a file or module; if something is wrong, leave the registries as they were."""
    before = {registry.kind: dict(registry) for registry in REGISTRIES}
    modules = set(sys.modules)
    claimed = _OURS.union(*(each.names for each in _IMPORTED.values()))
    try:
        with _guarded():
            module = _import_file(Path(name)) if is_path else _import_module(name)
        names = _new_names(given, claimed, before)
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
    return Imported(name, file, code, _hash(file), frozenset(names))


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Let the registries refuse names that are taken, and rows that are none."""
    for registry in REGISTRIES:
        registry.guarded = True
    try:
        yield
    finally:
        for registry in REGISTRIES:
            registry.guarded = False


def _new_names(given: str, claimed: Collection[tuple[str, str]], before: dict[str, dict]) -> Names:
    """Return what an import has registered.

    Raises:
      UserError: nothing, or it changed rows that are not its own.
    """
    for registry in REGISTRIES:
        for name, row in before[registry.kind].items():
            if registry.get(name) is not row:
                raise UserError(f"{given} changes the {registry.kind} {name!r}, which is there already")
        for name, row in registry.items():
            if name not in before[registry.kind]:
                registry.refuse_unless_row(name, row)
                if registry is STRATEGIES:
                    _refuse_unless_flags(name, row.hyper)
    # What an earlier `import` of the same module has registered is its own, too.
    if names := _all_names() - set(claimed):
        return names
    places = [registry.place for registry in REGISTRIES]
    raise UserError(f"{given} registers nothing: no new name in {', '.join(places[:-1])} or {places[-1]}")


def _refuse_unless_flags(strategy: str, hyper: type | None) -> None:
    """Check that the settings of a strategy can be flags.

    Raises:
      UserError: they cannot.
    """
    try:
        for setting in settings_of(hyper, f"{strategy}_"):
            setting.check(setting.default)
    except (TypeError, KeyError, NameError, UserError) as error:
        raise UserError(SETTINGS.format(name=strategy, error=error)) from None


def _import_file(path: Path) -> ModuleType:
    """Import a file, under its own name unless another module has it; its folder is searched for what it imports."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        if spec is not None and spec.origin and Path(spec.origin) == path:
            return _executed(path, path.stem)
    name = f"{GROUP}_import_{path.stem}_{_hash(path)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"--import={path.name} is no Python file: its name ends with .py")
    return _executed(path, name)


def _executed(path: Path, name: str) -> ModuleType:
    """Return the module of a file, executed unless it was before."""
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their types there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(_told(error, path)) from error
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # the script fedjax-mr does not search it
        sys.path.append(str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UserError(f"--import={name}: there is no such module in this folder, nor is one installed")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(_told(error, Path(spec.origin))) from error


def _hash(file: Path) -> str:
    """Return the content hash of a file, or of all Python files of a package."""
    paths = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# --- Errors ----------------------------------------------------------------------------------------------------------


def blame(error: BaseException) -> UserError | None:
    """Return an error in the code of an imported file as one line with the place; None if it is not in one."""
    files = {str(each.file): each.file for each in _IMPORTED.values()}
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return UserError(_told(error, files[frames[-1]])) if frames else None


def _told(error: BaseException, file: Path) -> str:
    """Return an error with the line of the file where it arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename:
        file, lines = Path(error.filename), [error.lineno]
    place = f"{_short(file)}, line {lines[-1]}" if lines else _short(file)
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{place}: {message if isinstance(error, UserError) else f'{type(error).__name__}: {message}'}"


def _short(file: Path) -> str:
    """Return a path as seen from the current folder if it is below that."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


# --- What a run keeps ------------------------------------------------------------------------------------------------


def recorded(given: Iterable[str], used: Names) -> tuple[str, ...]:
    """Return the imports that a run needs, with their content hashes: none if it uses nothing of theirs.

    Files that are given together may build on each other, so all of them are kept if one is needed.

    Args:
      given: the values of ``--import``, which `load` has seen.
      used: the rows that the run uses.
    """
    chosen = [each for each in map(_imported, split(given)) if each is not None]
    needed = chosen if any(each.names & used for each in chosen) else []
    left = used.difference(*(each.names for each in needed))
    needed += [each for each in _IMPORTED.values() if each.names & left]  # entry points, and those of earlier calls
    return tuple(dict.fromkeys(each.pinned for each in needed))


def strategies(given: Iterable[str]) -> list[str]:
    """Return the strategies that files and modules have registered, in order.

    Args:
      given: the values of ``--import``, which `load` has seen.
    """
    asked = {_key(_parted(value)[0]) for value in split(given)}
    names = set().union(*(each.names for name, each in _IMPORTED.items() if name in asked))
    return [name for name in STRATEGIES if (STRATEGIES.kind, name) in names]


def hashes(recorded: Iterable[str]) -> list[str]:
    """Return the content hashes of recorded imports, wherever their files are."""
    return [_parted(value)[1] or value for value in recorded]


def keep(recorded: Iterable[str], folder: Path) -> None:
    """Copy the imported files of a run into a folder.

    Raises:
      UserError: it cannot be written.
    """
    for name in (_parted(value)[0] for value in recorded):
        code = _IMPORTED[name].code if name in _IMPORTED else None
        if code is not None:
            try:
                files.make_folder(folder)
            except OSError as error:
                raise UserError(f"cannot write into {folder} ({error.strerror})") from None
            with files.atomic_write(folder / _IMPORTED[name].file.name) as path:
                path.write_bytes(code)
