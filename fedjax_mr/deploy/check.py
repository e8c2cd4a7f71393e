"""``python -m fedjax_mr.deploy check``: find common mistakes on a machine of a federation, and print their remedies.

Run it on every machine, in the same environment and with the same settings as Flower. Each option adds a check. Use
``--app`` on all machines, ``--node-config`` on those of clients, and ``--superlink`` on all, once the SuperLink runs.
An app's own code is only run if ``--import`` or the node settings name its file here.
"""

import argparse
import contextlib
import os
import shlex
import socket
import ssl
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel import compression
from fedjax_mr.config import config as configuration
from fedjax_mr.deploy.protocol import common_versions, digest, disagreement, trusted_flags
from fedjax_mr.deploy.samples import ClientSamples, ServerSamples, is_table
from fedjax_mr.deploy.server import check_deployable
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.secure.envelopes import Identity, read_roster

OLDEST = (1, 41)  # version of Flower
_TENSOR = 10_000
_PORTS = range(1, 2**16)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NOT_AN_APP = (OSError, ValueError, KeyError, TypeError)  # what reading an app raises if it is none


class Finding(NamedTuple):
    """A mistake and its remedy, one line each."""

    mistake: str
    remedy: str


def main(arguments: Sequence[str]) -> None:
    """Print all findings on this machine.

    Raises:
      UserError: there are findings.
    """
    options = _parser().parse_args(arguments)
    findings = [*environment(os.environ), *versions()]
    own_code = options.own_code or _settings(options.node_config or "").get("import", "")
    if options.app:
        findings += app(options.app, own_code)
    if options.node_config is not None:
        config = _config(options.app, own_code) if options.app else None
        findings += node(options.node_config, config.clients if config else None)
    findings += samples_here(options.app, options.node_config or "", own_code)
    if options.superlink:
        findings += superlink(options.superlink, options.root_certificates)
    for line in channel(options.app, own_code) if options.app else ():
        print(line)
    for finding in findings:
        print(f"{finding.mistake}\n  -> {finding.remedy}")
    if findings:
        raise UserError(f"{len(findings)} finding{'s' * (len(findings) > 1)} on this machine")
    print("no problems found")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fedjax_mr.deploy check", description=__doc__)
    parser.add_argument("--app", metavar="FOLDER", help="folder written by `deploy new`, or a copy of it")
    parser.add_argument(
        "--import", dest="own_code", default="", metavar="FILE", help="the app's own code, if this machine trusts it"
    )
    parser.add_argument("--node-config", metavar="SETTINGS", help="the same text as for flower-supernode")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="address that the SuperNodes of this federation use")
    parser.add_argument(
        "--root-certificates", metavar="FILE", help="with --superlink: certificate of the CA. If omitted, no TLS"
    )
    return parser


# --- The checks -------------------------------------------------------------------------------------------------------


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Flower neither sends telemetry nor looks for updates."""
    if variables.get("FLWR_TELEMETRY_ENABLED", "1") != "0":
        yield Finding("Flower sends telemetry to flower.ai", "export FLWR_TELEMETRY_ENABLED=0")
    if variables.get("FLWR_DISABLE_UPDATE_CHECK", "").lower() not in ("1", "true", "yes", "on"):
        yield Finding("Flower asks flower.ai for updates", "export FLWR_DISABLE_UPDATE_CHECK=1")


def versions() -> Iterator[Finding]:
    """Check that Flower is installed, and new enough."""
    remedy = "pip install -c constraints-deploy.txt 'fedjax_mr[deploy]' in an environment of its own"
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield Finding("flwr is not installed in this environment", remedy)
        return
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        yield Finding(f"the version of flwr is {found}; this package needs {OLDEST[0]}.{OLDEST[1]} or newer", remedy)


def node(settings: str, clients: int | None = None) -> Iterator[Finding]:
    """Check the settings of a SuperNode: its client's number and files.

    Args:
      settings: the text of ``--node-config``.
      clients: number of clients of the app, or None if it is not known.
    """
    values = _settings(settings)
    if not values:
        yield Finding(
            f"--node-config={settings!r} is not a list of NAME=VALUE", "separate entries by spaces, and quote texts"
        )
        return
    number = values.get("client-id", "")
    if not number.isdecimal():
        yield Finding("client-id in the node settings is not a number", "give each node a different number, from 0")
    elif clients and int(number) >= clients:
        yield Finding(
            f"client-id={number} in the node settings, but the app has {clients} client{'s' * (clients > 1)}",
            f"give each node a different number, from 0 to {clients - 1}",
        )
    if not Path(values.get("data", "")).is_file():
        yield Finding(f"data={values.get('data', '')!r} is not a file", "set data to the file of the client's samples")
    state = Path(values.get("state", ""))
    if not values.get("state") or not os.access(state if state.exists() else state.parent, os.W_OK):
        yield Finding(f"state={values.get('state', '')!r} is not a writable folder", "set state to such a folder")
    yield from _readable(values.get("state", ""))
    if "key" in values or "roster" in values:
        try:
            me, roster = Identity.read(values.get("key", "")), read_roster(values.get("roster", ""))
        except UserError as error:
            yield Finding(str(error), "make keys with `deploy keys`, and put the lines of all clients into the roster")
            return
        if roster.get(me.client) != me.public or str(me.client) != values.get("client-id"):
            yield Finding("this client's keys are not those in its line of the roster", "get the newest roster")
        yield from _readable(values["key"])
    if values.get("choices") == "simulated":
        yield Finding("the server can compute this client's choices (choices=simulated)", "remove choices")


def samples_here(folder: str | None, settings: str, own_code: str = "") -> Iterator[Finding]:
    """Check the files of samples that are on this machine, the client's against the server's if both are.

    Args:
      folder: folder of the app, or None.
      settings: the settings of a SuperNode, or "".
      own_code: as in `app`.
    """
    server, client = _server_file(folder), Path(_settings(settings).get("data", ""))
    kind = None
    if server is not None and server.is_file():
        try:
            kind = ServerSamples.read(server, _config(folder or "", own_code)).facts
        except UserError as error:
            yield Finding(str(error), "write test_x and test_y into it, see docs/recipes/real_clients.md")
    if client.is_file() and (kind is not None or not is_table(client)):  # the server's table prepares the client's
        try:
            ClientSamples.read(client, kind)
        except UserError as error:
            yield Finding(str(error), "write x and y of the federation's kind into it")


def _server_file(folder: str | None) -> Path | None:
    """The server's file of samples that an app names; None for a damaged app."""
    try:
        return Path(_app_tables(folder or "")[0]["server-data"])
    except _NOT_AN_APP:
        return None


def _settings(text: str) -> dict[str, str]:
    """The settings of a node by name; empty if they are malformed."""
    try:
        return dict(pair.split("=", 1) for pair in shlex.split(text))
    except ValueError:
        return {}


def _readable(path: str) -> Iterator[Finding]:
    """Check that only the owner can read a file or folder; "" names none."""
    with contextlib.suppress(OSError):  # missing, or in a folder of another user
        if path and Path(path).stat().st_mode & 0o077:
            kind, mode = ("open", 700) if Path(path).is_dir() else ("read", 600)
            yield Finding(f"others can {kind} {path}", f"chmod {mode} {shlex.quote(path)}")


def app(folder: str, own_code: str = "") -> Iterator[Finding]:
    """Check that an app is intact, and that this machine has the same versions and reads its flags alike.

    Args:
      folder: folder of the app.
      own_code: files and modules of ``--import`` that may run here.
    """
    path = Path(folder) / "pyproject.toml"
    try:
        run, agreed = _app_tables(folder)
        flags = run["flags"]
    except _NOT_AN_APP as error:
        yield Finding(f"{path} is not an app of this package ({error})", "copy the folder that `deploy new` wrote")
        return
    try:
        config = configuration.parse(trusted_flags(flags, own_code))
        ours = {"settings": digest(config), **common_versions()}
        check_deployable(config)
    except UserError as error:
        yield Finding(f"the flags of {path} are not valid here: {error}", "install the server's versions and files")
        return
    if difference := disagreement(ours, agreed):
        yield Finding(difference, "pip install the server's versions here, and use the same files for --import")


def _app_tables(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two tables of an app's ``pyproject.toml``: the settings of its run, and the versions on which all machines agree.

    Raises one of `_NOT_AN_APP` if the file is missing or damaged.
    """
    tables = tomllib.loads((Path(folder) / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return dict(tables["flwr"]["app"]["config"]), dict(tables["fedjax_mr"])


def _config(folder: str, own_code: str) -> configuration.Config | None:
    """The configuration of an app; None for a damaged app. The arguments are those of `app`."""
    try:
        return configuration.parse(trusted_flags(_app_tables(folder)[0]["flags"], own_code))
    except (*_NOT_AN_APP, UserError):
        return None


def channel(folder: str, own_code: str = "") -> Iterator[str]:
    """The effect of each link of an app's channel on this client's messages, one line each. Empty for a damaged app.

    Args:
      folder: as in `app`.
      own_code: as in `app`.
    """
    config = _config(folder, own_code)
    if config is None:
        return
    for flag, kind in (("compress", config.compress), ("compress_download", config.compress_download)):
        ratio, levels = config.compress_ratio, config.compress_levels
        if kind != "none" and (codec := compression.make_codec(kind, _TENSOR, ratio=ratio, levels=levels)):
            sent = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((_TENSOR,), np.float32), random_key(0))
            sizes = f"{trees.num_bytes(sent):,} bytes, not {4 * _TENSOR:,}"
            yield f"--{flag}={kind}: a tensor of {_TENSOR:,} numbers is sent as {sizes}"
    if config.dp_clip is not None:
        noise = ", and noise from a secret of this client is added" if config.dp_noise else ", without noise"
        yield f"--dp_clip={config.dp_clip:g}: the change that this client uploads is clipped{noise}; no more bytes"
    if config.robust != "none":
        yield f"--robust={config.robust}: the server may replace this client's upload, which costs at most one byte"


def superlink(address: str, root_certificates: str | None) -> Iterator[Finding]:
    """Check that the SuperLink can be reached, that its certificate is valid, and what else it answers."""
    host, _, number = address.rpartition(":")
    host = host.strip("[]")
    if not host or not number.isdecimal() or int(number) not in _PORTS:
        yield Finding(f"--superlink={address} is not HOST:PORT", "remove https:// and add a port from 1 to 65535")
        return
    trust = "set --root-certificates to the CA, here and for the SuperNode"
    local = host in _LOOPBACK
    if not root_certificates and not local:
        yield Finding(f"messages to {address} can be read and changed on their way", f"use TLS: {trust}")
    try:
        context = ssl.create_default_context(cafile=root_certificates)
        context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST  # Python 3.13 would ask more of a CA
    except OSError as error:  # also of a damaged file
        yield Finding(
            f"{root_certificates} is not a certificate ({error.strerror or error})",
            "set --root-certificates to the PEM file of the CA",
        )
        return
    try:
        with socket.create_connection((host, int(number)), timeout=10) as plain:
            if not root_certificates:
                answer = _root_page(plain, host)
            else:
                with context.wrap_socket(plain, server_hostname=host) as secured:
                    answer = _root_page(secured, host)
    except ssl.SSLCertVerificationError as error:
        yield Finding(
            f"the certificate of {address} is rejected: {error.verify_message}",
            f"check {root_certificates} against the SuperLink's CA, the host name and the dates",
        )
    except ssl.SSLError as error:
        yield Finding(f"{address} does not speak TLS ({error.reason})", "start the SuperLink with its --ssl- options")
    except OSError as error:
        yield Finding(
            f"nothing answers at {address} ({error.strerror or error})",
            "start the SuperLink and its proxy, and open the port in all firewalls",
        )
    else:
        if not root_certificates and (not answer.startswith(b"HTTP/") or b" 400 " in answer):
            yield Finding(f"{address} requires TLS", trust)
        elif not local and b" 403 " not in answer:
            yield Finding(
                f"anyone who can reach {address} can run code on every client",
                "start the SuperLink with --host 127.0.0.1 behind a proxy that passes only /v1/fleet/, and answers all "
                "other requests with 403 (see the docs)",
            )


def _root_page(connection: socket.socket, host: str) -> bytes:
    """The first line of the response to a request that no SuperNode makes; empty if there is none."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return connection.recv(2**12).partition(b"\r\n")[0]
    return b""
