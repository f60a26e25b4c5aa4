"""`redis.mode`: a primary with replicas and Sentinels, or one server; and the password of both."""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from helm.chart import DEMO, FOLDER, Rendered, main, merged, render, rendered
from redis import Redis
from replicated import Replicated, sentinel, server, until

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


def test_a_server_that_could_not_hand_over_stops_at_once() -> None:
    """Valkey holds up writes until its replicas have acknowledged all, which they do once a second."""
    command = main(rendered(PLAIN).pods["redis"])["command"]
    assert command[command.index("--shutdown-timeout") + 1] == "0"
    assert "--shutdown-timeout" not in main(rendered("nothing but a model").pods["redis"])["command"]


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


# For the scripts, their part of redis-cli: [-h HOST] [-p PORT] [COMMAND...]; without a command, the lines of its input.
# PRIMARY: the port of the server beside it. PORTS, REPLICAS: those of the hosts sentinel-0, replica-0 and so on.
CLI = r"""
host=primary port=$PRIMARY ports=($PORTS) replicas=(${REPLICAS-})
while getopts h:p: option; do
  case $option in h) host=$OPTARG ;; p) port=$OPTARG ;; esac
done
shift $((OPTIND - 1))
case $host in sentinel-*) port=${ports[${host#sentinel-}]} ;; replica-*) port=${replicas[${host#replica-}]} ;; esac
exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
reply() {
  local line text n
  IFS= read -r line <&3
  line=${line%$'\r'}
  case $line in
    \$*) IFS= read -r -N $((${line#\$} + 2)) text <&3; printf '%s\n' "${text%$'\r\n'}" ;;
    \**) for ((n = 0; n < ${line#\*}; n++)); do reply; done ;;
    *) printf '%s\n' "${line:1}" ;;
  esac
}
ask() {
  printf '%s\r\n' "$*" >&3
  reply
}
if [ $# -gt 0 ]; then ask "$@"; else while read -r line; do ask $line; done; fi
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Variables of the scripts in tmp_path, where a server runs them, for processes of this machine."""
    for script in (FOLDER / "files").glob("*.sh"):
        text = script.read_text().replace("/tmp/", f"{tmp_path}/").replace("/etc/orca/redis", str(tmp_path))
        text = text.replace(">/proc/1/fd/1", f">>{tmp_path}/log")
        (tmp_path / script.name).write_text(text)
    (tmp_path / "cli").write_text(CLI)
    return {
        "CLI": f"bash {tmp_path / 'cli'}",
        "PATH": os.environ["PATH"],
        "HOST": "orca-redis-0",
        "SERVERS": "orca-redis-0",
        "SENTINELS": "sentinel-0 sentinel-1 sentinel-2",
    }


@pytest.fixture
def busybox(tmp_path: Path) -> str:
    """A PATH where what was late has ended by a signal, as in images without coreutils."""
    (folder := tmp_path / "bin").mkdir()
    program = folder / "timeout"
    program.write_text(
        f'#!/bin/sh\n{shutil.which("timeout")} "$@"\ncode=$?\n[ $code -ne 124 ] || exit 143\nexit $code\n'
    )
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_replicas_are_asked_for_what_they_have(variables: dict[str, str], busybox: str, tmp_path: Path) -> None:
    """The acknowledgement that answers a question is behind this question, until the next one comes within a second.

    Writes are stopped meanwhile, and a pod that is deleted without grace has a second for all.
    """
    scripts = tmp_path / "patient.sh", tmp_path / "primary.sh"
    # On a busy machine an answer may take longer than 0.3 s.
    scripts[0].write_text(scripts[1].read_text().replace("timeout 0.3", "timeout 60"))

    def follow(written: int, *acknowledged: tuple[int, int], script: Path = scripts[0]) -> int:
        """The script's answer for a server that has written this much. acknowledged: the port and bytes of replicas."""
        replicas = [
            f"slave{n}:ip=127.0.0.1,port={port},state=online,offset={offset},lag=0,type=replica"
            for n, (port, offset) in enumerate(acknowledged)
        ]
        syncs = "slave9:ip=127.0.0.1,port=1,state=send_bulk,offset=0,lag=0,type=replica"
        lines = ["# Replication", "role:master", *replicas, syncs, f"master_repl_offset:{written}", "repl_backlog:1"]
        asked = ["sh", "-u", "-c", f'. {script}; following "$1"', "sh", "OK\n" + "\r\n".join(lines)]
        return subprocess.run(asked, env=variables, check=False).returncode

    everyone, some, no_replica = range(3)
    with server(tmp_path / "primary") as primary, server(tmp_path / "replica", *primary.as_replica) as replica:
        replica.wait_for_primary()
        with Redis(port=primary.port) as client:
            client.set("a", 100 * "b")
        until(lambda: replica.replication()["slave_repl_offset"] > 100, replica.seen)
        port, has = replica.port, replica.replication()["slave_repl_offset"]
        assert follow(has, (port, has - 37), (1, has)) == everyone
        assert follow(has, (port, has - 37), (1, has - 37)) == some
        assert follow(has + 10**6, (port, has), (1, has + 10**6)) == some
        assert follow(has + 10**6, (port, has)) == no_replica
        assert follow(has) == follow(0) == no_replica
        replica.send_signal(signal.SIGSTOP)
        for variables["PATH"] in (os.environ["PATH"], busybox):
            assert follow(has, (1, has), (port, has - 37), script=scripts[1]) == no_replica


def test_writes_go_on_where_no_replica_may_take_over(variables: dict[str, str], tmp_path: Path) -> None:
    with ExitStack() as servers:
        primary = servers.enter_context(server(tmp_path / "primary"))
        options = (*primary.as_replica, "--replica-priority", "0")
        replica = servers.enter_context(server(tmp_path / "replica", *options))
        port = servers.enter_context(sentinel(tmp_path / "sentinel", primary.port))
        replica.wait_for_primary()
        told = variables | {"PRIMARY": str(primary.port), "PORTS": str(port), "SENTINELS": "sentinel-0"}
        subprocess.run(["sh", f"{tmp_path}/redis-stop.sh"], env=told, check=True)
        with Redis(port=primary.port) as client:
            assert client.info("clients")["paused_reason"] == "none"
        assert "could not hand over by sentinel-0" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_writes_wait_for_a_handover_alone(variables: dict[str, str], tmp_path: Path, frozen: bool) -> None:
    """A replica that does not answer may lack something: the server is not handed over, and writes go on."""
    with ExitStack() as servers:
        redis = Replicated(tmp_path, servers, replicas=2)
        until(redis.whole, redis.seen)
        old, (replica, other) = redis.primary, redis.replicas
        if frozen:
            replica.send_signal(signal.SIGSTOP)
        with Redis(port=old.port) as client:
            client.set("before", 1)
            client.execute_command("WAITAOF", 1, 1, 0)
            told = variables | {"PRIMARY": str(old.port), "PORTS": " ".join(map(str, redis.sentinels))}
            subprocess.run(["sh", f"{tmp_path}/redis-stop.sh"], env=told, check=True)
            if frozen:
                assert client.info("clients")["paused_reason"] == "none", "a write would end this pause only by waiting"
                client.set("after", 1)
                assert old.replication()["role"] == "master"
                assert "could not hand over by sentinel-2" in (tmp_path / "log").read_text()
                return
        until(redis.taken_over, redis.seen)
        (new,) = [one for one in (replica, other) if one.replication()["role"] == "master"]
        with Redis(port=new.port) as client:
            assert client.get("before") == b"1"


@pytest.mark.slow
def test_a_replica_that_was_just_started_is_waited_for(variables: dict[str, str], tmp_path: Path) -> None:
    """The other one would be a primary without a replica, and what clients see waits for a replica.

    A restart of all servers deletes the primary's pod as soon as the replica before it answers.
    """
    with ExitStack() as servers:
        redis = Replicated(tmp_path, servers, replicas=2)
        until(redis.whole, redis.seen)
        old, replicas, log = redis.primary, redis.replicas, tmp_path / "log"
        ports = {"PORTS": redis.sentinels, "REPLICAS": [one.port for one in replicas]}
        told = {name: " ".join(map(str, numbers)) for name, numbers in ports.items()}
        told |= {"PRIMARY": str(old.port), "SERVERS": "orca-redis-0 replica-0 replica-1"}
        with Redis(port=replicas[1].port) as started:
            started.execute_command("REPLICAOF", "127.0.0.1", 1)  # no server is there: it follows none yet
            until(lambda: replicas[1].replication()["master_link_status"] == "down", replicas[1].seen)
            hook = subprocess.Popen(["sh", f"{tmp_path}/redis-stop.sh"], env=variables | told)
            said = lambda: log.read_text() if log.exists() else ""  # noqa: E731
            until(lambda: said() != "" or hook.poll() is not None, said)
            assert log.read_text() == "orca-redis-0 waits for replica-1\n"
            with Redis(port=old.port) as client:
                assert client.info("clients")["paused_reason"] == "none"
            started.execute_command("REPLICAOF", "127.0.0.1", old.port)
        assert hook.wait() == 0
        until(redis.taken_over, redis.seen)
