"""One-line changes of the code that talks to the pool. Each of them breaks a rule that some test must defend.

A mutation replaces a text that occurs once in its file by another one. The first ones were named when the pool was
read line by line; the others are what could lose a request, repeat a token, or wait for ever.
"""

from dataclasses import dataclass

LEDGER = "scheduler/orca_scheduler/ledger.py"
OUTPUT = "scheduler/orca_scheduler/output.py"
MASTER = "scheduler/orca_scheduler/master.py"
LIFECYCLE = "scheduler/orca_scheduler/lifecycle.py"
SCHEDULER = "scheduler/orca_scheduler/scheduler.py"
SHARE = "scheduler/orca_scheduler/share.py"
RANKS = "scheduler/orca_scheduler/ranks.py"
RANK = "scheduler/orca_scheduler/rank.py"
DELIVERY = "endpoint/orca_endpoint/delivery.py"
CALL = "endpoint/orca_endpoint/call.py"
TRANSCRIPT = "endpoint/orca_endpoint/transcript.py"
LINK = "pool/orca_pool/link.py"

# The tests of each file, the cheapest first. The simulator runs before them.
TESTS = {
    LEDGER: ["tests/scheduler/test_ledger.py", "tests/scheduler/test_master.py"],
    OUTPUT: ["tests/scheduler/test_output.py", "tests/scheduler/test_ledger.py"],
    MASTER: ["tests/scheduler/test_master.py"],
    LIFECYCLE: [
        "tests/scheduler/test_transcripts.py",
        "tests/scheduler/test_lifecycle_properties.py",
        "tests/scheduler/test_master.py",
    ],
    SCHEDULER: [
        "tests/scheduler/test_scheduler.py",
        "tests/scheduler/test_rebalancing.py",
    ],
    SHARE: ["tests/scheduler/test_share.py"],
    RANKS: ["tests/scheduler/test_ranks.py", "tests/scheduler/test_master.py"],
    RANK: ["tests/scheduler/test_ranks.py", "tests/scheduler/test_master.py"],
    DELIVERY: ["tests/endpoint/test_faults.py", "tests/endpoint/test_chaos.py"],
    CALL: ["tests/endpoint/test_faults.py", "tests/endpoint/test_grpc.py"],
    TRANSCRIPT: ["tests/endpoint/test_transcript.py", "tests/endpoint/test_faults.py"],
    LINK: ["tests/pool/test_link.py", "tests/pool/test_any_redis.py"],
}


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in the file, becomes `new`."""

    name: str
    file: str  # below services/
    old: str
    new: str


M = Mutation
MUTATIONS = [
    # Those that survived the first tests.
    M("stale rows are never freed", MASTER, "        message.free_rows.extend(self._stale_rows)\n", ""),
    M(
        "ranks' iteration numbers are ignored",
        LIFECYCLE,
        "above = max(greeted.standing.iteration for greeted in self.greeted.values())",
        "above = 0",
    ),
    M("a takeover counts no loss", LIFECYCLE, "(event.claims, event.taken_over)", "(event.claims, False)"),
    M("claims that were not heard of are reconciled", LEDGER, "if claim <= have and claim not in before", "if True"),
    M(
        "fresh claims are dropped by reconciliation",
        LEDGER,
        "self._forget(before - set(claims.values()))",
        "self._forget(self.outputs.held.keys() - set(claims.values()))",
    ),
    M("commits behind have no bound", LEDGER, "self._uncommitted <= MAX_BEHIND and iteration", "iteration"),
    M("a scheduler's share is floored", SHARE, " or (mine == each and with_more < more)", ""),
    M(
        "a late master judges silence",
        RANKS,
        "silent > self._silence and self._pulse.on_time(self._silence)",
        "silent > self._silence",
    ),
    M("holes between looks do not count", SCHEDULER, "is None or now - self._last_look > GAP_SECONDS:", "is None:"),
    M(
        "a late endpoint is not at fault",
        DELIVERY,
        "return self.leaving or now < self._late_until or now - self._renewed > GAP_SECONDS",
        "return self.leaving",
    ),
    M(
        "a call that breaks at its stop string is not detached",
        CALL,
        'self._refused or self._transcript.next == "end"',
        'self._refused or self._transcript.next in ("end", "stop")',
    ),
    # Those that survived the next ones.
    M("a connection is kept after close", LINK, "if self._closed or line.losses", "if line.losses"),
    M("the cursor stays at a new incarnation", DELIVERY, "self._last, self._cursor = 0, None", "self._last = 0"),
    M(
        "a detach does not wait for its attach",
        DELIVERY,
        "        await asyncio.wait([after])\n        if not",
        "        if after.done() and not",
    ),
    M(
        "entries of an old incarnation count",
        DELIVERY,
        "if incarnation != self.incarnation:\n                continue",
        "if False:\n                continue",
    ),
    M("an attach is cancelled with its call", CALL, "asyncio.shield(self._operation)", "self._operation"),
    M("a release does not wait for give-backs", LEDGER, "        await self._all_returned.wait()\n", ""),
    M("rows of an unanswered commit are forgotten", LEDGER, "            self.outputs.unanswered(rows)\n", ""),
    M(
        "a give-back overtakes the tokens",
        LEDGER,
        "        try:\n            await self._flush()\n",
        "        try:\n",
    ),
    # The ledger.
    M("a lost claim answer is not noticed", LEDGER, "self._unheard = True  #", "self._unheard = False  #"),
    M("a hint without room is forgotten", LEDGER, "self._needs = max(self._needs, 1)", "pass"),
    M(
        "an outage keeps the claims' version",
        LEDGER,
        'self._claims_version if self._claims_generation == self._pool.generation else ""',
        "self._claims_version",
    ),
    M(
        "a version is known before its claims are held",
        LEDGER,
        "if set(renewed.claims.values()) <= self.outputs.held.keys() | self._orphans.keys():",
        "if True:",
    ),
    M("an orphan is given back once in a term", LEDGER, "                self._orphans.pop(claim, None)\n", ""),
    M("a new master has heard of no claim", LEDGER, "        self._last_claim = held.last_claim\n", ""),
    M("iterations begin below the reserve", LEDGER, "self.iteration = self._reserved  #", "self.iteration = 0  #"),
    M(
        "an epoch need not be above the ranks'",
        LEDGER,
        "max(await self._pool.number(self.epoch), above + 1)",
        "await self._pool.number(self.epoch)",
    ),
    M("ranks hear of an epoch first", LEDGER, "            await self._renew(epoch=epoch)\n", ""),
    M("a claim is asked whatever room there is", LEDGER, "room.requests and room.slots >= self._needs", "True"),
    M(
        "a flush does not wait for the commit under way",
        LEDGER,
        "self._uncommitted or self.outputs.dirty or self._commit_sent",
        "self.outputs.dirty",
    ),
    M("claims go on before the core knows", LEDGER, "                await self._admitted.wait()\n", ""),
    M(
        "a corrected row waits for the next iteration",
        LEDGER,
        "        if self.outputs.dirty:\n            self._committer.set()\n        return True",
        "        return True",
    ),
    M("a lost engine claims on", LEDGER, 'again."""\n        self._engine_slots = 0', 'again."""\n        return'),
    M(
        "an answered claim is taken again",
        LEDGER,
        "[claimed for claimed in answer.requests if claimed.claim > self._last_claim]",
        "list(answer.requests)",
    ),
    M("the reserve never shrinks", LEDGER, "= renewed.reserved  #", "= max(self._reserved, renewed.reserved)  #"),
    # What is held.
    M(
        "a row with another base is not sent again",
        OUTPUT,
        "                held.acked = answer\n                self.dirty[row.claim] = held\n",
        "                held.acked = answer\n",
    ),
    M("a dropped row is committed", OUTPUT, "        self.dirty.pop(claim, None)\n", ""),
    M(
        "tokens made meanwhile count as committed",
        OUTPUT,
        "held.acked = row.base + len(row.tokens) // TOKEN.size",
        "held.acked = len(held.tokens) // TOKEN.size",
    ),
    # The master.
    M(
        "an iteration of an earlier life counts",
        MASTER,
        "if life != self.lifecycle.life or report.number",
        "if report.number",
    ),
    M("a loss leaves the ledger claiming", MASTER, "                self._ledger.lost()\n", ""),
    M("tokens of a lost engine wait on", MASTER, "                self._returned.clear()\n", ""),
    M(
        "claims that ended before they ran are admitted",
        MASTER,
        "            self._step_life(Gone(self._now, claims))",
        "            pass",
    ),
    M("used iteration numbers are not told", MASTER, "        self._ledger.used(action.iteration)\n", ""),
    M("a request begins without its tokens", MASTER, "[*record.prompt_ids, *generated]", "[*record.prompt_ids]"),
    M("the claimer never hears of an admission", MASTER, "                    self._ledger.admitted()\n", ""),
    M("the claimer never hears of room", MASTER, "        self._ledger.claimable()\n        if not", "        if not"),
    M(
        "the core runs ahead of the pool",
        MASTER,
        "while self._returned and self._ledger.keeps_up(self._returned[0].report.number):",
        "while self._returned:",
    ),
    # The lifecycle.
    M("a life begins before its fences", LIFECYCLE, "        if lost.fencing:\n            return []\n", ""),
    M(
        "claims are kept for a new epoch",
        LIFECYCLE,
        "            actions += self._give_back()  # there",
        "            pass  # there",
    ),
    M(
        "an epoch is given below the ranks'",
        LIFECYCLE,
        "above = max(greeted.standing.epoch for greeted in self.greeted.values())",
        "above = 0",
    ),
    M(
        "a claim that ended is given back",
        LIFECYCLE,
        "                    self.unadmitted.pop(claim, None)",
        "                    pass",
    ),
    M(
        "a greeting keeps claims without a bound",
        LIFECYCLE,
        "if self.unadmitted and len(self.greeted) < self.shape.ranks:",
        "if False:",
    ),
    M("a retired engine keeps its claims", LIFECYCLE, "*self._give_back(), Retire()]", "Retire()]"),
    M(
        "a verdict outlives its life",
        LIFECYCLE,
        '"""Hangs up, if anything is open."""\n        self.verdict_at = None',
        '"""Hangs up."""',
    ),
    # The scheduler.
    M(
        "a failed read does not start the count again",
        SCHEDULER,
        "self._sights.clear()  # a failed",
        "pass  # a failed",
    ),
    M("a lease that moves is not seen", SCHEDULER, "if sight is None or sight.state != state:", "if sight is None:"),
    M("several engines are released at a time", SCHEDULER, "self._releasing is not None or now", "now"),
    M("a lone scheduler gives its engines up", SCHEDULER, "        if living < 2:\n            return\n", ""),
    M(
        "one engine is released in a life",
        SCHEDULER,
        "                        self._releasing = None\n",
        "                        pass\n",
    ),
    M(
        "a retired engine's requests count a loss",
        SCHEDULER,
        "candidate is not None and held_by_another",
        "held_by_another",
    ),
    # The ranks.
    M("an answer of an earlier life counts", RANKS, "if report.number != self._progress.oldest:", "if False:"),
    M("an abandoned iteration condemns", RANK, "if report.peer_lost and report.epoch < self._asked_for:", "if False:"),
    # The delivery.
    M("a missed entry is not noticed", DELIVERY, "if entry.number != self._last + 1:", "if False:"),
    M("packets of another attempt are shown", DELIVERY, "if call.attempt == packet.attempt:", "if True:"),
    M("a reconnect keeps the incarnation", DELIVERY, "if known and generation == self._generation:", "if known:"),
    M(
        "a refused attach is detached",
        DELIVERY,
        "after.exception() is None and after.result() in NEVER_ATTACHED",
        "False",
    ),
    M("a detach is tried for ever", DELIVERY, "asyncio.timeout(DETACH_PATIENCE)", "asyncio.timeout(None)"),
    M("an old registration stays", DELIVERY, "register=True, replaces=old", "register=True"),
    M("entries that were read stay in Redis", DELIVERY, "(self.incarnation, read=self._last)", "(self.incarnation)"),
    # The call.
    M(
        "a slow client has no bound",
        CALL,
        "if self.buffered > max(self._limits.buffer, self._transcript.count):",
        "if False:",
    ),
    M(
        "healing is counted over the call",
        CALL,
        "                    self._healing_until = None",
        "                    pass",
    ),
    M("healing has no bound", CALL, "if now > self._healing_until:", "if False:"),
    M(
        "packets before an attach are shown again",
        CALL,
        "        self._drop_inbox()  # the answer holds all of it\n",
        "",
    ),
    M(
        "an endpoint cannot leave at a stop string",
        CALL,
        "        while True:\n            if self._leaving():\n                raise leaving_error()\n            said",
        "        while True:\n            said",
    ),
    M("a call that lost tokens lives on", CALL, "            return Grace(0.0)\n", "            pass\n"),
    # The transcript.
    M("a changed token is shown", TRANSCRIPT, "if known and any(", "if False and any("),
    M("fewer tokens than from_index are taken", TRANSCRIPT, "max(len(self._ids), self._from_index)", "len(self._ids)"),
    M("a gap is shown", TRANSCRIPT, "        if first > len(ids):", "        if False:"),
    # The link.
    M(
        "an outage is not counted",
        LINK,
        '"""Notes that Redis is away."""\n        self._away = True',
        '"""Notes that."""',
    ),
    M("another server goes unnoticed", LINK, "if self._away or self._server not in (None, server):", "if self._away:"),
    M(
        "a cancelled exchange keeps its connection",
        LINK,
        "        except BaseException:\n            await connection.disconnect(nowait=True)\n",
        "        except BaseException:\n            await self._keep(line)\n",
    ),
    M("an exchange has no bound", LINK, "asyncio.timeout(limit)", "asyncio.timeout(None)"),
    M("renewals wait for a turn", LINK, "        if renewal:", "        if False:"),
    M("a turn is waited for without a bound", LINK, "asyncio.timeout(self._patience)", "asyncio.timeout(None)"),
    M("a replica that lags is enough", LINK, "if here < 1 or there < replicas:", "if False:"),
    M("a cluster's old node is asked on", LINK, "        self._primary.forget()\n", ""),
]
