"""NetworkPolicies are on in the whole suite. A foreign pod reaches the doors of the endpoint, and nothing else."""

import json

from pauses import Pauses
from traffic import Under

from release import GRPC, STATUS, SUPERVISOR, Release, foreign_pod

HTTP, RANKS, REDIS, OTLP, QUERIES = 8000, range(50100, 50102), 6379, 4317, 16686

# Runs in the foreign pod. Prints which of the addresses in its argument take a connection.
TRY = """
import concurrent.futures, json, socket, sys
def reached(address):
    try:
        socket.create_connection(address, timeout=4).close()
        return True
    except OSError:
        return False
addresses = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(32) as threads:
    print(json.dumps([a for a, yes in zip(addresses, threads.map(reached, addresses)) if yes]))
"""


async def test_a_foreign_pod_reaches_the_doors_alone(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """It tries every port of every pod, also while streams run."""
    pods = await orca.pods()
    ports = {
        "endpoint": [GRPC, HTTP, STATUS],
        "scheduler": [STATUS],
        "worker": [SUPERVISOR, *RANKS, STATUS],
        "redis": [REDIS],
        "jaeger": [OTLP, QUERIES],
    }
    everything = [[pod.address, port] for pod in pods for port in ports[pod.component]]
    doors = [[pod.address, port] for pod in pods if pod.component == "endpoint" for port in (GRPC, HTTP)]
    # The Services too: a policy sees the pod behind them.
    everything += [
        [orca.host(), GRPC],
        [orca.host(), HTTP],
        [orca.host("redis"), REDIS],
        [orca.host("jaeger"), QUERIES],
    ]
    doors += [[orca.host(), GRPC], [orca.host(), HTTP]]
    async with foreign_pod(orca.cluster, "stranger") as stranger, traffic(orca) as load:
        async with load.disturbed("a foreign pod tries every port of every pod") as seen:
            said = await orca.cluster.execute(stranger, "python3", "-c", TRY, json.dumps(everything))
            await load.flows()
        pauses(seen)
    assert sorted(json.loads(said)) == sorted(doors)
