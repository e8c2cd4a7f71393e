"""``python -m fedjax_mr.deploy check``: the usual mistakes around a federation of real clients, and their remedies.

Run it on every machine, in the environment and with the settings with which Flower runs there. What is not told is not
checked: ``--app`` is for all machines, ``--node-config`` and ``--superlink`` for those of clients, ``--certificate``,
``--host`` and ``--port`` for the one with the SuperLink. ``--private-key`` takes the key of a node or of a certificate.
An app's code (``--import``) is not run unless ``--import`` or the node's settings name it here.
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

from fedjax_mr.deploy.facts import common_versions, digest, disagreement, trusted_flags
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.secure.envelopes import Identity, read_roster

FLOWER = (1, 41)
_SOON = datetime.timedelta(days=30)


class Finding(NamedTuple):
    """A mistake and how to mend it, one line each."""

    mistake: str
    remedy: str


class Process(NamedTuple):
    """A running program of Flower."""

    pid: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None  # None: another user's


def main(arguments: Sequence[str]) -> None:
    """Print every finding on this machine.

    Raises:
      UserError: there are some.
    """
    told = _parser().parse_args(arguments)
    findings = [*environment(os.environ), *versions(), *commands(), *running(processes())]
    if told.app:
        findings += app(told.app, told.own_code or _settings(told.node_config or "").get("import", ""))
    if told.node_config is not None:
        findings += node(told.node_config)
    if told.certificate:
        findings += certificate(told.certificate, told.host, datetime.datetime.now(datetime.UTC))
    for path in told.private_key:
        findings += private_key(path, told.certificate)
    if told.port:
        findings += port(told.host, told.port)
    if told.superlink:
        findings += superlink(told.superlink, told.root_certificates)
    for finding in findings:
        print(f"{finding.mistake}\n  -> {finding.remedy}")
    if findings:
        raise UserError(f"{len(findings)} finding{'s' * (len(findings) > 1)} on this machine")
    print("nothing found")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fedjax_mr.deploy check", description=__doc__)
    parser.add_argument("--app", metavar="FOLDER", help="the folder that `deploy new` wrote, or a copy of it")
    parser.add_argument(
        "--import", dest="own_code", default="", metavar="FILE", help="the app's own code, which this machine trusts"
    )
    parser.add_argument("--node-config", metavar="SETTINGS", help="as for flower-supernode")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="where this machine's SuperNode finds the SuperLink")
    parser.add_argument("--root-certificates", metavar="FILE", help="with --superlink: the CA; without it no TLS")
    parser.add_argument("--certificate", metavar="FILE", help="the SuperLink's certificate")
    parser.add_argument(
        "--private-key", action="append", default=[], metavar="FILE", help="of a node or certificate; repeatable"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the name by which SuperNodes call the SuperLink")
    parser.add_argument("--port", type=int, help="a port that is to be free here")
    return parser


# --- What is checked -------------------------------------------------------------------------------------------------


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Find that Flower would report to its makers, or ask them for a newer version."""
    if variables.get("FLWR_TELEMETRY_ENABLED", "1") != "0":
        yield Finding("Flower sends telemetry to flower.ai", "export FLWR_TELEMETRY_ENABLED=0")
    if variables.get("FLWR_DISABLE_UPDATE_CHECK", "").lower() not in ("1", "true", "yes", "on"):
        yield Finding("Flower asks flower.ai for updates", "export FLWR_DISABLE_UPDATE_CHECK=1")


def versions() -> Iterator[Finding]:
    """Find that this environment has another Flower than the one that this package knows."""
    remedy = "pip install -c constraints-deploy.txt 'fedjax_mr[deploy]' in an environment of its own"
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield Finding("flwr is not installed beside fedjax_mr", remedy)
        return
    if tuple(map(int, found.split(".")[:2])) != FLOWER:
        yield Finding(f"flwr is {found}, and this package knows {FLOWER[0]}.{FLOWER[1]}", remedy)


def commands() -> Iterator[Finding]:
    """Find that Flower's commands on the path are of an environment without this package."""
    for name in ("flwr", "flower-superlink", "flower-supernode"):
        found = shutil.which(name)
        if found is None or Path(found).resolve().parent != Path(sys.executable).absolute().parent.resolve():
            yield Finding(
                f"{name} on the PATH is {found or 'nowhere'}, not the one beside {sys.executable}",
                f"put {Path(sys.executable).parent} first on the PATH, or install fedjax_mr there",
            )


def running(processes: Iterable[Process]) -> Iterator[Finding]:
    """Find that a program of Flower that runs here was started without what keeps it safe."""
    for pid, arguments, variables in processes:
        name = next(Path(each).name for each in arguments if Path(each).name.startswith("flower-"))
        if name == "flower-superlink" and "--disable-runtime-dependency-installation" not in arguments:
            yield Finding(
                f"the SuperLink (process {pid}) installs packages from the internet for every run",
                "start it with --disable-runtime-dependency-installation",
            )
        if name == "flower-supernode" and "--allow-runtime-dependency-installation" in arguments:
            yield Finding(
                f"the SuperNode (process {pid}) installs packages that an app names",
                "start it without --allow-runtime-dependency-installation",
            )
        if name == "flower-superlink" and _told(arguments, "--host", "127.0.0.1") not in (
            "127.0.0.1",
            "localhost",
            "::1",
        ):
            yield Finding(
                f"everybody who reaches the SuperLink (process {pid}) can run code on every client",
                "start it with --host 127.0.0.1 behind a reverse proxy that passes /v1/fleet/ alone (docs)",
            )
        if "--insecure" in arguments and not _is_loopback(arguments):
            yield Finding(
                f"{name} (process {pid}) talks without TLS", "start it with certificates in place of --insecure"
            )
        if "--insecure" not in arguments:
            yield from _without_login(name, pid, arguments)
        for option in ("--ssl-keyfile", "--auth-supernode-private-key"):
            yield from _readable(_told(arguments, option, ""))
        if variables is not None:
            for finding in environment(variables):
                yield Finding(
                    f"{name} (process {pid}): {finding.mistake}", f"stop it; {finding.remedy}; start it again"
                )


def _without_login(name: str, pid: int, arguments: Sequence[str]) -> Iterator[Finding]:
    """Find that a program of Flower that uses TLS does without the keys of nodes."""
    if name == "flower-superlink" and "--enable-supernode-auth" not in arguments:
        yield Finding(
            f"the SuperLink (process {pid}) takes every node that reaches it",
            "start it with --enable-supernode-auth, register the nodes' public keys, and make the app with --node_keys",
        )
    if name == "flower-supernode" and not _told(arguments, "--auth-supernode-private-key", ""):
        yield Finding(
            f"the SuperNode (process {pid}) has no key of its own, so another node can take its client's number",
            "make a key (ssh-keygen -t ecdsa -b 384), and start it with --auth-supernode-private-key",
        )


def _told(arguments: Sequence[str], name: str, default: str) -> str:
    for place, each in enumerate(arguments):
        if each == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if each.startswith(f"{name}="):
            return each.partition("=")[2]
    return default


def _is_loopback(arguments: Sequence[str]) -> bool:
    host = _told(arguments, "--superlink", _told(arguments, "--host", "127.0.0.1")).rpartition(":")
    return _is_loopback_host(host[0] or host[2])


def _is_loopback_host(host: str) -> bool:
    return host.strip("[]") in ("127.0.0.1", "localhost", "::1")


def processes() -> list[Process]:
    """Return the programs of Flower that run on this machine, where the system tells."""
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


def node(settings: str) -> Iterator[Finding]:
    """Find what is wrong with the settings of a SuperNode: its client's number and files."""
    told = _settings(settings)
    if not told:
        yield Finding(f"--node-config={settings!r} is no list of NAME=VALUE", "separate them by spaces, quote texts")
        return
    if not told.get("client-id", "").isdecimal():
        yield Finding("client-id among the node's settings is no number", "give every node another one, from 0")
    if not Path(told.get("data", "")).is_file():
        yield Finding(f"data={told.get('data', '')!r} is no file", "let data be the path of the client's own samples")
    state = Path(told.get("state", ""))
    if not told.get("state") or not os.access(state if state.exists() else state.parent, os.W_OK):
        yield Finding(
            f"state={told.get('state', '')!r} is no folder to write in", "let state be a folder of this client"
        )
    yield from _readable(told.get("state", ""))
    if "key" in told or "roster" in told:
        try:
            me, roster = Identity.read(told.get("key", "")), read_roster(told.get("roster", ""))
        except UserError as error:
            yield Finding(str(error), "make keys with `deploy keys`, and gather everybody's lines in the roster")
            return
        if roster.get(me.client) != me.public or str(me.client) != told.get("client-id"):
            yield Finding(
                "this client's keys are not those of its line in the roster", "get the operators' newest roster"
            )
        yield from _readable(told["key"])
    if told.get("choices") == "simulated":
        yield Finding("the server can compute this client's choices (choices=simulated)", "leave choices out")


def _settings(text: str) -> dict[str, str]:
    """Return the settings of a node by name; none if they are malformed."""
    try:
        return dict(pair.split("=", 1) for pair in shlex.split(text))
    except ValueError:
        return {}


def _readable(path: str) -> Iterator[Finding]:
    """Find that others can read what only its owner should; "" is nothing."""
    with contextlib.suppress(OSError):  # of another user, or gone: not to be seen from here
        if path and Path(path).stat().st_mode & 0o077:
            kind, mode = ("look into", 700) if Path(path).is_dir() else ("read", 600)
            yield Finding(f"others can {kind} {path}", f"chmod {mode} {shlex.quote(path)}")


def private_key(path: str, of: str | None) -> Iterator[Finding]:
    """Find that a private key is none, can be read by others, or is not the one of a certificate.

    Args:
      path: of the key, in PEM or OpenSSH's form.
      of: the certificate; None: the key is a node's, which is one of P-384.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        content = Path(path).read_bytes()
        openssh = b"OPENSSH PRIVATE KEY" in content
        read = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
        key: Any = read(content, None)
        public = key.public_key().public_bytes(serialization.Encoding.DER, form)
    except (OSError, ValueError, TypeError) as error:  # TypeError: it has a password
        yield Finding(f"{path} is no private key without a password ({error})", "let --private-key be a key's file")
        return
    yield from _readable(path)
    if of is None:
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
            yield Finding(f"{path} is no key that a node can have", "ssh-keygen -t ecdsa -b 384")
        return
    with contextlib.suppress(OSError, ValueError):  # `certificate` says so
        owner = x509.load_pem_x509_certificate(Path(of).read_bytes()).public_key()
        if owner.public_bytes(serialization.Encoding.DER, form) != public:
            yield Finding(f"{path} is not the key of {of}", "give the key with which the certificate was made")


def app(folder: str, own_code: str = "") -> Iterator[Finding]:
    """Find that an app is damaged, or that this machine has other versions or reads its flags differently.

    Args:
      folder: of the app.
      own_code: files and modules of ``--import`` that may run here.
    """
    path = Path(folder) / "pyproject.toml"
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]
        flags, agreed = told["flwr"]["app"]["config"]["flags"], dict(told["fedjax_mr"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(f"{path} is no app of this package ({error})", "copy the folder that `deploy new` wrote")
        return
    try:
        ours = {"settings": digest(configuration.parse(trusted_flags(flags, own_code))), **common_versions()}
    except UserError as error:
        yield Finding(f"the flags of {path} do not fit here: {error}", "install the server's version and files")
        return
    if difference := disagreement(ours, agreed):
        yield Finding(difference, "pip install the server's versions here; files of --import have to be the same")


def certificate(path: str, host: str, now: datetime.datetime) -> Iterator[Finding]:
    """Find that a certificate is over, not yet valid, about to end, or of another host."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        yield Finding(f"{path} is no certificate ({error})", "let --certificate be a PEM file")
        return
    again = "make a new certificate and start the SuperLink with it"
    if now >= found.not_valid_after_utc:
        yield Finding(f"{path} was valid until {found.not_valid_after_utc:%Y-%m-%d}", again)
    elif now + _SOON >= found.not_valid_after_utc:
        yield Finding(f"{path} is valid until {found.not_valid_after_utc:%Y-%m-%d} only", again)
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
    """Find that a port is taken."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, number))
        except OSError as error:
            yield Finding(
                f"port {number} of {host} cannot be used ({error.strerror})",
                f"end what uses it (ss -ltnp 'sport = :{number}'), or give another --port",
            )


def superlink(address: str, root_certificates: str | None) -> Iterator[Finding]:
    """Find that the SuperLink is out of reach, or not the one that the certificates are for."""
    host, _, number = address.rpartition(":")
    if not host or not number.isdecimal():
        yield Finding(f"--superlink={address} is no HOST:PORT", "leave out https:// and give the port")
        return
    try:
        with socket.create_connection((host.strip("[]"), int(number)), timeout=10) as plain:
            if root_certificates:
                context = ssl.create_default_context(cafile=root_certificates)
                with context.wrap_socket(plain, server_hostname=host.strip("[]")):
                    pass
            elif not _is_loopback_host(host):
                yield Finding(
                    f"what goes to {address} can be read and changed on its way",
                    "use TLS: give --root-certificates with the CA, here and to the SuperNode",
                )
            elif _speaks_tls(plain):
                yield Finding(f"{address} wants TLS", "give --root-certificates with the CA, here and to the SuperNode")
    except ssl.SSLCertVerificationError as error:
        yield Finding(
            f"the certificate of {address} does not pass: {error.verify_message}",
            f"check {root_certificates} against the SuperLink's CA, the host name and the dates",
        )
    except ssl.SSLError as error:
        yield Finding(f"{address} does not speak TLS ({error.reason})", "start the SuperLink with its --ssl- options")
    except OSError as error:
        yield Finding(
            f"nothing answers at {address} ({error.strerror or error})",
            "start the SuperLink and its proxy, and open the port in the firewalls between",
        )


def _speaks_tls(plain: socket.socket) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(plain):
            return True
    except OSError:
        return False
