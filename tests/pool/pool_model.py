"""The request pool's protocol as a program: a seeded simulation with faults. docs/pool.md is the text beside it.

Pool operations are atomic functions. Every process is a set of coroutines; each yields an operation and is resumed with
the answer. The network delays, loses, resends and duplicates messages, some of them very late. Processes die and pause
between any two operations. Redis may roll back to an earlier state.

RULES are sentences of docs/pool.md that look like details and are not. `--without NAME` takes one away and shows what
breaks; `--without all` takes all of them away. The properties are checked after every pool operation and at the end.

    python tests/pool/pool_model.py --seeds 3000
    python tests/pool/pool_model.py --seeds 500 --without claim_cas

Times are in hundredths of a second. Names are short because each function is read beside its paragraph: r is a
request's record, e an engine, g an engine's lease, s the pool's state, m an engine's master, c a call.
"""

import argparse
import collections
import copy
import heapq
import itertools
import random
from collections.abc import Iterable
from typing import Any

RULES = {
    "claim_cas": "claim names owner, term and the last claim number heard; it takes nothing new if more were given",
    "attempt": "Generate and Resume carry an attempt number; attach refuses an older one, and a detached one",
    "packet_attempt": "packets carry the attempt; an endpoint gives them to that call alone",
    "superseded": "attach writes an ABORTED packet for the older call",
    "detach_fence": "detach names the attempt and changes nothing when a newer one is attached",
    "sweep": "every scheduler's renewal sweeps: deadlines, detach grace, dead endpoints",
    "cancel_ends": "cancel ends the record at once; the engine learns of it from a hint or from its next commit",
    "packet_number": "delivery entries are numbered; a missed number makes the endpoint attach all its calls again",
    "pending": "a call is registered in its endpoint before its attach is sent, so early packets are kept",
    "no_mkstream": "commit never creates a delivery stream; only its endpoint does",
    "ep_revive": "an endpoint that was declared dead takes a new incarnation and attaches its calls again",
    "reconnect": "after a reconnect to Redis an endpoint takes a new incarnation and attaches all its calls again",
    "unique_numbers": "terms, epochs and claim numbers are max(last + 1, Redis TIME)",
    "reconcile": "renew answers with the claimed set; the master gives back and drops what differs from its own",
    "orphans": "schedulers acquire every known engine, discovered or not, to give its claims back and delete it",
    "never_fit": "claim skips a request that is larger than this engine; one larger than every engine ends",
    "progress": "the count of losses starts again when a token was committed since the last loss",
    "give_back_fence": "give_back names owner, term and claim numbers",
    "iteration_reserve": "iteration numbers are reserved ahead of use; a new master starts above the reserve",
    "from_zero": "an endpoint matches stop strings from token 0, whatever from_index is",
    "endpoint_grace": "a call that its endpoint ends (death, drain, late loop) gets max(detach_grace, 30 s)",
    "digest": "Resume and finish_at carry a digest of the tokens seen; another prefix is DATA_LOSS",
    "acquire_cas": "acquire names the owner, term and counter that it saw, and changes nothing when they moved",
    "lease_reads": "a takeover needs reads without a hole: a failed or very late one starts the count again",
    "sweep_gap": "a sweep that comes late after the one before (an outage) only renews every lease",
    "unknown_size": "until an engine has formed, submit answers UNAVAILABLE, not FAILED_PRECONDITION",
    "registered": "attach and submit change nothing for an endpoint incarnation that is not registered",
    "engine_check": "a commit's row must be claimed by the committing engine",
    "same_weights": "what has tokens is claimed by engines of the weights that made them; where none has them, it ends",
}
MODELS = 50021  # tokens of each
LEASE, EP_LEASE, GRACE, RETENTION, HEAL, KEEPALIVE, VERDICT, MAXLEN = 150, 150, 900, 4000, 800, 120, 90, 2


REFUSALS = {
    "full": "FULL",
    "later": "UNAVAILABLE",
    "never": "NEVER_FITS",
    "stale": "ABORTED",
    "unknown": "NOT_FOUND",
}


class Violation(Exception):
    pass


def need(condition, text):
    if not condition:
        raise Violation(text)


class Pool:
    """The whole of Redis. `s` is what AOF holds, so that a rollback is one assignment."""

    def __init__(self, sim):
        self.sim = sim
        self.s: dict[str, Any] = {
            "arrival": 0,
            "claim": 0,
            "waiting": {},
            "claimed": {},
            "rec": {},
            "delivery": {},
            "eps": {},
            "scheds": {},
            "eng": {},
            "biggest": 0,
            "swept": 0,
        }

    def number(self, last):
        return max(last + 1, self.sim.now * 1000) if "unique_numbers" in self.sim.on else last + 1

    # -- helpers, each a part of a script
    def packet(self, ep, item):
        d = self.s["delivery"]
        if ep is None or (ep not in d and "no_mkstream" in self.sim.on):
            return
        stream = d.setdefault(ep, {"n": 0, "items": []})
        stream["n"] += 1
        stream["items"] = (stream["items"] + [(self.sim.unique(), stream["n"], *item)])[-MAXLEN:]

    def end(self, rid, reason, final=None):
        r = self.s["rec"][rid]
        self.s["waiting"].pop(rid, None)
        for c in self.s["claimed"].values():
            c.pop(rid, None)
        n = len(r["tokens"]) if final is None else final
        r.update(state="ended", reason=reason, final=n, claim=None, engine=None, expires=self.sim.now + RETENTION)
        self.packet(r["ep"], (rid, r["attempt"], n, (), reason))

    def fenced(self, e, owner, term):
        g = self.s["eng"].get(e)
        return g is None or g["owner"] != owner or g["term"] != term

    def expire(self):  # Redis's own TTL
        for rid in [i for i, r in self.s["rec"].items() if r["state"] == "ended" and r["expires"] < self.sim.now]:
            del self.s["rec"][rid]

    def overdue(self, r):
        now = self.sim.now
        return (
            "CANCELLED"
            if r["cancelled"]
            else "DEADLINE"
            if r["deadline"] and now > r["deadline"]
            else "DETACHED"
            if r["detach_at"] is not None and now >= r["detach_at"]
            else None
        )

    # -- what endpoints send
    def submit(self, rid, body, ep, attempt):
        if ep not in self.s["eps"] and "registered" in self.sim.on:
            return ("dead",)
        if rid in self.s["rec"]:
            return self.attach(rid, ep, attempt)
        if len(self.s["waiting"]) >= 8:
            return ("full",)
        if body["need"] > self.s["biggest"]:
            return ("later",) if self.s["biggest"] == 0 and "unknown_size" in self.sim.on else ("never",)
        self.s["arrival"] += 1
        self.s["rec"][rid] = {
            "body": body,
            "state": "waiting",
            "arrival": self.s["arrival"],
            "claim": None,
            "engine": None,
            "ep": ep,
            "final": None,
            "attempt": attempt,
            "closed": False,
            "tokens": [],
            "losses": 0,
            "loss_at": -1,
            "weights": None,
            "reason": None,
            "cancelled": False,
            "deadline": body["deadline"],
            "detach_at": None,
            "expires": None,
        }
        self.s["waiting"][rid] = self.s["arrival"]
        return self.attach(rid, ep, attempt)

    def attach(self, rid, ep, attempt):
        r = self.s["rec"].get(rid)
        if ep not in self.s["eps"] and "registered" in self.sim.on:
            return ("dead",)
        if r is None:
            return ("unknown",)
        if "attempt" in self.sim.on and (attempt < r["attempt"] or (attempt == r["attempt"] and r["closed"])):
            return ("stale",)
        if attempt != r["attempt"] and "superseded" in self.sim.on:
            self.packet(r["ep"], (rid, r["attempt"], 0, (), "ABORTED"))
        r.update(ep=ep, attempt=attempt, closed=False, detach_at=None)
        final = len(r["tokens"]) if r["final"] is None else r["final"]
        return ("ok", tuple(r["tokens"][:final]), r["reason"])

    def detach(self, rid, attempt, grace):
        r = self.s["rec"].get(rid)
        if r and r["state"] != "ended" and (r["attempt"] == attempt or "detach_fence" not in self.sim.on):
            r.update(ep=None, closed=True, detach_at=self.sim.now + grace)

    def cancel(self, rid):
        r = self.s["rec"].get(rid)
        if r and r["state"] != "ended":
            r["cancelled"] = True
            if "cancel_ends" in self.sim.on:
                self.end(rid, "CANCELLED")

    def finish_at(self, rid, index, text):
        r = self.s["rec"].get(rid)
        if r is None or index >= len(r["tokens"]):
            return "ahead"  # Redis lost tokens: the endpoint waits for the healing
        if "digest" in self.sim.on and r["tokens"][: index + 1] != text[: index + 1]:
            return "other"  # it healed to another continuation
        if r["state"] != "ended":
            self.end(rid, "STOP", index + 1)
        elif index + 1 < r["final"]:
            r.update(final=index + 1, reason="STOP")
        return "ok"

    def ep_renew(self, ep, first=False, old=None):
        self.s["eps"].pop(old, None)
        self.s["delivery"].pop(old, None)
        if ep in self.s["eps"] or first:
            number = self.s["eps"][ep][1] if ep in self.s["eps"] else self.sim.unique()
            self.s["eps"][ep] = (self.sim.now, number)
            self.s["delivery"].setdefault(ep, {"n": 0, "items": []})
            return number  # of this registration: another one means "you were declared dead"
        return None

    def read(self, ep, cursor):
        return [i for i in self.s["delivery"].get(ep, {"items": ()})["items"] if i[0] > cursor]

    # -- what schedulers send
    def engines(self, me):
        s = self.s
        s["scheds"][me] = self.sim.now
        s["scheds"] = {k: v for k, v in s["scheds"].items() if v + LEASE >= self.sim.now}
        if "sweep" in self.sim.on:
            self.sweep()
        return {e: (g["owner"], g["term"], g["counter"]) for e, g in s["eng"].items()}, len(s["scheds"])

    def sweep(self):
        s, now = self.s, self.sim.now
        gap, s["swept"] = now - s["swept"], now
        if gap > 75 and "sweep_gap" in self.sim.on:
            s["eps"] = {p: (now, k) for p, (t, k) in s["eps"].items()}
        for ep in [p for p, (t, k) in s["eps"].items() if t + EP_LEASE < now]:
            need(self.sim.rolled or not self.sim.well(ep), f"endpoint {ep} lives and was declared dead")
            del s["eps"][ep]
            s["delivery"].pop(ep, None)
        for rid, r in list(s["rec"].items()):
            if r["state"] == "ended":
                continue
            if r["ep"] is not None and r["ep"] not in s["eps"] and r["detach_at"] is None:
                r["detach_at"] = now + (
                    max(r["body"]["grace"], GRACE) if "endpoint_grace" in self.sim.on else r["body"]["grace"]
                )
            if self.overdue(r):
                self.end(rid, self.overdue(r))
            elif (
                "never_fit" in self.sim.on
                and s["eng"]
                and r["body"]["need"] > max(g["slots"] for g in s["eng"].values())
            ):
                self.end(rid, "NEVER_FITS")
            elif r["state"] == "waiting" and self.tied_elsewhere(r, {g["weights"] for g in s["eng"].values()} - {None}):
                self.end(rid, "MODEL_CHANGED")

    def tied_elsewhere(self, r, weights):
        """Whether a request has tokens of other weights than these. Without any engine it waits for one."""
        return "same_weights" in self.sim.on and r["tokens"] and weights and r["weights"] not in weights

    def acquire(self, e, me, seen):
        g = self.s["eng"].setdefault(
            e,
            {
                "owner": None,
                "term": 0,
                "counter": 0,
                "epoch": 0,
                "reserved": 0,
                "last_claim": 0,
                "slots": self.sim.slots(e),
                "weights": None if self.sim.trained is not None else 1,
            },
        )
        if g["owner"] == me:
            return g["term"]  # sent twice
        if "acquire_cas" in self.sim.on and (
            g["owner"] is not None if seen is None else (g["owner"], g["term"], g["counter"]) != seen
        ):
            return None
        need(
            self.sim.rolled or not (self.sim.well(g["owner"]) and e in self.sim.procs[g["owner"]].masters),
            f"engine {e} was taken from its living master",
        )
        self.sim.seen["takeover" if g["owner"] else "acquire"] += 1
        g.update(owner=me, term=self.number(g["term"]), counter=g["counter"] + 1)
        self.s["claimed"].setdefault(e, {})
        self.s["biggest"] = max(self.s["biggest"], g["slots"])
        self.sim.terms[e, g["term"]].add(me)
        need(len(self.sim.terms[e, g["term"]]) == 1, f"term {g['term']} of engine {e} was given to two masters")
        return g["term"]

    def holding(self, e):
        return {
            i: (r["claim"], tuple(r["tokens"]), r["body"], r["weights"])
            for i, r in ((i, self.s["rec"][i]) for i in self.s["claimed"][e])
        }

    def renew(self, e, me, term, epoch=None, iteration=None, weights=None):
        if self.fenced(e, me, term):
            return None
        g = self.s["eng"][e]
        g["counter"] += 1
        if epoch is not None:
            g["epoch"] = max(g["epoch"], epoch)
        if iteration is not None:
            g["reserved"] = max(g["reserved"], iteration)
        if weights is not None:
            g["weights"] = weights
        return self.holding(e), g["epoch"], g["reserved"], g["last_claim"]

    def release(self, e, me, term):
        if not self.fenced(e, me, term):
            self.s["eng"][e].update(owner=None)

    def retire(self, e, me, term):
        if not self.fenced(e, me, term) and not self.s["claimed"][e]:
            del self.s["eng"][e], self.s["claimed"][e]

    def claim(self, e, me, term, have, count, slots, total):
        s, out, g = self.s, {}, self.s["eng"].get(e)
        if "claim_cas" in self.sim.on:
            if self.fenced(e, me, term):
                return None
            if have < g["last_claim"]:
                return {i: h for i, h in self.holding(e).items() if h[0] > have}, g["last_claim"]
        if g is None:
            return None
        alone = any(s["rec"][i]["losses"] >= 2 for i in s["claimed"][e])
        for rid in sorted(s["waiting"], key=s["waiting"].get):
            r = s["rec"][rid]
            size = r["body"]["need"]
            if self.overdue(r):
                self.end(rid, self.overdue(r))
                continue
            if size > total and "never_fit" in self.sim.on:
                continue
            if self.tied_elsewhere(r, {g["weights"]}):
                continue
            suspect = r["losses"] >= 2
            if alone or size > slots or count == 0 or (suspect and s["claimed"][e]):
                break
            s["claim"] = self.number(s["claim"])
            older = [
                i
                for i, a in s["waiting"].items()
                if a < r["arrival"]
                and s["rec"][i]["body"]["need"] <= total
                and not self.tied_elsewhere(s["rec"][i], {g["weights"]})
            ]
            need(not older, f"claim of {rid} passed {older}")
            s["claimed"][e][rid] = s["waiting"].pop(rid)
            r.update(state="claimed", claim=s["claim"], engine=e, weights=g["weights"])
            g["last_claim"] = s["claim"]
            slots, count, alone = slots - size, count - 1, suspect
            out[rid] = (r["claim"], tuple(r["tokens"]), r["body"], r["weights"])
        return out, g["last_claim"]

    def commit(self, e, me, term, rows):
        """rows: id -> (claim, base, ids, finish). Answers per row: ok, have N (sent before), gap N, gone."""
        if self.fenced(e, me, term):
            return None
        out = {}
        for rid, (claim, base, ids, finish) in rows.items():
            r = self.s["rec"].get(rid)
            if r is None or r["claim"] != claim or (r["engine"] != e and "engine_check" in self.sim.on):
                out[rid] = "gone"
            elif base != len(r["tokens"]):
                out[rid] = len(r["tokens"])
            else:
                # Only without cancel_ends can a cancelled request still be alive here.
                reason = finish or ("CANCELLED" if r["cancelled"] else None)
                r["tokens"] += ids
                self.sim.committed(rid, base, ids)
                self.packet(r["ep"], (rid, r["attempt"], base, tuple(ids), None))
                if reason:
                    self.end(rid, reason)
                out[rid] = "ok"
        return out

    def give_back(self, e, me, term, rows):
        """rows: id -> (claim, was it RUNNING when the engine was lost)."""
        if "give_back_fence" in self.sim.on and self.fenced(e, me, term):
            return
        for rid, (claim, lost) in rows.items():
            r = self.s["rec"].get(rid)
            if (
                r is None
                or r["state"] != "claimed"
                or ("give_back_fence" in self.sim.on and (r["claim"] != claim or r["engine"] != e))
            ):
                continue
            if lost:
                moved = len(r["tokens"]) > r["loss_at"] and "progress" in self.sim.on
                r["losses"] = 1 if moved else r["losses"] + 1
                r["loss_at"] = len(r["tokens"])
                self.sim.lost_at[rid].append(len(r["tokens"]))
                if r["losses"] >= 3:
                    self.end(rid, "INTERNAL")
                    continue
            self.s["claimed"][r["engine"]].pop(rid, None)
            self.s["waiting"][rid] = r["arrival"]
            r.update(state="waiting", claim=None, engine=None)

    # -- the invariants, after every operation
    def check(self):
        s = self.s
        for rid, r in s["rec"].items():
            places = (rid in s["waiting"]) + sum(rid in c for c in s["claimed"].values()) + (r["state"] == "ended")
            need(places == 1, f"request {rid} is in {places} of waiting, claimed, ended ({r['state']})")
        for e, g in s["eng"].items():
            total = sum(s["rec"][i]["body"]["need"] for i in s["claimed"].get(e, ()))
            need(total <= g["slots"] or self.sim.rolled, f"engine {e} claimed {total} of {g['slots']} slots")


class Proc:
    def __init__(self, name):
        self.name, self.alive, self.paused, self.draining, self.leaving = name, True, 0, False, False


class Engine(Proc):
    """All ranks of one engine, fenced by term and epoch. Rows outlive a change of master, and end with the ranks."""

    def __init__(self, sim, e, slots):
        super().__init__(f"engine{e}")
        self.sim, self.e, self.slots, self.gone = sim, e, slots, False
        self.term, self.epoch, self.iteration, self.rows = 0, None, 0, {}
        self.weights = 1  # a number that is another one after a training

    def die(self):
        self.alive, self.epoch, self.rows, self.term, self.iteration = False, None, {}, 0, 0
        self.sim.at(self.sim.r.randint(20, 150), self.restart)

    def restart(self):
        self.alive = not self.gone
        if self.sim.trained is not None and self.sim.trained.random() < 0.3:
            self.weights += 1

    def handle(self, kind, term, *args):
        if term < self.term:
            return "old"
        self.term = term
        if kind == "hello":
            return self.epoch, self.iteration, dict(self.rows)
        if kind == "fence":
            self.paused = 0
            self.die()
            return "ok"
        if kind == "form":
            self.epoch, self.rows = args[0], {}
            return self.weights
        epoch, iteration, items, keep, post = args  # run
        if epoch != self.epoch or iteration <= self.iteration:
            return "old"
        need(
            (self.e, iteration) not in self.sim.iterations or self.sim.rolled,
            f"engine {self.e} used iteration {iteration} twice",
        )
        self.sim.iterations.add((self.e, iteration))
        self.iteration = iteration
        self.rows = {i: c for i, c in self.rows.items() if i in keep and keep[i] == c}
        out = {}
        for rid, (claim, prefix, body) in items.items():
            self.rows[rid] = claim
            if body["poison"] == len(prefix):
                self.die()
                return "ok"
            out[rid] = (claim, len(prefix), self.sim.token(rid, prefix, claim) + MODELS * self.weights)
        self.sim.at(self.sim.r.randint(2, 15), lambda: post.append((epoch, iteration, out)))
        return "ok"


class Master:
    def __init__(self, sched, e, term):
        self.sched, self.e, self.term, self.on, self.rows, self.held, self.inbox = sched, e, term, True, {}, {}, []
        self.have = self.epoch = self.iteration = self.reserved = 0
        self.formed, self.weights = False, None


class Scheduler(Proc):
    def __init__(self, sim, name):
        super().__init__(name)
        self.sim, self.masters = sim, {}
        sim.procs[name] = self
        sim.spawn(self, self.lease())

    def lease(self):
        seen, now = {}, 0  # engine -> its lease, and for how long it has not moved
        while not (self.draining and not self.masters):
            engines, live = yield "engines", self.name
            known = {e for e, g in self.sim.engines.items() if not g.gone} | (
                set(engines) if "orphans" in self.sim.on else set()
            )
            last, now = now, self.sim.now
            for e in sorted(known):
                state = engines.get(e)
                if e in self.masters or self.draining:
                    continue
                pause = now - last
                if "lease_reads" in self.sim.on and pause > 75:
                    pause = 40 if pause <= LEASE else None
                before = seen.get(e)
                counted = 0
                if before is not None and before[0] == state and pause is not None:
                    counted = before[1] + pause
                seen[e] = (state, counted)
                stale = state is None or state[0] is None or state[0] == self.name or seen[e][1] > LEASE
                if stale and len(self.masters) < -(-len(known) // max(1, live)):
                    term = yield "acquire", e, self.name, state
                    if term and e not in self.masters:
                        self.masters[e] = m = Master(self, e, term)
                        self.sim.spawn(self, self.renewal(m))
                        self.sim.spawn(self, self.main(m))
            yield "sleep", self.sim.r.randint(15, 40)

    def drop(self, m):
        m.on = False
        if self.masters.get(m.e) is m:
            del self.masters[m.e]

    def renewal(self, m):
        while m.on:
            mine = {i: row[0] for i, row in m.rows.items()}
            got = yield "renew", m.e, self.name, m.term, None, None, m.weights
            if got is None:
                self.drop(m)
                return
            if "reconcile" in self.sim.on and m.formed:
                orphaned = {
                    i: (h[0], False) for i, h in got[0].items() if i not in m.rows and h[0] <= m.have and i not in mine
                }
                if orphaned:
                    yield "give_back", m.e, self.name, m.term, orphaned
                for i, claim in mine.items():
                    if i in m.rows and m.rows[i][0] == claim and (i not in got[0] or got[0][i][0] != claim):
                        del m.rows[i]
                        m.held.pop(i, None)
            yield "sleep", self.sim.r.randint(20, 40)

    def lost(self, m, counted):
        rows = {i: (row[0], counted) for i, row in m.rows.items()}
        m.rows, m.held, m.formed = {}, {}, False
        if rows:
            yield "give_back", m.e, self.name, m.term, rows

    def main(self, m):
        """The engine master. One batch in flight, and the next is issued before the last one's tokens are committed."""
        sim, eng = self.sim, self.sim.engines[m.e]
        got = yield "renew", m.e, self.name, m.term
        if got is None:
            return self.drop(m)
        claims, m.epoch, m.reserved, m.have = got
        m.iteration = m.reserved
        m.rows = {i: (c, list(t), b) for i, (c, t, b, _) in claims.items()}
        while m.on:
            if eng.gone or self.draining:
                if eng.gone:
                    yield from self.lost(m, False)  # scale-down; a request unknown to us is found by the next renew
                    got = yield "renew", m.e, self.name, m.term
                    if got and got[0]:
                        yield "give_back", m.e, self.name, m.term, {i: (h[0], False) for i, h in got[0].items()}
                    yield "retire", m.e, self.name, m.term
                else:
                    yield "release", m.e, self.name, m.term
                return self.drop(m)
            if not m.formed:
                hello = yield "rank", eng, "hello", m.term
                if hello == "old":
                    return self.drop(m)
                if hello is not None and hello[0] is not None and hello[0] == m.epoch:
                    self.sim.seen["epoch kept"] += bool(m.rows)
                    m.formed, m.weights = True, eng.weights  # the ranks stand together: same epoch, rows kept
                    m.iteration = max(m.iteration, hello[1])
                else:
                    yield from self.lost(m, True)
                    if hello is None:
                        yield "rank", eng, "fence", m.term
                        yield "sleep", 30
                        continue
                    epoch = max(self.sim.pool.number(m.epoch), (hello[0] or 0) + 1)
                    if (yield "renew", m.e, self.name, m.term, epoch) is None:
                        return self.drop(m)
                    m.epoch, m.iteration = epoch, max(m.iteration, hello[1])
                    weights = yield "rank", eng, "form", m.term, epoch
                    if isinstance(weights, int):
                        m.weights = weights
                        told = sim.trained is None or (yield "renew", m.e, self.name, m.term, None, None, weights)
                        if told is None:
                            return self.drop(m)
                        m.formed = True
                continue
            free = eng.slots - sum(row[2]["need"] for row in m.rows.values())
            if len(m.rows) < 3 and free > 0:
                got = yield "claim", m.e, self.name, m.term, m.have, 3 - len(m.rows), free, eng.slots
                if got is None:
                    return self.drop(m)
                m.have = got[1] if "claim_cas" not in self.sim.on else max([m.have] + [h[0] for h in got[0].values()])
                if not got[0]:
                    m.have = max(m.have, got[1])
                for i, (c, t, b, w) in got[0].items():
                    if w != m.weights and "same_weights" in self.sim.on:  # the answer was overtaken by a formation
                        yield "give_back", m.e, self.name, m.term, {i: (c, False)}
                    elif i not in m.rows or m.rows[i][0] != c:
                        m.rows[i] = (c, list(t), b)
            items = {i: (row[0], tuple(row[1]), row[2]) for i, row in m.rows.items() if len(row[1]) < row[2]["length"]}
            issued = None
            if items:
                m.iteration += 1
                if "iteration_reserve" in self.sim.on and m.iteration > m.reserved - 1:
                    if (yield "renew", m.e, self.name, m.term, None, m.iteration + 50) is None:
                        return self.drop(m)
                    m.reserved = m.iteration + 50
                issued = m.iteration
                yield "post", eng, "run", m.term, m.epoch, issued, items, {i: r[0] for i, r in m.rows.items()}, m.inbox
            yield from self.commit(m, issued if "iteration_reserve" not in self.sim.on else None)
            waited = 0
            while issued and m.on:
                answers, m.inbox[:] = list(m.inbox), []
                back = [o for ep, it, o in answers if ep == m.epoch and it == issued]
                if back:
                    for rid, (claim, index, tok) in back[0].items():
                        row = m.rows.get(rid)
                        if row and row[0] == claim and len(row[1]) == index:
                            row[1].append(tok)
                            m.held[rid] = m.held.get(rid, 0) + 1
                    break
                waited += 10
                if waited > VERDICT:
                    yield "rank", eng, "fence", m.term
                    yield from self.lost(m, True)
                    break
                yield "sleep", 10
            if not items:
                yield "sleep", sim.r.randint(5, 15)

    def commit(self, m, iteration):
        rows = {}
        for i, n in m.held.items():
            claim, toks, body = m.rows[i]
            rows[i] = (claim, len(toks) - n, toks[len(toks) - n :], "LENGTH" if len(toks) >= body["length"] else None)
        if not rows:
            return
        if iteration:  # the page: the pool learns the last committed iteration
            yield "renew", m.e, self.name, m.term, None, iteration - 1
        answer = yield "commit", m.e, self.name, m.term, rows
        if answer is None:
            return self.drop(m)
        for i, a in answer.items():
            row = m.rows.get(i)
            if row is None or row[0] != rows[i][0]:
                continue
            done = rows[i][1] + len(rows[i][2])
            if a == "gone" or ((a in ("ok", done)) and rows[i][3]):
                m.held.pop(i, None)
                del m.rows[i]
            else:  # ok, sent before, or a gap: hold what lies beyond the pool's count
                m.held[i] = len(row[1]) - (done if a == "ok" else a)
                if m.held[i] <= 0:
                    del m.held[i]


class Call:
    def __init__(self, ep, rid, attempt, body, start, seen):
        self.ep, self.rid, self.attempt, self.body, self.start, self.seen = ep, rid, attempt, body, start, seen
        self.events, self.closed, self.ended, self.inbox, self.dirty = [], False, False, [], False


class Endpoint(Proc):
    def __init__(self, sim, name):
        super().__init__(name)
        self.sim, self.calls, self.last, self.reconnected, self.renewed, self.late = sim, [], 0, False, sim.now, 0
        sim.procs[name] = self
        sim.spawn(self, self.renewal())
        sim.spawn(self, self.reader())

    def renewal(self):
        number = yield "ep_renew", self.name, True
        while True:
            known = (yield "ep_renew", self.name) == number
            if self.sim.now - self.renewed > 75:
                self.late = self.sim.now + 100
            self.renewed = self.sim.now
            if self.reconnected or (not known and "ep_revive" in self.sim.on):
                self.reconnected = False
                old = self.name
                del self.sim.procs[old]
                self.name = (
                    f"e{next(self.sim.names)}"  # a new incarnation: what nobody attaches again dies with the old one
                )
                self.sim.procs[self.name] = self
                number = yield "ep_renew", self.name, True, old
                self.last = 0
                self.all_dirty()
            yield "sleep", self.sim.r.randint(20, 40)

    def all_dirty(self):
        for c in self.calls:
            c.dirty = True

    def reader(self):
        cursor = 0
        while True:
            for stamp, n, rid, attempt, first, ids, reason in (yield "read", self.name, cursor):
                if stamp <= cursor:
                    continue
                cursor = stamp
                if n != self.last + 1 and "packet_number" in self.sim.on:
                    self.all_dirty()
                self.last = n
                for c in self.calls:
                    if c.rid == rid and (c.attempt == attempt or "packet_attempt" not in self.sim.on):
                        c.inbox.append((first, ids, reason))
            yield "sleep", self.sim.r.randint(3, 12)

    def serve(self, c):
        """One call: attach, then packets. `text` is every token from 0; detokenizer and stop matcher need them all."""
        if "pending" in self.sim.on:
            self.calls.append(c)
        text, deadline, first = [], None, True
        c.dirty = True
        while not c.ended:
            if c.closed or self.leaving:
                if self.leaving:
                    c.events.append(("error", "UNAVAILABLE"))
                # The endpoint's fault, not the client's.
                fault = self.leaving or self.sim.now < self.late or self.sim.now - self.renewed > 75
                grace = max(c.body["grace"], GRACE) if fault and "endpoint_grace" in self.sim.on else c.body["grace"]
                yield "detach", c.rid, c.attempt, grace
                break
            got = []
            if c.dirty:
                c.dirty = False
                if first and c.start is None:
                    a = yield "submit", c.rid, c.body, self.name, c.attempt
                else:
                    a = yield "attach", c.rid, self.name, c.attempt
                if a[0] == "dead":  # sent for an incarnation that is no more
                    c.dirty = True
                    yield "sleep", 20
                    continue
                if c not in self.calls:
                    self.calls.append(c)
                if a[0] in ("full", "later", "never", "stale") or (a[0] == "unknown" and first):
                    c.events.append(("error", REFUSALS[a[0]]))
                    break
                if first:
                    c.events.append(("accepted",))
                first = False
                got = [(0, a[1], a[2])] if a[0] == "ok" else [(0, (), None)]
                if a[0] == "unknown" or len(a[1]) < max(len(text), c.start or 0):
                    # Redis lost tokens: wait until an engine has made them again.
                    deadline = deadline or self.sim.now + HEAL
                    if self.sim.now > deadline or (a[0] == "ok" and a[2] and a[2] != "STOP"):
                        c.events.append(("error", "DATA_LOSS"))
                        yield "detach", c.rid, c.attempt, 0
                        break
                    yield "sleep", 30
                    c.dirty = True
                    continue
                deadline = None
                if c.seen and "digest" in self.sim.on and tuple(c.seen) != a[1][: len(c.seen)]:
                    c.events.append(("error", "DATA_LOSS"))
                    yield "detach", c.rid, c.attempt, 0
                    break
            elif c.inbox:
                got = [c.inbox.pop(0)]
            for base, ids, reason in got:
                if reason == "ABORTED":
                    c.events.append(("error", "ABORTED"))
                    c.ended = True
                elif base > len(text):
                    c.dirty = True  # a gap is read from tokens:ID
                else:
                    if any(x != y for x, y in zip(ids, text[base:], strict=False)):
                        c.events.append(("error", "DATA_LOSS"))
                        c.ended = True
                        continue
                    for tok in ids[len(text) - base :]:
                        text.append(tok)
                        i = len(text) - 1
                        if i >= (c.start or 0):
                            c.events.append(("token", i, tok))
                        seen_from = 0 if "from_zero" in self.sim.on else (c.start or 0)
                        # A stop string ends at this token; it began one token earlier.
                        if c.body["stop"] == i and seen_from <= i - 1:
                            limit = self.sim.now + HEAL
                            while (said := (yield "finish_at", c.rid, i, text)) == "ahead" and self.sim.now < limit:
                                yield "sleep", 30  # only after a rollback
                            c.events.append(("finished", "STOP", i + 1) if said == "ok" else ("error", "DATA_LOSS"))
                            c.ended = True
                            break
                    if reason and not c.ended and not c.dirty and base + len(ids) <= len(text):
                        c.events.append(("finished", reason, len(text)))
                        c.ended = True
            if not got:
                yield "sleep", self.sim.r.randint(3, 12)
        c.ended = True
        if c in self.calls:
            self.calls.remove(c)


class Client(Proc):
    """The client library: makes the id, resumes by itself, checks what it is shown."""

    def __init__(self, sim, rid, body, rival=False):
        super().__init__(f"client{rid}{'r' if rival else ''}")
        self.sim, self.rid, self.body, self.rival = sim, rid, body, rival
        self.tokens, self.outcome, self.accepted, self.left, self.asked, self.hung = (
            [],
            None,
            False,
            False,
            False,
            False,
        )
        sim.spawn(self, self.run())

    def run(self):
        sim, r = self.sim, self.sim.r
        yield "sleep", r.randint(1, r.choice((700, 2400)))
        tries = 0
        while self.outcome is None:
            up = [e for e in sim.endpoints if e.alive and not e.leaving]
            if not up or tries > 60:
                yield "sleep", 40
                tries = 0
                continue
            tries += 1
            resume = self.accepted
            ep = r.choice(up)
            c = Call(
                ep,
                self.rid,
                sim.unique() + sim.now * 10**6,
                self.body,
                len(self.tokens) if resume else None,
                list(self.tokens),
            )
            sim.at(r.randint(1, 5), lambda ep=ep, c=c: sim.spawn(ep, ep.serve(c)))
            code, closing = None, (r.randint(20, 400) if sim.faulty and r.random() < 0.25 else None)
            while self.outcome is None and code is None:
                for ev in list(c.events):
                    c.events.pop(0)
                    if ev[0] == "accepted":
                        self.accepted = True
                    elif ev[0] == "token":
                        need(
                            ev[1] == len(self.tokens), f"{self.name} got index {ev[1]} after {len(self.tokens)} tokens"
                        )
                        need(
                            sim.weak_types or ev[2] % MODELS == sim.token(self.rid, range(ev[1]), 0),
                            f"{self.name} got a wrong token at {ev[1]}",
                        )
                        self.tokens.append(ev[2])
                        need(
                            self.body["stop"] is None or len(self.tokens) <= self.body["stop"] + 1,
                            f"{self.name} got a token after its stop string",
                        )
                    elif ev[0] == "finished":
                        need(ev[2] == len(self.tokens), f"{self.name} FINISHED at {ev[2]} but saw {len(self.tokens)}")
                        self.outcome = ev[1]
                        rec = sim.pool.s["rec"].get(self.rid)
                        if rec and len(rec["tokens"]) >= len(self.tokens):
                            need(
                                self.tokens == rec["tokens"][: len(self.tokens)],
                                f"{self.name} was shown a stream that is not the record's",
                            )
                    else:
                        code = ev[1]
                        break
                if not ep.alive or ep.paused > sim.now + KEEPALIVE:
                    code = code or "UNAVAILABLE"
                if closing is not None and code is None:
                    closing -= 5
                    if closing < 0:
                        code, self.hung = "CLOSED", True
                        if r.random() < 0.4:
                            self.left, self.outcome = True, "LEFT"
                if sim.faulty and r.random() < 0.004:
                    self.asked = True
                    sim.spawn(ep, iter([("cancel", self.rid)])) if ep.alive else None
                yield "sleep", 5
            c.closed = True
            if code in ("ABORTED", "NOT_FOUND", "DATA_LOSS", "NEVER_FITS", "MODEL_CHANGED"):
                self.outcome = code
            yield "sleep", r.randint(1, 60) if code != "FULL" else 80


class Sim:
    def __init__(self, seed, weak=False, without: Iterable[str] = ()):
        self.seed, self.r, self.now, self.steps = seed, random.Random(seed), 0, 0
        self.on = frozenset(RULES) - frozenset(without)
        r = self.r
        self.procs, self.seen = {}, collections.Counter()
        self.heap, self.count, self.stamps = [], itertools.count(), itertools.count(1)
        self.pool, self.terms, self.iterations, self.lost_at = (
            Pool(self),
            collections.defaultdict(set),
            set(),
            collections.defaultdict(list),
        )
        self.log, self.rolled, self.snaps, self.down = {}, False, [], 0
        self.faulty, self.weak_redis, self.weak_types = True, r.random() < 0.3 or weak, r.random() < 0.3 or weak
        self.no_engine_end, self.shrink = r.random() < 0.12, r.random() < 0.2
        trained = random.Random(f"trained {seed}")  # of its own: other seeds stay what they are
        self.trained = trained if trained.random() < 0.15 else None
        n = r.randint(1, 3)
        self.engines = {e: Engine(self, e, r.choice((12, 20, 30))) for e in range(n)}
        self.scheds = [Scheduler(self, f"s{i}") for i in range(r.randint(1, 3))]
        self.endpoints = [Endpoint(self, f"e{i}") for i in range(r.randint(1, 3))]
        self.names, self.clients = itertools.count(10), []
        for rid in range(r.randint(3, 8)):
            length = r.randint(1, 8)
            body = {
                "length": length,
                "need": length + r.randint(1, 14),
                "poison": r.randrange(length) if r.random() < 0.08 else None,
                "grace": r.choice((0, GRACE, GRACE)),
                "stop": r.randint(1, length - 1) if length > 1 and r.random() < 0.3 else None,
                "deadline": r.choice((None, None, None, 900)),
            }
            self.clients.append(Client(self, rid, body))
            if r.random() < 0.12:
                self.clients.append(Client(self, rid, body, rival=True))
        kinds = ["sched", "ep", "engine", "pause", "pause", "leave", "release", "scale", "down", "rollback"]
        self.kinds = r.sample(kinds, r.randint(1, len(kinds)))  # a swarm: each seed has its own mix of faults
        self.at(20, self.fault)
        self.at(30, self.snapshot)

    # -- machinery
    def at(self, delay, fn):
        heapq.heappush(self.heap, (self.now + delay, next(self.count), fn))

    def unique(self):
        return next(self.stamps)

    def well(self, name):
        """Alive, not leaving and not paused lately: nothing may take its place."""
        p = self.procs.get(name)
        return p is not None and p.alive and not p.draining and not p.leaving and p.paused < self.now - 300

    def slots(self, e):
        return self.engines[e].slots

    def token(self, rid, prefix, claim):
        salt = claim if self.weak_types else 0  # other batch shapes round otherwise: a valid continuation, not the same
        return (rid * 7919 + len(prefix) * 104729 + salt * 31) % MODELS  # and MODELS times the weights

    def committed(self, rid, base, ids):
        if not self.rolled:
            for i, tok in enumerate(ids, base):
                need(self.log.setdefault((rid, i), tok) == tok, f"committed token {i} of {rid} changed")
                need(self.log[rid, 0] // MODELS == tok // MODELS, f"request {rid} has tokens of two models")

    def spawn(self, proc, gen):
        self.step(proc, gen, None)

    def step(self, proc, gen, value):
        if not proc.alive:
            return None
        if proc.paused > self.now:
            return self.at(proc.paused - self.now + self.r.randint(0, 5), lambda: self.step(proc, gen, value))
        self.steps += 1
        try:
            op = gen.send(value) if hasattr(gen, "send") else next(gen)
        except StopIteration:
            return None
        if op[0] == "sleep":
            self.at(op[1], lambda: self.step(proc, gen, None))
        elif op[0] in ("rank", "post"):
            self.to_rank(proc, gen, op)
        else:
            self.to_pool(proc, gen, op, [False])
        return None

    def to_rank(self, proc, gen, op):
        eng, kind, args = op[1], op[2], op[3:]

        def arrive():
            if eng.alive and eng.paused > self.now:
                late = eng.paused - self.now + 1
                return self.at(late, arrive) if kind != "fence" else answer(eng.handle(kind, *args))
            answer(eng.handle(kind, *args) if eng.alive else None)
            return None

        said = [False]

        def answer(value):
            if not said[0] and op[0] == "rank":
                said[0] = True
                self.at(self.r.randint(1, 4), lambda: self.step(proc, gen, value))

        late = self.faulty and self.r.random() < 0.03  # a message of an old term or epoch, kept by the network
        self.at(self.r.randint(1, 4) + (self.r.randint(50, 400) if late else 0), arrive)
        if op[0] == "post":
            self.at(1, lambda: self.step(proc, gen, None))
        else:
            self.at(VERDICT, lambda: answer(None))

    def to_pool(self, proc, gen, op, done):
        r, p = self.r, (0.04 if self.faulty else 0)

        def apply(heard):
            if self.down > self.now:
                return self.at(self.down - self.now + r.randint(1, 9), lambda: apply(heard))
            self.pool.expire()
            value = copy.deepcopy(getattr(self.pool, op[0])(*copy.deepcopy(op[1:])))
            self.pool.check()
            if heard and not done[0]:
                done[0] = True
                self.at(r.randint(1, 5), lambda: self.step(proc, gen, value))
            return None

        if r.random() < p:  # lost before or after being applied, then sent again
            if r.random() < 0.6:
                self.at(r.randint(1, 6), lambda: apply(False))
            self.at(r.randint(20, 40), lambda: proc.alive and self.to_pool(proc, gen, op, done))
        else:
            self.at(r.randint(1, 6), lambda: apply(True))
            if r.random() < p:  # a copy on an old connection, applied late
                self.at(r.randint(10, 400), lambda: apply(False))

    # -- faults
    def snapshot(self):
        self.snaps = ([*self.snaps, copy.deepcopy(self.pool.s)])[-4:]
        if self.faulty:
            self.at(40, self.snapshot)

    def fault(self):
        r = self.r
        if not self.faulty:
            return
        kind = r.choice(self.kinds)
        self.seen[kind] += 1
        if kind == "sched":
            self.replace(self.scheds, Scheduler, "s", hard=True)
        elif kind == "ep":
            self.replace(self.endpoints, Endpoint, "e", hard=True)
        elif kind == "engine":
            eng = r.choice(list(self.engines.values()))
            eng.die() if eng.alive else None
        elif kind == "pause":
            p = r.choice(self.scheds + self.endpoints + list(self.engines.values()))
            p.paused = max(p.paused, self.now + r.choice((30, 100, 250, 500)))
        elif kind == "leave":
            self.replace(self.endpoints, Endpoint, "e", hard=False)
        elif kind == "release":
            self.replace(self.scheds, Scheduler, "s", hard=False)
        elif kind == "scale" and self.shrink and len([g for g in self.engines.values() if not g.gone]) > 1:
            eng = r.choice([g for g in self.engines.values() if not g.gone])
            eng.gone, eng.alive = True, False
        elif kind == "down":
            self.down = self.now + r.randint(20, 200)
        elif kind == "rollback":
            self.rollback()
        self.at(r.randint(40, 200), self.fault)

    def rollback(self):
        if self.weak_redis and self.snaps:
            self.pool.s, self.rolled, self.snaps = copy.deepcopy(self.snaps[0]), True, self.snaps[:1]
            if "reconnect" in self.on:
                for ep in filter(lambda e: isinstance(e, Endpoint), self.endpoints):
                    self.at(self.r.randint(1, 60), lambda ep=ep: setattr(ep, "reconnected", True))

    def replace(self, group, cls, letter, hard):
        i = self.r.randrange(len(group))
        old = group[i]
        if not isinstance(old, cls):
            return
        if hard:
            old.alive = False
        elif letter == "s":
            old.draining = True
        else:
            old.leaving = True
            self.at(300, lambda: setattr(old, "alive", False))
        group[i] = Proc(letter)  # nothing there until its successor starts
        group[i].alive, group[i].leaving = False, True

        def up():
            group[i] = cls(self, f"{letter}{next(self.names)}")

        self.at(self.r.randint(20, 300), up)

    # -- a run
    def until(self, limit, over=lambda: False):
        while self.heap and self.heap[0][0] <= limit and not (self.now % 64 == 0 and over()):
            self.now, _, fn = heapq.heappop(self.heap)
            fn()
        self.now = max(self.now, limit) if not over() else self.now

    def run(self):
        self.until(2450)
        if self.r.random() < 0.5:
            self.rollback()  # one with no later fault that would heal it by chance
        self.until(2500)
        self.faulty, self.snaps = False, []
        if self.no_engine_end:
            for g in self.engines.values():
                g.gone, g.alive = True, False
        self.until(9000)
        self.quiet()
        self.until(9000 + RETENTION + 200)
        s = self.pool.s
        if not self.no_engine_end:
            need(
                not s["rec"] and not s["waiting"] and not any(s["claimed"].values()),
                f"left in the pool: {list(s['rec'])}",
            )
        live = {e.name for e in self.endpoints if e.alive}
        need(set(s["delivery"]) <= live, f"delivery streams of dead endpoints: {sorted(set(s['delivery']) - live)}")
        need(
            set(s["eng"]) <= {e for e, g in self.engines.items() if not g.gone}, "engine keys of engines that are gone"
        )
        for sc in self.scheds:
            for m in getattr(sc, "masters", {}).values():
                need(not m.rows, f"engine {m.e} still holds rows {list(m.rows)}")

    def quiet(self):
        """Everything has had time to end: what may still be open, and with which outcome each client may end."""
        for rid, rec in self.pool.s["rec"].items():
            body, mine = rec["body"], [c for c in self.clients if c.rid == rid]
            must = not self.no_engine_end or body["deadline"] or rec["cancelled"] or all(c.left for c in mine)
            need(
                rec["state"] == "ended" or not must,
                f"request {rid} never ended: {rec['state']} on {rec['engine']}, losses {rec['losses']}",
            )
        for c in self.clients:
            mine = [x for x in self.clients if x.rid == c.rid]
            if c.outcome is None:
                need(self.no_engine_end, f"{c.name} hangs with {len(c.tokens)} tokens")
                continue
            short = c.body["stop"] if c.body["stop"] is not None else c.body["length"] - 1
            whole = len(c.tokens) == short + 1
            losses = self.lost_at[c.rid]
            stuck = any(losses.count(k) >= 3 for k in losses)
            legal = {
                "LENGTH": whole and c.body["stop"] is None,
                "STOP": whole,
                "CANCELLED": any(x.asked for x in mine),
                "LEFT": True,
                "DEADLINE": bool(c.body["deadline"]),
                # A Redis that rolls back may bring back an old detach, whose grace then ends (seed 2160).
                "DETACHED": any(x.hung for x in mine) or self.rolled,
                "ABORTED": len(mine) > 1,
                "NOT_FOUND": self.rolled,
                "DATA_LOSS": self.rolled,
                "INTERNAL": c.body["poison"] is not None or stuck,
                "MODEL_CHANGED": self.trained is not None,
                "NEVER_FITS": c.body["need"] > min(g.slots for g in self.engines.values()),
            }
            self.seen[c.outcome] += 1
            need(legal.get(c.outcome), f"{c.name} ended {c.outcome} with {len(c.tokens)} of {short + 1} tokens")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seeds", type=int, default=1000)
    ap.add_argument("--first", type=int, default=0)
    ap.add_argument("--without", default="", help="rules to take away, by comma, or 'all'")
    ap.add_argument(
        "--weak", action="store_true", help="Redis may roll back and a replay may give other tokens, in every seed"
    )
    ap.add_argument("--show", type=int, default=5)
    a = ap.parse_args()
    without = list(RULES) if a.without == "all" else [name for name in a.without.split(",") if name]
    bad, seen, steps = collections.Counter(), collections.Counter(), 0
    shown = 0
    for seed in range(a.first, a.first + a.seeds):
        sim = Sim(seed, a.weak, without)
        try:
            sim.run()
        except Violation as v:
            kind = "".join(ch for ch in str(v) if not ch.isdigit())[:60]
            bad[kind] += 1
            if bad[kind] == 1 and shown < a.show:
                shown += 1
                print(f"seed {seed} at {sim.now}{' (Redis rolled back)' if sim.rolled else ''}: {v}")
        steps += sim.steps
        seen += sim.seen
    if not a.without:
        print(dict(seen))
    print(f"{a.seeds} seeds, {steps} steps, {sum(bad.values())} violations, without: {a.without or 'nothing'}")


if __name__ == "__main__":
    main()
