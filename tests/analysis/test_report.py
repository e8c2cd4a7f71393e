"""The page is one file without another host, and its content are the numbers of the runs."""

import html.parser
import json
import re
import shutil
import subprocess
import threading
import typing
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedjax_mr.analysis import live, report
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config.config import Config

LIBRARY = report.library


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A short text in the place of plotly.js, except in tests that need it."""
    monkeypatch.setattr(report, "library", lambda: "/* plotly */")


def content(path):
    text = Path(path).read_text(encoding="utf-8")
    (found,) = re.findall(r'<script id="content" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


@pytest.fixture
def kept(keep):
    for seed in range(4):
        keep(Config(strategy="fedavg", seed=seed), [0.4, 0.5 + 0.001 * seed])
        keep(Config(strategy="fedmr", seed=seed, lr=0.1), [0.5, 0.6 + 0.002 * seed])


def test_a_sweep(kept, capsys):
    assert main(["report", "runs"]) == 0
    assert capsys.readouterr().out == "written to runs/report.html\n"
    found = content("runs/report.html")
    assert found["verdict"][0].startswith("FedMR, learning rate 0.1 is better than FedAvg, learning rate 0.05: +")
    avg, mr = found["curves"]
    assert (avg["name"], mr["name"]) == ("FedAvg, learning rate 0.05", "FedMR, learning rate 0.1")
    assert [seed["seed"] for seed in mr["seeds"]] == [0, 1, 2, 3]
    assert mr["seeds"][3]["values"]["accuracy"] == [0.5, 0.606] and mr["seeds"][3]["values"]["bytes"] == [150, 300]
    assert found["first"] == "accuracy" == found["columns"][0] and found["x"] == ["round", "bytes"]
    (settings,) = (table for table in found["tables"] if table["title"] == "Settings that differ")
    assert ["lr", "0.05", "0.1"] in settings["rows"]
    first = found["links"][0]
    assert {"name": "config.json", "href": f"{first['name']}/config.json"} in first["files"]
    main(["report", "runs"])
    assert content("runs/report.html") == found  # the same bytes again: no date, no random number


def test_the_page_needs_no_other_host(kept):
    main(["report", "runs"])
    text = Path("runs/report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text) and "@import" not in text
    assert "default-src 'none'" in text


def test_names_cannot_become_html(keep):
    folder = keep(Config(strategy="fedavg"), [0.5])
    folder.rename(folder.with_name("<img src=x onerror=alert(1)>"))
    Path("runs").rename("<b>")
    assert main(["report", "<b>"]) == 0
    text = Path("<b>/report.html").read_text(encoding="utf-8")
    assert "<img" not in text and "<b>" not in text

    class Parser(html.parser.HTMLParser):
        tags: typing.ClassVar[list[str]] = []

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)

    parser = Parser()
    parser.feed(text)
    assert "img" not in parser.tags and parser.tags.count("script") == 3


def test_a_what_if(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("what").mkdir()
    Path("what/contributions.csv").write_text(
        "client,name,samples,metric,rule,mean,std,seeds\n0,a,5,accuracy,shapley,0.1,0.01,2\n1,b,5,accuracy,shapley,0.25,,2\n"
        "0,a,5,local loss,local_loss,12,,2\n1,b,5,local loss,local_loss,9,,2\n"  # another unit: no bars
    )
    assert main(["report", "what"]) == 0
    found = content("what/report.html")
    assert found["verdict"] == ["Client b contributes most to the test accuracy (shapley: +0.2500)"]
    assert found["bars"] == [{"name": "shapley", "x": ["a", "b"], "y": [0.1, 0.25], "deviations": [0.01, 0.0]}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nothing"], "nothing"), (["runs", "--out=page.txt"], "must be a file that ends in .html"),
     (["runs", "--out=runs/report.html/x.html"], "cannot write")],
)  # fmt: skip
def test_refusals_are_one_line(kept, capsys, arguments, words):
    main(["report", "runs"])
    capsys.readouterr()
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_without_plotly_it_says_what_to_install(kept, capsys, monkeypatch):
    monkeypatch.setattr(report, "library", LIBRARY)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert main(["report", "nothing"]) == 2
    assert "pip install 'fedjax_mr[report]'" in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_it_draws_in_chromium(kept, monkeypatch):
    """The scripts run without an error, and the curves, the tables and the verdict are there."""
    pytest.importorskip("plotly")
    monkeypatch.setattr(report, "library", LIBRARY)
    assert main(["report", "runs"]) == 0
    page = Path("runs/report.html").absolute()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=180)
    shown = done.stdout
    assert shown.count('class="scatterlayer') >= 1 and "Copy as CSV" in shown
    assert shown.count("<tbody><tr>") >= 2 and "better than" in shown
    assert "Uncaught" not in done.stderr and "Refused to" not in done.stderr


def test_a_live_page_follows_its_runs_and_answers_this_machine_only(keep):
    folder = keep(Config(strategy="fedavg"), [0.4])
    server = live.server_of(lambda: report.page([folder], folder), lambda content: report.filled(content, ""))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def get(path, **headers):
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:
            return answer.read().decode()

    accuracies = lambda text: json.loads(text)["curves"][0]["seeds"][0]["values"]["accuracy"]
    try:
        assert accuracies(get(live.CONTENT)) == [0.4] and '"live":"/content.json"' in get("/")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"round": 10, "accuracy": 0.6, "loss": 1.0, "bytes_down": 100, "bytes_up": 200}\n')
        assert accuracies(get(live.CONTENT)) == [0.4, 0.6]
        for path, headers, code in (("/config.json", {}, 404), ("/", {"Host": "elsewhere"}, 403)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(path, **headers)
            assert refused.value.code == code
            refused.value.close()
        shutil.rmtree(folder)
        (reason,) = json.loads(get(live.CONTENT))["verdict"]
        assert "is not a run folder" in reason
    finally:
        server.shutdown()
        server.server_close()


def test_a_live_page_of_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "absent", "--live"]) == 2
    assert capsys.readouterr().err == "fedjax-mr: there is no absent\n"


def test_the_confusion_of_the_seeds_and_the_partition(keep):
    for seed, counts in enumerate([[[3, 1], [0, 0]], [[4, 0], [0, 0]]]):
        folder = keep(Config(strategy="fedavg", seed=seed), [0.5])
        (folder / "summary.json").write_text(json.dumps({"confusion": counts}))
        (folder / "partition.png").write_bytes(b"picture")
    assert main(["report", "runs"]) == 0
    found = content("runs/report.html")
    assert found["matrices"] == [{"name": "FedAvg", "shares": [[0.875, 0.125], [0.0, 0.0]]}]
    assert found["pictures"][0]["source"] == "data:image/png;base64,cGljdHVyZQ=="
