"""The network policies let through each arrow of the design, and no other."""

import ipaddress
from collections.abc import Sequence

import pytest
from helm.chart import DEMO, OPTIONS, Object, Rendered, merged, render, rendered

COLLECTOR, API_SERVER, WORLD = "198.51.100.7", "198.51.100.8", "203.0.113.9"  # outside of the release
FOREIGN = "foreign"  # a pod of somebody else
PORTS = {
    "endpoint": (50051, 8000, 9090),
    "scheduler": (9090,),
    "worker": (50050, 50100, 50101, 9090, 41000),  # the last: a port that NCCL or gloo chose
    "redis": (6379,),
    "sentinel": (26379,),
    "jaeger": (4317, 16686),
    "ui": (8001, 9090),
    FOREIGN: (8080,),
    WORLD: (53, 443, 6443, 80),
}
Arrow = tuple[str, str, int]

DNS = {(name, WORLD, 53) for name in ("endpoint", "scheduler", "worker", "check", "wait")}
ARROWS: set[Arrow] = {
    *((client, "endpoint", port) for client in (FOREIGN, "test") for port in (50051, 8000)),
    ("endpoint", "redis", 6379),
    ("scheduler", "redis", 6379),
    *(("scheduler", "worker", port) for port in (50050, 50100, 50101)),
    *(("worker", "worker", port) for port in PORTS["worker"]),
    *((client, WORLD, port) for client in ("scheduler", "wait") for port in (443, 6443)),
    *DNS,
}
SHAPE = {"engine": {"tp": 2, "pp": 2}}


def matches(peer: Object, other: str, labels: Object) -> bool:
    """Whether a peer of a rule stands for a pod of ours, a foreign pod, or an address."""
    if "ipBlock" in peer:
        return other[0].isdigit() and ipaddress.ip_address(other) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        return False  # nobody here stands in another namespace
    return peer["podSelector"]["matchLabels"].items() <= labels.items()


def lets(rules: Sequence[Object], side: str, other: str, labels: Object, port: int) -> bool:
    for rule in rules:
        peers, ports = rule.get(side), rule.get("ports")
        peer_fits = not peers or any(matches(peer, other, labels) for peer in peers)
        port_fits = not ports or any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in ports)
        if peer_fits and port_fits:
            return True
    return False


def arrows(release: Rendered) -> set[Arrow]:
    """Every connection that the policies let through: (from, to, port)."""
    labels = {name: pod["metadata"]["labels"] for name, pod in release.pods.items()}
    labels |= {FOREIGN: {}, WORLD: {}}
    policies = {
        name: [
            policy["spec"]
            for policy in release.of_kind("NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels[name].items()
        ]
        for name in labels
    }
    passed = set()
    for here in labels.keys() - {WORLD}:
        for there in labels.keys() & PORTS.keys():
            for port in PORTS[there]:
                out = not policies[here] or any(
                    lets(p["egress"], "to", there, labels[there], port) for p in policies[here]
                )
                into = not policies[there] or any(
                    lets(p["ingress"], "from", here, labels[here], port) for p in policies[there]
                )
                if out and into and {here, there} - {FOREIGN, WORLD, "test"}:
                    passed.add((here, there, port))
    return passed


def test_the_arrows_of_the_design() -> None:
    assert arrows(render(merged(DEMO, SHAPE))) == ARROWS


def test_spans_go_to_jaeger_and_nobody_reads_them_unasked() -> None:
    spans = {(name, "jaeger", 4317) for name in ("endpoint", "scheduler", "worker")}
    closed = merged(DEMO, SHAPE, {"jaeger": {"enabled": True}})
    assert arrows(render(closed)) == ARROWS | spans
    everybody = {"networkPolicy": {"jaegerClients": [{"podSelector": {"matchLabels": {}}}]}}
    reads = {(name, "jaeger", 16686) for name in (FOREIGN, "test")}
    assert arrows(render(merged(closed, everybody))) == ARROWS | spans | reads


def test_the_live_page_reaches_schedulers_and_endpoints_and_its_own_clients_are_named() -> None:
    calls = {("ui", "scheduler", 9090), ("ui", "endpoint", 8000), ("ui", WORLD, 53)}
    closed = merged(DEMO, SHAPE, {"ui": {"enabled": True}})
    doors = {("ui", "endpoint", 50051)}  # open to everybody, but it may not go there
    assert arrows(render(closed)) == ARROWS | calls
    assert not arrows(render(closed)) & doors
    few = {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "ours"}}}]}}
    assert calls <= arrows(render(merged(closed, few)))
    everybody = {"networkPolicy": {"uiClients": [{"podSelector": {"matchLabels": {}}}]}}
    looks = {(name, "ui", 8001) for name in (FOREIGN, "test")}
    assert arrows(render(merged(closed, everybody))) == ARROWS | calls | looks


def test_init_steps_reach_what_they_fetch() -> None:
    hub = render(merged(SHAPE, {"model": {"hub": {"name": "openai-community/gpt2"}}}))
    assert arrows(hub) == ARROWS | {(name, WORLD, 443) for name in ("endpoint", "worker", "check")}
    tokenizer = render(
        merged(SHAPE, {"model": {"claim": {"name": "c"}, "tokenizer": {"download": {"url": "http://h/m.tar"}}}})
    )
    assert arrows(tokenizer) == ARROWS | {("endpoint", WORLD, 80)}


def test_without_the_gate_there_is_no_hole_for_it() -> None:
    passed = arrows(render(merged(DEMO, SHAPE, {"wait": {"enabled": False}})))
    assert passed == {arrow for arrow in ARROWS if "wait" not in arrow}


def test_sentinels_and_servers_reach_each_other() -> None:
    asked = {(name, "sentinel", 26379) for name in ("endpoint", "scheduler", "redis", "sentinel")}
    followed = {(name, "redis", 6379) for name in ("redis", "sentinel")}
    names = {(name, WORLD, 53) for name in ("redis", "sentinel")}
    assert arrows(render(merged(DEMO, SHAPE, {"redis": {"mode": "sentinel"}}))) == ARROWS | asked | followed | names


def test_clients_are_those_that_are_named() -> None:
    named = {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"team": "ours"}}}]}}
    assert arrows(render(merged(DEMO, SHAPE, named))) == ARROWS - {(FOREIGN, "endpoint", p) for p in (50051, 8000)}


@pytest.mark.parametrize(
    ("option", "component", "port"),
    [
        ("a Redis of ours", "endpoint", 6380),
        ("a Redis of ours", "scheduler", 6380),
        ("a Redis whose URL is a Secret", "endpoint", 7000),
        ("Sentinels of ours", "endpoint", 26379),
        ("Sentinels of ours", "endpoint", 26380),
        ("Sentinels of ours", "scheduler", 6381),
        ("a collector", "worker", 4319),
        ({"tracing": {"otlpEndpoint": "http://collector.monitoring"}}, "worker", 4317),
        ("a download with a header and a kept copy", "worker", 8443),
    ],
)
def test_what_is_outside_is_reached_at_its_port(option: str | Object, component: str, port: int) -> None:
    release = rendered(option) if isinstance(option, str) else render(merged(DEMO, option))
    (policy,) = [p for p in release.of_kind("NetworkPolicy") if p["metadata"]["name"] == f"orca-{component}"]
    assert lets(policy["spec"]["egress"], "to", COLLECTOR, {}, port)


def test_the_api_server_can_be_named() -> None:
    policy = rendered("policies with all options").one("NetworkPolicy", "orca-scheduler")["spec"]
    assert lets(policy["egress"], "to", "10.96.0.1", {}, 6443)
    assert not lets(policy["egress"], "to", API_SERVER, {}, 6443)
    assert lets(policy["egress"], "to", "192.0.2.1", {}, 3128)


def test_every_workload_is_closed() -> None:
    for option in OPTIONS:
        release = rendered(option)
        policies = {policy["metadata"]["name"] for policy in release.of_kind("NetworkPolicy")}
        wanted = set() if option == "policies off" else {f"orca-{name}" for name in release.pods if name != "test"}
        assert policies == wanted
