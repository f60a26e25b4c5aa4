"""The plan of a round: chance comes from the seed alone."""

from orca_chaos.faults import ALONE, AT_ONCE, MOST, OF_LINKS, OF_PROCESSES, WITHIN, Fault, Kind, Victim, plan

VICTIMS = [
    *(Victim("rank", f"rank-0.{n}", OF_PROCESSES) for n in range(8)),
    Victim("redis", "redis", OF_PROCESSES),
    Victim("scheduler > redis", "scheduler-0 > redis", OF_LINKS),
]


def test_a_seed_and_a_number_decide_a_round() -> None:
    assert [plan(7, n, VICTIMS) for n in range(1, 50)] == [plan(7, n, VICTIMS) for n in range(1, 50)]
    assert [plan(7, n, VICTIMS) for n in range(1, 50)] != [plan(8, n, VICTIMS) for n in range(1, 50)]


def test_every_fault_comes_alone_and_together() -> None:
    rounds = [plan(1, n, VICTIMS) for n in range(1, 2001)]
    assert {len(faults) for faults in rounds} == set(range(1, MOST + 1))
    alone = [faults[0] for faults in rounds if len(faults) == 1]
    assert 0.9 * ALONE < len(alone) / len(rounds) < 1.1 * ALONE
    possible = {(kind, victim.role) for victim in VICTIMS for kind in victim.kinds}
    assert {(fault.kind, fault.victim.role) for fault in alone} == possible
    assert {(f.kind, f.victim.role) for faults in rounds if len(faults) > 1 for f in faults} == possible
    for fault in (fault for faults in rounds for fault in faults):
        assert 0 <= fault.at <= WITHIN
        assert (fault.seconds > 0) == (fault.kind not in AT_ONCE)
        assert (0.3 <= fault.seconds <= 5) == (fault.kind not in AT_ONCE)
        assert (0.02 <= fault.amount <= 0.4) == (fault.kind is Kind.DELAY)
        assert (fault.amount == 0) == (fault.kind is not Kind.DELAY)
        assert fault.kind in fault.victim.kinds
    assert all([fault.at for fault in faults] == sorted(fault.at for fault in faults) for faults in rounds)


def test_a_fault_in_words() -> None:
    way = Victim("scheduler > rank", "scheduler > rank-0.1", OF_LINKS)
    faults = Fault(0.5, Kind.HOLD_TO, way, 2.25), Fault(1.0, Kind.LOSE, way)
    assert [str(fault) for fault in faults] == [
        "0.50 s: hold to scheduler > rank-0.1 for 2.2 s",
        "1.00 s: lose scheduler > rank-0.1",
    ]
    assert [fault.label for fault in faults] == ["hold to scheduler > rank", "lose scheduler > rank"]


def test_a_role_has_its_share_however_many_processes_it_has() -> None:
    roles = [fault.victim.role for n in range(1, 2001) for fault in plan(1, n, VICTIMS)]
    assert all(0.28 < roles.count(role) / len(roles) < 0.39 for role in ("rank", "redis", "scheduler > redis"))
