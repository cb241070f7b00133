"""docs/status.md names what there is: every metric, every column of the series, every path."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from supervisord_vllm.api import Exporter, HttpServer
from supervisord_vllm.clock import Now
from supervisord_vllm.series import MOST_POINTS, Series
from supervisord_vllm.strain import Strained
from test_api import SNAPSHOT, Daemon

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "status.md").read_text(encoding="utf-8")


def test_every_metric_is_documented_and_no_other() -> None:
    daemon = Daemon()
    daemon.now = replace(SNAPSHOT, strained=Strained(engines=1.7))
    families = {
        family.name + ("_total" if family.type == "counter" else "") for family in Exporter(daemon, "1").collect()
    }
    documented = set(re.findall(r"^\| `(vllm_supervise_[a-z_]+)`", PAGE, re.MULTILINE))
    assert documented == families, "the table in docs/status.md"


def test_every_label_is_documented() -> None:
    daemon = Daemon()
    daemon.now = replace(SNAPSHOT, strained=Strained(engines=1.7))
    for family in Exporter(daemon, "1").collect():
        (row,) = re.findall(rf"^\| `{family.name}(?:_total)?` \|([^|]*)\|", PAGE, re.MULTILINE)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(re.findall(r"`([a-z]+)`", row)), family.name


def test_every_column_of_the_series_is_documented() -> None:
    document = Series(5.0).document("qwen", Now(0, 0.0))
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    names = set(re.findall(r'"([a-z0-9_]+)":', shown))
    assert names == {*document, *document["points"], "number"}
    assert f"at most {MOST_POINTS:,} points" in PAGE


def test_every_path_is_documented(tmp_path: Path) -> None:
    daemon = Daemon()
    server = HttpServer(daemon, Exporter(daemon, "1"), tmp_path / "s", ("127.0.0.1", 0), warn=print)
    paths = {route.resource.canonical for route in server._runner.app.router.routes() if route.resource is not None}
    assert set(re.findall(r"^\| `(/[a-z0-9/]+)`", PAGE, re.MULTILINE)) == paths
