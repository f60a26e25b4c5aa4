"""The metrics of a running service, as a scrape reads them, and a real Prometheus that scrapes it.

async with prometheus(tmp_path, {"endpoint": "127.0.0.1:9090"}) as server: ...   # Debian's package of that name
"""

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import yaml
from prometheus_client.parser import text_string_to_metric_families

from orca_local.embedded_pool import keep_port

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
FILES = Path(__file__).parents[1] / "helm/files"
ALERTS, DASHBOARD = FILES / "alerts.yaml", FILES / "dashboard.json"
SCRAPES = 0.5  # seconds between two of one target
RATE = "5m"  # over which a dashboard's rates are taken here: no test lasts longer


def scraped(address: str) -> str:
    """The text of /metrics at a status port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


class Scrape:
    """All samples of some services: those of the same name and labels are added."""

    def __init__(self, *addresses: str) -> None:
        """Scrapes these status ports."""
        self._samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for address in addresses:
            self._add(scraped(address))

    @classmethod
    def of(cls, text: str) -> Self:
        """The samples of a text."""
        made = cls()
        made._add(text)
        return made

    def _add(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                of_name = self._samples.setdefault(sample.name, {})
                labels = tuple(sorted(sample.labels.items()))
                of_name[labels] = of_name.get(labels, 0.0) + sample.value

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels, whatever others they have."""
        found = [value for given, value in self._samples.get(name, {}).items() if labels.items() <= dict(given).items()]
        assert found, f"there is no {name} with {labels}"
        return sum(found)

    def has(self, name: str) -> bool:
        return bool(self._samples.get(name))

    def nonzero(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name that are not 0, by the value of one label."""
        return {dict(given)[label]: value for given, value in self._samples[name].items() if value}


class Prometheus:
    """A server that is ready."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API. Raises AssertionError with the server's sentence."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def ask() -> Any:
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                with error:
                    raise AssertionError(f"{parameters}: {error.read().decode()}") from None

        return await asyncio.to_thread(ask)

    async def query(self, expression: str) -> list[Any]:
        """The samples of an instant query."""
        return (await self.get("query", query=expression))["result"]

    async def until(self, expression: str, seconds: float = 60.0) -> list[Any]:
        """Waits until a query has samples. Raises AssertionError if it has none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not (found := await self.query(expression)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{expression} has no samples") from None
        return found

    async def fires(self, alert: str, seconds: float) -> None:
        """Waits until an alert fires, or has fired since this server began."""
        await self.until(f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1h])', seconds)

    async def clears(self, alert: str, seconds: float) -> None:
        """Waits until an alert neither fires nor is about to."""
        await self.until(f'absent(ALERTS{{alertname="{alert}"}})', seconds)


@asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, str], rules: Path = ALERTS) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes these targets by their jobs, with our rules or those of another file."""
    folder.mkdir()
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [address], "labels": {"namespace": "test"}}]}
        for job, address in targets.items()
    ]
    every = f"{SCRAPES * 1000:.0f}ms"
    config = {
        "global": {"scrape_interval": every, "evaluation_interval": every, "scrape_timeout": every},
        "rule_files": [str(rules)],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with keep_port() as kept:
        address = f"127.0.0.1:{kept.getsockname()[1]}"
        with (folder / "log").open("wb") as log:
            assert PROMETHEUS is not None
            process = await asyncio.create_subprocess_exec(
                PROMETHEUS, *command, f"--web.listen-address={address}", stdout=log, stderr=log
            )
        try:
            await _ready(address, folder / "log", process)
            yield Prometheus(address)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _ready(address: str, log: Path, process: asyncio.subprocess.Process) -> None:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(ready):
            assert process.returncode is None, log.read_text()
            await asyncio.sleep(0.1)


def hurried(rules: str) -> str:
    """Makes a file of rules 60 times as quick: each window and each `for` of a minute lasts a second.

    Everything else stays: expressions, thresholds (30 s in the queue are 30 s), labels.
    """
    read = yaml.safe_load(rules)
    for rule in (rule for group in read["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(\d+[hm])\]", lambda window: f"[{_hurried(window[1])}]", rule["expr"])
        if "for" in rule:
            rule["for"] = _hurried(rule["for"])
    return yaml.safe_dump(read)


def _hurried(time: str) -> str:
    """5m as 5s, 6h as 360s."""
    return f"{int(time[:-1]) * {'m': 1, 'h': 60}[time[-1]]}s"


def alerts() -> dict[str, str]:
    """The expressions of all alerts, by their names."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels() -> Iterator[tuple[str, list[str]]]:
    """The dashboard's panels: their titles, and their queries with its variables filled in."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        expressions = [target["expr"] for target in panel.get("targets", ())]
        if expressions:
            filled = [
                e.replace("$namespace", ".*").replace("$release", ".*").replace("$__rate_interval", RATE)
                for e in expressions
            ]
            assert not any(re.search(r"\$\w", expression) for expression in filled), filled
            yield panel["title"], filled
