"""The command ``python -m fedjax_mr.deploy``: prepare a federation of real clients.

``new`` writes the app and prints the Flower commands that run it. ``divide`` splits a dataset into files for the server
and the clients, for a trial. ``keys`` makes a client's keys. ``check`` finds common mistakes on a machine.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedjax_mr import files
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import help_of, settings_of
from fedjax_mr.deploy import check, keys, protocol, samples
from fedjax_mr.deploy.server import ServerOptions, check_deployable
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code
from fedjax_mr.terminal.messages import flags_in_errors

COMMAND = "python -m fedjax_mr.deploy"
USAGE = f"""usage: {COMMAND} new FOLDER [--flag=value ...] [--flagfile=FILE ...]
         write the app of a federation into FOLDER and print the commands that run it
       {COMMAND} divide FOLDER [--flag=value ...] [--flagfile=FILE ...]
         divide a dataset for a trial: FOLDER/server.npz, FOLDER/client-0.npz, FOLDER/client-1.npz, ...
       {COMMAND} keys --client=NUMBER --out=FILE
         make a client's keys for secure recombination and print its line of the roster
       {COMMAND} check [--app=FOLDER ...]
         find common mistakes on this machine and print their remedies; check --help lists the options

All tasks and metrics work with real clients. The task is that of the dataset, or that which the server's own file
declares; --metrics and --loss choose the rest, as in a simulation.

The run is described by the flags of {configuration.COMMAND} (see its --help=all), and the server by these of `new`:
"""
PORT, NODE_PORT = 8000, 9094  # Flower's defaults; node n of a machine uses the port NODE_PORT + n
QUIET = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"


def new(arguments: Sequence[str]) -> None:
    """Write the app of a federation and print the commands that run it.

    Raises:
      UserError: real clients cannot run the configuration, the server's file is missing, or the folder holds other
        files.
    """
    folder, flags = _folder("new", arguments)
    requested, setting = configuration.parse_command(flags, ServerOptions)
    with flags_in_errors(requested.strategy):
        config = resolve(requested).config
    check_deployable(config)
    for each in settings_of(ServerOptions):
        each.check(getattr(setting, each.name))
    app = folder / "pyproject.toml"
    if folder.is_dir() and not app.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} holds other files: choose another folder")
    server_data = Path(setting.server_data or folder / "data" / "server.npz").absolute()
    if setting.server_data and not server_data.is_file():
        raise UserError(
            f"--server_data={setting.server_data}: there is no such file: create it first, with test_x and test_y, or "
            "correct the path"
        )
    if samples.is_table(server_data):
        samples.ServerSamples.read(server_data, config)
    run_dir = Path(config.run_dir or folder / "run").absolute()
    text = _app(folder.absolute().name, config, setting, run_dir=run_dir, server_data=server_data)
    try:
        files.make_folder(folder)
        with files.atomic_write(app) as path:
            path.write_text(text, encoding="utf-8")
        with files.atomic_write(folder / ".gitignore") as path:  # otherwise Flower sends these files to every node
            path.write_text("run/\ndata/\nstate-*/\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder") from None
    print(_commands(folder, config, setting, server_data=server_data, run_dir=run_dir))


def divide(arguments: Sequence[str]) -> None:
    """Split a dataset into files for the server and the clients.

    Raises:
      UserError: the dataset cannot be read, or its partition is not possible.
    """
    folder, flags = _folder("divide", arguments)
    config = configuration.parse_command(flags, ServerOptions)[0]
    with flags_in_errors(config.strategy):
        config = resolve(config).config
        paths = samples.divide(federated_data(config), folder)
    print(*paths, sep="\n")


def _app(name: str, config: Config, setting: ServerOptions, *, run_dir: Path, server_data: Path) -> str:
    """The text of the app's ``pyproject.toml``; values are quoted as in JSON, which TOML reads too."""
    quoted = json.dumps
    flags = shlex.join([*configuration.to_flags(config), f"--run_dir={run_dir}", "--noprogress"])
    versions = [f"{package} = {quoted(version)}" for package, version in protocol.common_versions().items()]
    lines = [
        "# Made by: " + COMMAND + " new. The app runs only code of the package fedjax_mr, which every node has.",
        "[project]",
        f"name = {quoted(_plain(name))}",
        'version = "1.0.0"',
        f"description = {quoted(f'{config.strategy} on {config.clients} clients')}",
        'license = "Apache-2.0"',
        "dependencies = []",
        "",
        "[tool.flwr.app]",
        'publisher = "fedjax-mr"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "fedjax_mr.deploy.apps:server"',
        'clientapp = "fedjax_mr.deploy.apps:client"',
        "",
        "[tool.flwr.app.config]",
        f"flags = {quoted(flags)}",
        f"lost = {quoted(setting.lost)}",
        f"reply-timeout = {float(setting.reply_timeout)}",
        f"node-keys = {quoted(setting.node_keys)}",
        f"server-data = {quoted(str(server_data))}",
        "",
        "[tool.fedjax_mr]",
        f"settings = {quoted(protocol.digest(config))}",
        *versions,
    ]
    return "\n".join(lines) + "\n"


def _commands(folder: Path, config: Config, setting: ServerOptions, *, server_data: Path, run_dir: Path) -> str:
    """Flower's commands for a trial on one machine."""
    # Flower takes a name that is also a folder here for an app.
    name, data = f"{_plain(folder.absolute().name)}-server", server_data.parent
    trial = [
        f"# Once, for a trial: the samples of {config.clients} clients and of the server",
        f"{COMMAND} divide {shlex.quote(str(data))} {' '.join(_about_data(config))}",
        "",
    ]
    # A client only runs code and reads weights that its operator names.
    code = f' import="{",".join(config.imports)}"' if config.imports else ""
    code += f' pretrained="{config.pretrained}"' if config.pretrained is not None else ""
    suffix = ".csv" if samples.is_table(server_data) else ".npz"
    file = lambda client: f"PATH/OF/CLIENT-{client}{suffix}" if setting.server_data else f"{data}/client-{client}.npz"
    node = lambda client: f'client-id={client} data="{file(client)}" state="{folder.absolute()}/state-{client}"{code}'
    nodes = [
        f"{QUIET} flower-supernode --insecure --superlink 127.0.0.1:{PORT} --port {NODE_PORT + client} "
        f"--node-config {shlex.quote(node(client))}"
        for client in range(config.clients)
    ]
    own_file = "; put the path of its own file after data=" if setting.server_data else ""
    return "\n".join(
        [
            f"The app is {folder / 'pyproject.toml'}. Results will be in {run_dir}.",
            "",
            *([] if setting.server_data else trial),
            "# Once: the address of the server, in ~/.flwr/config.toml (or $FLWR_HOME/config.toml)",
            f"[superlink.{name}]",
            f'address = "127.0.0.1:{PORT}"',
            "insecure = true",
            "",
            "# The server's terminal. Anyone who can reach the port can run code on every client; for several machines",
            "# see docs/recipes/real_clients.md",
            f"{QUIET} flower-superlink --insecure --host 127.0.0.1 --port {PORT} "
            "--disable-runtime-dependency-installation",
            "",
            f"# Each client's terminal{own_file}",
            *nodes,
            "",
            "# The run; the same command resumes it",
            f"{QUIET} flwr run {shlex.quote(str(folder))} {name} --stream",
        ]
    )


def _about_data(config: Config) -> list[str]:
    """The flags of a configuration that differ from the defaults."""
    plain = set(configuration.to_flags(Config()))
    return [shlex.quote(flag) for flag in configuration.to_flags(config) if flag not in plain]


def _plain(name: str) -> str:
    """Turn a name into one that Flower accepts: lower-case letters, digits and hyphens."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return kept or "federation"


def _folder(command: str, arguments: Sequence[str]) -> tuple[Path, list[str]]:
    named = [argument for argument in arguments if not argument.startswith("-")]
    if len(named) != 1:
        raise UserError(f"{command} takes one folder: {COMMAND} {command} FOLDER --flagfile=...")
    return Path(named[0]), [argument for argument in arguments if argument.startswith("-")]


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "new": new,
    "divide": divide,
    "keys": keys.main,
    "check": check.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: arguments without the name of the program. Default: those of the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own_help = arguments[:1] in (["keys"], ["check"])
    if not arguments or (not own_help and any(argument in ("--help", "-help", "-h") for argument in arguments)):
        print(USAGE + help_of(ServerOptions))
        return 0
    return exit_code(lambda: _work(*arguments))


def _work(command: str, *arguments: str) -> None:
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    with imports.blamed():
        COMMANDS[command](arguments)


if __name__ == "__main__":
    sys.exit(interrupts.run(main) or 0)
