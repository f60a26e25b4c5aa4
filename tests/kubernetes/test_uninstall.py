"""`helm uninstall` leaves nothing but the pool's volume claim, and the notes of the installation say so."""

from pauses import Pauses
from traffic import Under

from release import Release, Releases


async def test_streams_outlive_an_uninstall(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """The pool's claim stays, and the next installation goes on with what had not ended."""
    async with traffic(orca) as load:
        async with load.disturbed("helm uninstall, then helm install with the kept claim") as seen:
            await orca.uninstall()
            await orca.install()
            await orca.healed()
        pauses(seen)
    assert load.finished >= 20


async def test_nothing_is_left_but_the_claim(orca: Release, releases: Releases) -> None:
    claim = f"data-{orca.name}-redis-0"
    assert f"delete pvc {claim}" in await orca.cluster.helm("get", "notes", orca.name)
    await releases.remove()
    listed = await orca.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name")
    kinds = [kind for kind in listed.split() if not kind.startswith("events")]
    left = await orca.cluster.kubectl("get", ",".join(kinds), "--output=name", "--ignore-not-found")
    every_namespace_has = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    assert set(left.split()) - every_namespace_has == {f"persistentvolumeclaim/{claim}"}
