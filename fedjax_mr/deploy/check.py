"""``python -m fedjax_mr.deploy check``: find common mistakes on a machine of a federation, and print their remedies.

Run it on every machine, in the same environment and with the same settings as Flower. Each option adds a check. Use
``--app`` on all machines, ``--node-config`` and ``--superlink`` on machines of clients, and ``--certificate``,
``--host`` and ``--port`` on the machine of the SuperLink. ``--private-key`` takes the key of a node or a certificate.
An app's own code is only run if ``--import`` or the node settings name its file here.
"""

import argparse
import contextlib
import datetime
import fnmatch
import ipaddress
import os
import shlex
import shutil
import socket
import ssl
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel import compression
from fedjax_mr.deploy.protocol import common_versions, digest, disagreement, trusted_flags
from fedjax_mr.deploy.samples import ClientSamples, ServerSamples
from fedjax_mr.deploy.server import check_deployable
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.keys import random_key
from fedjax_mr.secure.envelopes import Identity, read_roster

FLOWER = (1, 41)
_TENSOR = 10_000
_PORTS = range(1, 2**16)
_NOT_AN_APP = (OSError, ValueError, KeyError, TypeError)  # what reading an app raises if it is none
_SOON = datetime.timedelta(days=30)


class Finding(NamedTuple):
    """A mistake and its remedy, one line each."""

    mistake: str
    remedy: str


class Process(NamedTuple):
    """A running program of Flower."""

    pid: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None  # None for a process of another user


def main(arguments: Sequence[str]) -> None:
    """Print all findings on this machine.

    Raises:
      UserError: there are findings.
    """
    options = _parser().parse_args(arguments)
    findings = [*environment(os.environ), *versions(), *commands(), *running(processes())]
    own_code = options.own_code or _settings(options.node_config or "").get("import", "")
    if options.app:
        findings += app(options.app, own_code)
    if options.node_config is not None:
        config = _config(options.app, own_code) if options.app else None
        findings += node(options.node_config, config.clients if config else None)
    findings += samples_here(options.app, options.node_config or "")
    if options.certificate:
        findings += certificate(options.certificate, options.host, datetime.datetime.now(datetime.UTC))
    for path in options.private_key:
        findings += private_key(path, options.certificate)
    if options.port is not None:
        findings += port(options.host, options.port)
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
    parser.add_argument(
        "--superlink", metavar="HOST:PORT", help="address of the SuperLink for this machine's SuperNode"
    )
    parser.add_argument(
        "--root-certificates", metavar="FILE", help="with --superlink: certificate of the CA. If omitted, no TLS"
    )
    parser.add_argument("--certificate", metavar="FILE", help="certificate of the SuperLink")
    parser.add_argument(
        "--private-key",
        action="append",
        default=[],
        metavar="FILE",
        help="private key of a node or a certificate; repeatable",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="host name that SuperNodes use for the SuperLink. Default: 127.0.0.1"
    )
    parser.add_argument("--port", type=int, help="port that must be free on this machine")
    return parser


# --- The checks -------------------------------------------------------------------------------------------------------


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Flower neither sends telemetry nor looks for updates."""
    if variables.get("FLWR_TELEMETRY_ENABLED", "1") != "0":
        yield Finding("Flower sends telemetry to flower.ai", "export FLWR_TELEMETRY_ENABLED=0")
    if variables.get("FLWR_DISABLE_UPDATE_CHECK", "").lower() not in ("1", "true", "yes", "on"):
        yield Finding("Flower asks flower.ai for updates", "export FLWR_DISABLE_UPDATE_CHECK=1")


def versions() -> Iterator[Finding]:
    """Check that the installed version of Flower is supported."""
    remedy = "pip install -c constraints-deploy.txt 'fedjax_mr[deploy]' in an environment of its own"
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield Finding("flwr is not installed in this environment", remedy)
        return
    if tuple(map(int, found.split(".")[:2])) != FLOWER:
        yield Finding(f"the version of flwr is {found}; this package needs {FLOWER[0]}.{FLOWER[1]}", remedy)


def commands() -> Iterator[Finding]:
    """Check that Flower's commands on the PATH belong to this environment."""
    for name in ("flwr", "flower-superlink", "flower-supernode"):
        found = shutil.which(name)
        if found is None or Path(found).resolve().parent != Path(sys.executable).absolute().parent.resolve():
            yield Finding(
                f"{name} on the PATH is {found or 'missing'}, not the one in the folder of {sys.executable}",
                f"put {Path(sys.executable).parent} first on the PATH, or install fedjax_mr there",
            )


def running(processes: Iterable[Process]) -> Iterator[Finding]:
    """Check that the running programs of Flower were started with safe options."""
    for pid, arguments, variables in processes:
        name = next(Path(each).name for each in arguments if Path(each).name.startswith("flower-"))
        if name == "flower-superlink" and "--disable-runtime-dependency-installation" not in arguments:
            yield Finding(
                f"the SuperLink (process {pid}) installs packages from the internet for every run",
                "start it with --disable-runtime-dependency-installation",
            )
        if name == "flower-supernode" and "--allow-runtime-dependency-installation" in arguments:
            yield Finding(
                f"the SuperNode (process {pid}) installs packages that an app requests",
                "start it without --allow-runtime-dependency-installation",
            )
        if name == "flower-superlink" and _option(arguments, "--host", "127.0.0.1") not in (
            "127.0.0.1",
            "localhost",
            "::1",
        ):
            yield Finding(
                f"anyone who can reach the SuperLink (process {pid}) can run code on every client",
                "start it with --host 127.0.0.1 behind a reverse proxy that only passes /v1/fleet/ (see the docs)",
            )
        if "--insecure" in arguments and not _is_loopback(arguments):
            yield Finding(
                f"{name} (process {pid}) runs without TLS", "start it with certificates instead of --insecure"
            )
        if "--insecure" not in arguments:
            yield from _without_login(name, pid, arguments)
        for option in ("--ssl-keyfile", "--auth-supernode-private-key"):
            yield from _readable(_option(arguments, option, ""))
        if variables is not None:
            for finding in environment(variables):
                yield Finding(
                    f"{name} (process {pid}): {finding.mistake}", f"stop it; {finding.remedy}; start it again"
                )


def _without_login(name: str, pid: int, arguments: Sequence[str]) -> Iterator[Finding]:
    """Check that a program of Flower with TLS also uses node authentication."""
    if name == "flower-superlink" and "--enable-supernode-auth" not in arguments:
        yield Finding(
            f"the SuperLink (process {pid}) accepts any node that can reach it",
            "start it with --enable-supernode-auth, register the nodes' public keys, and make the app with --node_keys",
        )
    if name == "flower-supernode" and not _option(arguments, "--auth-supernode-private-key", ""):
        yield Finding(
            f"the SuperNode (process {pid}) has no key, so another node can take its client's number",
            "make a key (ssh-keygen -t ecdsa -b 384), and start it with --auth-supernode-private-key",
        )


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    for place, each in enumerate(arguments):
        if each == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if each.startswith(f"{name}="):
            return each.partition("=")[2]
    return default


def _is_loopback(arguments: Sequence[str]) -> bool:
    host = _option(arguments, "--superlink", _option(arguments, "--host", "127.0.0.1")).rpartition(":")
    return _is_loopback_host(host[0] or host[2])


def _is_loopback_host(host: str) -> bool:
    return host.strip("[]") in ("127.0.0.1", "localhost", "::1")


def processes() -> list[Process]:
    """The programs of Flower that run on this machine; needs /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
            if not any(Path(each).name in ("flower-superlink", "flower-supernode") for each in arguments[:3]):
                continue
            variables = None
            with contextlib.suppress(PermissionError):
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            found.append(Process(int(folder.name), arguments, variables))
    return found


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


def samples_here(folder: str | None, settings: str) -> Iterator[Finding]:
    """Check the files of samples that are on this machine, the client's against the server's if both are.

    Args:
      folder: folder of the app, or None.
      settings: the settings of a SuperNode, or "".
    """
    server, client = _server_file(folder), Path(_settings(settings).get("data", ""))
    kind = None
    if server is not None and server.is_file():
        try:
            kind = ServerSamples.read(server).facts
        except UserError as error:
            yield Finding(str(error), "write test_x and test_y into it, see docs/recipes/real_clients.md")
    if client.is_file():
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


def private_key(path: str, of: str | None) -> Iterator[Finding]:
    """Check that a private key is valid, that only its owner can read it, and that it matches its certificate.

    Args:
      path: file of the key, in PEM or OpenSSH's format.
      of: file of the certificate, or None for the key of a node (curve P-384).
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        content = Path(path).read_bytes()
        openssh = b"OPENSSH PRIVATE KEY" in content
        read = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
        key: Any = read(content, None)
        public = key.public_key().public_bytes(serialization.Encoding.DER, form)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        yield Finding(f"{path} is not a private key without a password ({error})", "set --private-key to such a file")
        return
    yield from _readable(path)
    if of is None:
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
            yield Finding(f"{path} is not a key for a node, which must be of curve P-384", "ssh-keygen -t ecdsa -b 384")
        return
    with contextlib.suppress(OSError, ValueError):  # reported by `certificate`
        owner = x509.load_pem_x509_certificate(Path(of).read_bytes()).public_key()
        if owner.public_bytes(serialization.Encoding.DER, form) != public:
            yield Finding(f"{path} is not the key of {of}", "use the key with which the certificate was made")


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


def certificate(path: str, host: str, now: datetime.datetime) -> Iterator[Finding]:
    """Check the dates and the host name of a certificate."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        yield Finding(f"{path} is not a certificate ({error})", "set --certificate to a PEM file")
        return
    again = "make a new certificate and start the SuperLink with it"
    if now >= found.not_valid_after_utc:
        yield Finding(f"{path} expired on {found.not_valid_after_utc:%Y-%m-%d}", again)
    elif now + _SOON >= found.not_valid_after_utc:
        yield Finding(f"{path} expires on {found.not_valid_after_utc:%Y-%m-%d}", again)
    if now < found.not_valid_before_utc:
        yield Finding(f"{path} is not valid before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC", "set the clocks")
    names: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        others = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [str(each.value) for each in others]
    if not any(fnmatch.fnmatch(host, name) for name in names):
        kind = "IP" if _is_address(host) else "DNS"
        yield Finding(
            f"{path} is for {', '.join(names) or 'no host'}, not for {host}",
            f"make it with subjectAltName={kind}:{host}",
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def port(host: str, number: int) -> Iterator[Finding]:
    """Check that a port is free."""
    if number not in _PORTS:
        yield Finding(f"--port={number} is not a port", f"use a number from {_PORTS[0]} to {_PORTS[-1]}")
        return
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, number))
        except OSError as error:
            yield Finding(
                f"port {number} of {host} cannot be used ({error.strerror})",
                f"stop the program that uses it (ss -ltnp 'sport = :{number}'), or use another --port",
            )


def superlink(address: str, root_certificates: str | None) -> Iterator[Finding]:
    """Check that the SuperLink can be reached and that its certificate is valid."""
    host, _, number = address.rpartition(":")
    if not host or not number.isdecimal() or int(number) not in _PORTS:
        yield Finding(f"--superlink={address} is not HOST:PORT", "remove https:// and add a port from 1 to 65535")
        return
    try:
        context = ssl.create_default_context(cafile=root_certificates)
    except OSError as error:  # also of a damaged file
        yield Finding(
            f"{root_certificates} is not a certificate ({error.strerror or error})",
            "set --root-certificates to the PEM file of the CA",
        )
        return
    try:
        with socket.create_connection((host.strip("[]"), int(number)), timeout=10) as plain:
            if root_certificates:
                with context.wrap_socket(plain, server_hostname=host.strip("[]")):
                    pass
            elif not _is_loopback_host(host):
                yield Finding(
                    f"messages to {address} can be read and changed on their way",
                    "use TLS: set --root-certificates to the CA, here and for the SuperNode",
                )
            elif _speaks_tls(plain):
                yield Finding(
                    f"{address} requires TLS", "set --root-certificates to the CA, here and for the SuperNode"
                )
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


def _speaks_tls(plain: socket.socket) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(plain):
            return True
    except OSError:
        return False
