"""A fresh installation: it comes up, tells the truth about itself, and answers with the right tokens."""

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from cluster import until
from jaeger import follow
from reference import Known
from stacks import running

from orca_client import AsyncOrcaClient
from orca_local.stack import DEMO_MODEL
from release import GRPC, JAEGER, REGISTRY, TAG, Release, run_pod

# What a pod of the cluster runs. Its arguments: a target, and the request as JSON.
CALL = """
import json, sys
from orca_client import OrcaClient
prompt, count = json.loads(sys.argv[2])
with OrcaClient(sys.argv[1]) as client:
    stream = client.generate(prompt, max_new_tokens=count, ignore_eos=True)
    stream.text()
    print(json.dumps([token.token_id for token in stream.tokens]))
"""


@pytest.mark.ci
async def test_all_pods_come_up_and_none_restarts(orca: Release) -> None:
    pods = await orca.pods()
    components = [pod.component for pod in pods]
    wanted = {"endpoint": 2, "scheduler": 2, "worker": 2, "redis": 1, "jaeger": JAEGER}
    assert {name: components.count(name) for name in wanted} == wanted
    assert all(pod.ready for pod in pods)
    assert {pod.name: pod.restarts for pod in pods if pod.restarts} == {}


@pytest.mark.ci
async def test_helm_test(orca: Release) -> None:
    said = await orca.cluster.helm("test", orca.name, "--timeout", "120s")
    assert "Phase:          Succeeded" in said


@pytest.mark.ci
async def test_tokens_are_those_of_one_machine(orca: Release, known: list[Known], tmp_path: Path) -> None:
    """`orca serve` here, Generate from this machine, and Generate from a pod give the same tokens."""
    prompts = known[:3]
    async with running(tmp_path / "run", DEMO_MODEL) as stack:
        assert [await stack.tokens(prompt, len(tokens)) for prompt, tokens in prompts] == [k.tokens for k in prompts]
    async with orca.client() as client:
        assert await asyncio.gather(*(tokens_of(client, k) for k in prompts)) == [k.tokens for k in prompts]
    assert await tokens_in_a_pod(orca, prompts[0]) == prompts[0].tokens


async def tokens_of(client: AsyncOrcaClient, known: Known) -> list[int]:
    stream = client.generate(known.prompt, max_new_tokens=len(known.tokens), ignore_eos=True)
    await stream.text()
    return [token.token_id for token in stream.tokens]


async def tokens_in_a_pod(orca: Release, known: Known) -> list[int]:
    """The tokens that the client library gets in a pod, through the Service."""
    kubectl, target = orca.cluster.kubectl, f"{orca.host()}:{GRPC}"
    request = json.dumps([known.prompt, len(known.tokens)])
    await run_pod(orca.cluster, "caller", f"{REGISTRY}/orca-endpoint:{TAG}", "python", "-c", CALL, target, request)
    try:
        await kubectl("wait", "pod/caller", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
        return json.loads(await kubectl("logs", "caller"))
    finally:
        await kubectl("delete", "pod", "caller", "--grace-period=0", "--force")


@pytest.mark.ci
async def test_a_request_is_found_in_jaeger(orca: Release) -> None:
    """The client's traceparent leads to the spans of endpoint, scheduler and every rank."""
    if not JAEGER:
        pytest.skip("JAEGER=false")
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    async with orca.client(metadata=[("traceparent", f"00-{trace}-{parent}-01")]) as client:
        await client.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True).text()
    query = f"http://{orca.host('jaeger')}:16686"
    ranks = {(stage, tensor_rank) for stage in range(2) for tensor_rank in range(2)}
    followed = await asyncio.to_thread(follow, query, trace, ranks, iterations=5, parent=parent, seconds=60.0)
    pods = {str(span.resource["service.instance.id"]).partition("/")[0] for span in followed.spans}
    assert {f"{orca.name}-worker-0", f"{orca.name}-worker-1"} < pods


async def test_probes_say_what_is(orca: Release) -> None:
    """Everything lives from its start on. A worker is ready while its ranks are members of a formed engine."""
    scale = ("scale", "statefulset", f"{orca.name}-worker")

    async def answers(component: str, path: str) -> list[tuple[int, str]]:
        return [await orca.probe(pod, path) for pod in await orca.pods(component)]

    async def until_workers(*wanted: int) -> list[str]:
        """Waits until /readyz of the workers answers so. Returns the reasons."""
        found: list[tuple[int, str]] = []

        async def otherwise() -> str | None:
            nonlocal found
            found = await answers("worker", "/readyz")
            return None if [status for status, _ in found] == list(wanted) else f"{found}"

        await until(otherwise)
        return [reason for _, reason in found]

    for component in ("endpoint", "scheduler", "worker"):
        assert await answers(component, "/livez") == await answers(component, "/readyz") == [(200, "")] * 2

    # One pod of two: nothing forms. Endpoints take requests for the queue, and schedulers do their work.
    await orca.cluster.kubectl(*scale, "--replicas=1")
    assert all(await until_workers(503))
    assert await answers("worker", "/livez") == [(200, "")]
    for component in ("endpoint", "scheduler"):
        assert await answers(component, "/readyz") == [(200, "")] * 2

    # A new pod says that it does not serve yet, and both are ready when they have formed.
    await orca.cluster.kubectl(*scale, "--replicas=2")
    assert all(await until_workers(503, 503))
    await until_workers(200, 200)
    await orca.healed()

    # A rank that is killed: ready again when the engine has formed again, in the same container.
    epochs, victim = await orca.epochs(), await orca.pod(orca.worker(1))
    await orca.kill_inside(victim, (await orca.rank_pids(victim))[0])
    await orca.formed_again(epochs)
    await until_workers(200, 200)
    await orca.healed()
    assert {pod.name: pod.restarts for pod in await orca.pods() if pod.restarts} == {}
