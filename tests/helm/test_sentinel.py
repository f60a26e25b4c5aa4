"""`redis.mode`: a primary with replicas and Sentinels, or one server; and the password of both."""

import os
import subprocess
from pathlib import Path

import pytest
from helm.chart import DEMO, FOLDER, Rendered, main, merged, render, rendered

from orca_pool import redis_url

PLAIN, SECURED = "Sentinels", "Sentinels, Valkey, a password, certificates"
SENTINELS = [f"orca-sentinel-{n}.orca-sentinel" for n in range(3)]


def told(release: Rendered, component: str) -> dict[str, str]:
    return release.environment(component)


def test_services_ask_the_sentinels() -> None:
    for service in ("endpoint", "scheduler"):
        environment = rendered(PLAIN).environment(service)
        url = redis_url.parse(environment["ORCA_REDIS_URL"])
        assert (url.scheme, url.path) == ("redis+sentinel", "orca/0")
        assert url.servers == [(host, 26379) for host in SENTINELS]
        assert environment["ORCA_REDIS_REPLICAS"] == "1", "what a client has seen is on two disks"
        assert "ORCA_REDIS_PASSWORD" not in environment
        secured = rendered(SECURED).environment(service)
        assert secured["ORCA_REDIS_URL"].startswith("rediss+sentinel://")
        assert secured["ORCA_REDIS_PASSWORD"] == "from the cluster"
    release = render(merged(DEMO, {"redis": {"mode": "sentinel"}, "endpoint": {"settings": {"redis_replicas": 2}}}))
    assert release.environment("endpoint")["ORCA_REDIS_REPLICAS"] == "2"


@pytest.mark.parametrize(("option", "servers"), [(PLAIN, 3), (SECURED, 2)])
def test_servers_and_sentinels_have_names_that_stay(option: str, servers: int) -> None:
    release = rendered(option)
    assert release.workloads["redis"]["spec"]["replicas"] == servers
    assert release.workloads["sentinel"]["spec"]["replicas"] == 3
    hosts = [f"orca-redis-{n}" for n in range(servers)]
    for component in ("redis", "sentinel"):
        environment = release.environment(component)
        assert (environment["SERVERS"].split(), environment["SENTINELS"].split()) == (hosts, SENTINELS)
    for host in hosts:
        service = release.one("Service", host)["spec"]
        assert service["publishNotReadyAddresses"] is True
        assert "clusterIP" not in service, "an address that stays while the pod is away"
    headless = release.one("Service", release.workloads["sentinel"]["spec"]["serviceName"])["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)


def test_the_mode_can_change() -> None:
    """These fields cannot be changed in Kubernetes; the first server keeps its claim and its requests."""
    before, after = (render(merged(DEMO, {"redis": {"mode": mode}})) for mode in ("single", "sentinel"))
    for field in ("serviceName", "selector", "volumeClaimTemplates"):
        assert before.workloads["redis"]["spec"][field] == after.workloads["redis"]["spec"][field]
    service = after.one("Service", "orca-redis")
    assert before.one("Service", "orca-redis") == service
    pod = "statefulset.kubernetes.io/pod-name"
    assert service["spec"]["selector"][pod] == "orca-redis-0", "a replica would refuse callers of before the change"
    assert after.environment("redis")["SERVERS"].startswith("orca-redis-0 ")
    assert before.pods["worker"] == after.pods["worker"]


def test_at_most_one_is_away_at_a_time() -> None:
    release = rendered(PLAIN)
    for component in ("redis", "sentinel"):
        budget = release.one("PodDisruptionBudget", f"orca-{component}")["spec"]
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        assert "podAntiAffinity" in release.pods[component]["spec"]["affinity"]
    assert not rendered("nothing but a model").workloads.keys() & {"sentinel"}


def test_a_password_is_asked_for_by_all() -> None:
    release = rendered(SECURED)
    command = main(release.pods["redis"])["command"]
    for setting, value in (("--requirepass", "$(REDISCLI_AUTH)"), ("--masterauth", "$(REDISCLI_AUTH)")):
        assert command[command.index(setting) + 1] == value
    assert len(release.one("Secret", "orca-redis")["data"]["password"]) > 40
    single = rendered("a password of a Secret")
    assert not single.of_kind("Secret")
    for component, variable in (("redis", "REDISCLI_AUTH"), ("endpoint", "ORCA_REDIS_PASSWORD")):
        (entry,) = [entry for entry in main(single.pods[component])["env"] if entry["name"] == variable]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "pool", "key": "word"}
    assert "env" not in main(rendered("nothing but a model").pods["redis"])


def test_sentinels_show_the_certificate_of_redis() -> None:
    release = rendered(SECURED)
    (certificate,) = [c for c in release.of_kind("Certificate") if c["spec"]["secretName"] == "orca-redis-tls"]
    assert {*SENTINELS, "orca-redis-0", "orca-redis-1"} < set(certificate["spec"]["dnsNames"])
    (volume,) = [v for v in release.pods["sentinel"]["spec"]["volumes"] if v["name"] == "tls"]
    assert volume["secret"]["secretName"] == "orca-redis-tls"
    conf = release.one("ConfigMap", "orca-redis")["data"]["sentinel.conf"].splitlines()
    assert {"port 0", "tls-port 26379", "tls-replication yes", "tls-auth-clients yes"} < set(conf)
    assert "sentinel down-after-milliseconds orca 1500" in conf
    assert "valkey-cli --tls" in release.environment("sentinel")["CLI"]


def test_a_change_of_the_scripts_restarts_servers_and_sentinels() -> None:
    scripts = {script.name for script in (FOLDER / "files").glob("*.sh")}
    assert rendered(PLAIN).one("ConfigMap", "orca-redis")["data"].keys() == scripts | {"sentinel.conf"}

    def sums(seconds: float) -> set[str]:
        release = render(merged(DEMO, {"redis": {"mode": "sentinel"}, "sentinel": {"downAfterSeconds": seconds}}))
        pods = (release.pods[name]["metadata"]["annotations"] for name in ("redis", "sentinel"))
        return {annotations["orca.serving/scripts"] for annotations in pods}

    assert len(sums(2)) == 1
    assert sums(2) != sums(3)


def started(ordinal: int, tmp_path: Path, release: str = "serving.orca") -> list[str]:
    """The lines of a Sentinel's file after a start; its volume is the folder `data`."""
    conf = rendered(PLAIN).one("ConfigMap", "orca-redis")["data"]["sentinel.conf"]
    (tmp_path / "sentinel.conf").write_text(conf)
    (data := tmp_path / "data").mkdir(exist_ok=True)
    script = (FOLDER / "files/sentinel-start.sh").read_text()
    script = script.replace("/etc/orca/redis", str(tmp_path)).replace("/data", str(data))
    servers = "orca-redis-0 orca-redis-1"
    told = {"HOST": f"orca-sentinel-{ordinal}", "SERVERS": servers, "RELEASE": release, "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-c", script, "sh", "true"], env=told, check=True)
    return (data / "sentinel.conf").read_text().splitlines()


@pytest.mark.parametrize(("ordinal", "milliseconds"), [(0, 1000), (1, 1200), (2, 1600)])
def test_sentinels_miss_the_primary_one_after_the_other(ordinal: int, milliseconds: int, tmp_path: Path) -> None:
    """Those that miss it at once each vote for themselves: an election that no Sentinel won cost 30 s."""
    written = started(ordinal, tmp_path)
    conf = (tmp_path / "sentinel.conf").read_text()
    assert written[0] == "sentinel monitor orca orca-redis-0 6379 2"
    assert f"sentinel down-after-milliseconds orca {milliseconds}" in written
    assert set(conf.split("\n")) - set(written) <= {"sentinel down-after-milliseconds orca 1000", ""}


def test_a_sentinel_forgets_the_sentinels_of_another_release(tmp_path: Path) -> None:
    """They voted for ever: of four, two were no majority, and streams waited 15.6 s for the next election."""
    known = f"sentinel known-sentinel orca 10.0.0.9 26379 {'7' * 40}"
    learnt = ["sentinel monitor orca orca-redis-1 6379 2", known]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data/sentinel.conf"
    file.write_text("\n".join([*learnt, ""]))
    assert started(0, tmp_path)[:2] == learnt, "a file of before there were names of releases is ours"
    assert started(0, tmp_path)[:2] == learnt
    written = started(0, tmp_path, "elsewhere.orca")
    assert written[0] == "sentinel monitor orca orca-redis-0 6379 2"
    assert known not in written


@pytest.mark.parametrize("script", sorted((FOLDER / "files").glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_of_any_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_notes_name_the_primary_and_all_claims() -> None:
    notes = rendered(PLAIN).notes
    assert "exec orca-sentinel-0 -- redis-cli -p 26379 sentinel get-master-addr-by-name orca" in notes
    assert "delete pvc -l app.kubernetes.io/name=orca,app.kubernetes.io/instance=orca" in notes


@pytest.mark.parametrize(("offset", "lacks"), [(318856, False), (318855, True), (31885, True), (3188561, True)])
def test_a_server_hands_over_when_its_replicas_have_all(offset: int, lacks: bool) -> None:
    replicas = [
        f"slave{n}:ip=orca-redis-{n + 1},port=6379,state=online,offset={at},lag=0,type=replica"
        for n, at in enumerate((318856, offset))
    ]
    lines = [
        "# Replication",
        "role:master",
        "connected_slaves:2",
        *replicas,
        "master_repl_offset:318856",
        "second_repl_offset:-1",
    ]
    script = f'. {FOLDER / "files/primary.sh"}; lacking "$1"'
    assert subprocess.run(["sh", "-u", "-c", script, "sh", "OK\n" + "\r\n".join(lines)], check=False).returncode == (
        0 if lacks else 1
    )
