"""The metrics of a running service, as a scrape reads them."""

import shutil
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")

Values = dict[tuple[str, ...], float]


def scraped(address: str) -> str:
    """The text of /metrics at a status port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


class Scrape:
    """All samples of some services: those of the same name and labels are added."""

    def __init__(self, *addresses: str) -> None:
        self._samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for address in addresses:
            for family in text_string_to_metric_families(scraped(address)):
                for sample in family.samples:
                    of_name = self._samples.setdefault(sample.name, {})
                    labels = tuple(sorted(sample.labels.items()))
                    of_name[labels] = of_name.get(labels, 0.0) + sample.value

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels, whatever others they have."""
        found = [value for given, value in self._samples.get(name, {}).items() if labels.items() <= dict(given).items()]
        assert found, f"there is no {name} with {labels}"
        return sum(found)

    def nonzero(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name that are not 0, by the value of one label."""
        return {dict(given)[label]: value for given, value in self._samples[name].items() if value}
