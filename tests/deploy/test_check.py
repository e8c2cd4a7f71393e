"""Every finding of `deploy check`, and no finding where all is well."""

import contextlib
import os
import socket
import ssl
import threading
from importlib import metadata

import jax
import numpy as np
import pytest

import deployment
from fedjax_mr.deploy import check
from fedjax_mr.deploy.__main__ import divide, new
from fedjax_mr.errors import UserError
from fedjax_mr.secure.envelopes import Identity

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def mistakes(findings):
    return [finding.mistake for finding in findings]


def write(path, *, samples=30, numbers=4, largest=1, **names):
    """A file of samples with labels from 0 to ``largest``; ``names`` renames the arrays."""
    arrays = {"x": np.ones((samples, numbers), np.float32), "y": np.arange(samples) % (largest + 1)}
    np.savez(path, **{names.get(name, name): array for name, array in arrays.items()})
    return path


def test_the_files_of_samples_are_opened(tmp_path, capsys):
    app = tmp_path / "app"
    (tmp_path / "own").mkdir()
    server = write(tmp_path / "own" / "server.npz", x="test_x", y="test_y")
    new([str(app), "--clients=2", "--cohort=2", f"--server_data={server}", "--model=logistic"])
    printed = capsys.readouterr().out
    assert "divide" not in printed  # it would replace the user's own file
    assert "# Each client's terminal; put the path of its own file after data=" in printed
    assert 'client-id=1 data="PATH/OF/CLIENT-1.npz"' in printed and f"{server.parent}/" not in printed
    good = write(tmp_path / "good.npz")
    settings = lambda path: f"client-id=0 data={path} state={tmp_path}"
    assert not [*check.samples_here(str(app), settings(good))]
    for name in ("table.csv", "text.npz"):
        (tmp_path / name).write_text("1,2\n3,4\n")
    beside_the_server = (
        (write(tmp_path / "wide.npz", numbers=5), "[30, 5]"),
        (write(tmp_path / "label.npz", largest=7), "labels from 0 to 1"),
        (tmp_path / "table.csv", "is a table, so the server's file must be one, too"),
    )
    alone = (
        (write(tmp_path / "names.npz", x="samples"), "needs arrays x and y"),
        (tmp_path / "text.npz", "cannot be read"),
    )
    cases = [(str(app), *case) for case in (*beside_the_server, *alone)] + [(None, *case) for case in alone]
    for folder, path, words in cases:
        (line,) = mistakes(check.samples_here(folder, settings(path)))
        assert words in line and path.name in line and "\n" not in line
    write(server)
    (line,) = mistakes(check.samples_here(str(app), ""))
    assert "needs test_x and test_y" in line


def test_no_app_without_the_servers_file(tmp_path):
    missing = tmp_path / "nowhere.npz"
    with pytest.raises(UserError, match=r"nowhere\.npz: there is no such file: create it first"):
        new([str(tmp_path / "app"), "--clients=2", "--cohort=2", f"--server_data={missing}", "--model=logistic"])
    assert not (tmp_path / "app").exists()


def test_a_trial_never_replaces_files(tmp_path):
    server = write(tmp_path / "server.npz", x="test_x", y="test_y")
    before = server.read_bytes()
    with pytest.raises(UserError, match="exists: choose another folder"):
        divide([str(tmp_path), "--clients=2", "--cohort=2"])
    assert server.read_bytes() == before and os.listdir(tmp_path) == ["server.npz"]


@pytest.mark.parametrize("command", [new, divide])
@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_file_in_the_place_of_a_folder_is_one_line(command, folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^cannot write into .*/{folder} \(.*\): choose another folder$"):
        command([str(tmp_path / folder), "--clients=2", "--cohort=2"])


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (QUIET, []),
        ({}, ["telemetry", "updates"]),
        (QUIET | {"FLWR_TELEMETRY_ENABLED": "false"}, ["telemetry"]),  # Flower takes everything but 0 for yes
        (QUIET | {"FLWR_DISABLE_UPDATE_CHECK": "0"}, ["updates"]),
    ],
)
def test_what_flower_tells_its_makers(variables, found):
    lines = mistakes(check.environment(variables))
    assert len(lines) == len(found) and all(word in line for word, line in zip(found, lines, strict=True))


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("1.41.3", ""),
        ("2.0.0", ""),
        ("1.40.0", "the version of flwr is 1.40.0; this package needs 1.41 or newer"),
        (None, "flwr is not"),
    ],
)
def test_flowers_version(monkeypatch, version, found):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    lines = mistakes(check.versions())
    assert lines == [] if not found else found in lines[0]


@pytest.fixture
def folder(tmp_path):
    for client in (3, 4):
        Identity.new(client).write(tmp_path / f"{client}.key")
    (tmp_path / "roster").write_text(Identity.read(tmp_path / "3.key").public.line() + "\n")
    (tmp_path / "mine.npz").touch()
    return tmp_path


GOOD = 'client-id=3 data="{0}/mine.npz" state="{0}/state" key="{0}/3.key" roster="{0}/roster"'


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("", ""), []),
        (("client-id=3", "client-id=three"), ["client-id in the node settings is not a number", "not those in"]),
        (("mine.npz", "yours.npz"), ["yours.npz' is not a file"]),
        (("/state", "/none/state"), ["/none/state' is not a writable folder"]),
        (("3.key", "4.key"), ["this client's keys are not those in its line"]),
        (("3.key", "5.key"), ["5.key"]),
        (("/roster", "/list"), ["cannot read"]),
        (('client-id=3', 'client-id=3 choices="simulated"'), ["the server can compute this client's choices"]),
        (('client-id=3', 'client-id'), ["is not a list of NAME=VALUE"]),
        (('key="', '"'), ["is not a list of NAME=VALUE"]),
    ],
)  # fmt: skip
def test_a_nodes_settings(folder, change, found):
    lines = mistakes(check.node(GOOD.format(folder).replace(*change)))
    assert len(lines) == len(found) and all(word in line for word, line in zip(found, lines, strict=True))


def test_a_clients_number_that_the_app_does_not_have(folder):
    assert not [*check.node(GOOD.format(folder), 4)]
    (finding,) = check.node(GOOD.format(folder), 3)
    assert finding.mistake == "client-id=3 in the node settings, but the app has 3 clients"
    assert finding.remedy == "give each node a different number, from 0 to 2"


def test_private_keys_that_others_can_read(folder):
    (folder / "3.key").chmod(0o644)
    (line,) = mistakes(check.node(GOOD.format(folder)))
    assert "others can read" in line


def test_a_state_folder_that_others_can_look_into(folder):
    (folder / "state").mkdir(mode=0o755)
    (folder / "state").chmod(0o755)
    (finding,) = check.node(GOOD.format(folder))
    assert finding.mistake == f"others can open {folder}/state" and finding.remedy == f"chmod 700 {folder}/state"


@pytest.fixture
def made(tmp_path):
    """What `deploy new` writes."""
    new([str(tmp_path / "fed"), "--clients=4", "--cohort=2", "--dataset=digits"])
    return tmp_path / "fed"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("", ""), None),
        ((f'jax = "{jax.__version__}"', 'jax = "0.1"'), f"jax {jax.__version__} here and 0.1 at the server"),
        (("--clients=4", "--clients=5"), " at the server"),
        (("--clients=4", "--no_flag=4"), "the flags of"),
        (("--attack=none", "--attack=alie"), "attacks are simulated only"),
        (("[tool.fedjax_mr]", "[tool.another]"), "is not an app of this package"),
        (("flags =", "flags"), "is not an app of this package"),
    ],
)
def test_an_app_and_this_machine(made, change, found):
    text = (made / "pyproject.toml").read_text()
    assert change[0] in text
    (made / "pyproject.toml").write_text(text.replace(*change))
    lines = mistakes(check.app(str(made)))
    assert lines == [] if found is None else found in lines[0]


def test_the_links_of_an_app(made):
    assert list(check.channel(str(made))) == []
    path = made / "pyproject.toml"
    for old, changed in (("--compress=none", "--compress=sign"), ("--dp_clip=none", "--dp_clip=0.5")):
        path.write_text(path.read_text().replace(old, changed))
    assert list(check.channel(str(made))) == [
        "--compress=sign: a tensor of 10,000 numbers is sent as 1,254 bytes, not 40,000",
        "--dp_clip=0.5: the change that this client uploads is clipped, without noise; no more bytes",
    ]


def test_an_apps_code_runs_only_if_this_machine_names_it(made, tmp_path):
    code = tmp_path / "server_choice.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = made / "pyproject.toml"
    path.write_text(path.read_text().replace("--import=none", f"--import={code}"))
    for told, found in (
        ("--import=", "this run needs the code of"),
        ("--flagfile=/etc/passwd ", "which clients do not accept"),
    ):
        path.write_text(path.read_text().replace('flags = "', f'flags = "{told if "flag" in told else ""}'))
        (line,) = mistakes(check.app(str(made)))
        assert found in line and not (tmp_path / "ran").exists()


def test_no_app(tmp_path):
    assert "is not an app of this package" in mistakes(check.app(str(tmp_path)))[0]


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A CA and a certificate for 127.0.0.1, of 60 days."""
    folder = tmp_path_factory.mktemp("certificates")
    try:
        deployment.certificates(folder, "127.0.0.1", days=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


@contextlib.contextmanager
def answering(answer, certified=None):
    """The address of a server that gives every request one answer, with TLS if ``certified`` is a folder."""
    context = None
    if certified:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certified / "server.crt", certified / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(one, server_side=True) if context else one as it:
                    it.recv(1000)
                    it.sendall(b"HTTP/1.1 " + answer + b"\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_superlink_with_tls(certified):
    trusted = str(certified / "ca.crt")
    with answering(b"404 Not Found", certified) as address:
        assert list(check.superlink(address, trusted)) == []
        assert mistakes(check.superlink(address, None)) == [f"{address} requires TLS"]
        (line,) = mistakes(check.superlink(address.replace("127.0.0.1", "localhost"), trusted))
        assert "Hostname mismatch" in line
        (line,) = mistakes(check.superlink(address, str(certified / "server.crt")))
        assert "is rejected" in line
    with answering(b"400 The plain HTTP request was sent to HTTPS port") as nginx:
        assert mistakes(check.superlink(nginx, None)) == [f"{nginx} requires TLS"]


def test_a_superlink_without_tls(certified, monkeypatch):
    with answering(b"404 Not Found") as address:
        assert list(check.superlink(address, None)) == []
        (line,) = mistakes(check.superlink(address, str(certified / "ca.crt")))
        assert "does not speak TLS" in line
        monkeypatch.setattr(check, "_LOOPBACK", ())
        first, second = mistakes(check.superlink(address, None))
        assert "can be read and changed on their way" in first and "anyone who can reach" in second


@pytest.mark.parametrize(
    ("answer", "found"), [(b"403 Forbidden", []), (b"404 Not Found", ["run code on every client"])]
)
def test_a_proxy_that_passes_too_much(certified, monkeypatch, answer, found):
    """Flower's other APIs have no login. Flower answers every path; the page's proxy forbids all but the clients'."""
    monkeypatch.setattr(check, "_LOOPBACK", ())
    with answering(answer, certified) as address:
        lines = mistakes(check.superlink(address, str(certified / "ca.crt")))
    assert len(lines) == len(found) and all(words in line for words, line in zip(found, lines, strict=True))


def test_a_superlink_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
    assert "nothing answers" in mistakes(check.superlink(f"127.0.0.1:{number}", None))[0]
    for address in ("127.0.0.1", "https://fed.example.org", "127.0.0.1:99999"):
        assert "is not HOST:PORT" in mistakes(check.superlink(address, None))[0]


def test_the_file_of_the_ca_is_read_first(tmp_path):
    (tmp_path / "damaged").write_text("x")
    for name in ("missing", "damaged"):
        (line,) = mistakes(check.superlink("127.0.0.1:9", str(tmp_path / name)))
        assert f"{name} is not a certificate" in line


def test_the_command_prints_findings_and_remedies(monkeypatch, capsys, made, tmp_path):
    monkeypatch.setattr(check, "versions", lambda: [])
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    check.main([])
    assert capsys.readouterr().out.endswith("\nno problems found\n")
    settings = f"data={write(tmp_path / 'mine.npz')} state={tmp_path / 'state'}"
    for number, found in ((3, "no problems found"), (4, "client-id=4 in the node settings, but the app has 4 clients")):
        with contextlib.suppress(UserError):
            check.main([f"--app={made}", f"--node-config=client-id={number} {settings}"])
        assert capsys.readouterr().out.splitlines()[0] == found
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    with pytest.raises(UserError, match="1 finding on this machine"):
        check.main([])
    assert capsys.readouterr().out.splitlines()[1] == "  -> export FLWR_TELEMETRY_ENABLED=0"


def test_the_command_uses_the_code_that_either_of_two_flags_names(monkeypatch, capsys, made, tmp_path, registries):
    for name in ("environment", "versions"):
        monkeypatch.setattr(check, name, lambda *_: [])
    code, app = tmp_path / "own_network.py", made / "pyproject.toml"
    code.write_text("import fedjax_mr as fmr\nfmr.MODELS['mlp_of_check'] = fmr.MODELS['mlp']\n")
    flags = app.read_text().replace("--import=none", f"--import={code}").replace("cnn_digits", "mlp_of_check")
    app.write_text(flags.replace("--compress=none", "--compress=sign"))
    settings = f"client-id=3 data={write(tmp_path / 'mine.npz')} state={tmp_path / 'state'}"
    for arguments in ([f"--node-config={settings} import={code}"], [f"--node-config={settings}", f"--import={code}"]):
        with contextlib.suppress(UserError):
            check.main([f"--app={made}", *arguments])
        assert "--compress=sign: a tensor of 10,000 numbers is sent as 1,254" in capsys.readouterr().out
