"""Folds the feeds of all schedulers into one picture, which the page shows. Pure: no clock, no I/O.

A browser gets the whole picture once, and then what has changed. All parts are set by their names, so that a change
that comes twice changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from .incidents import Incident, Incidents, plain

ITERATIONS = 64  # of each engine that are kept, and that a change brings at most
ENDED = 150  # requests that are kept after their end
WINDOW = 5.0  # seconds over which rates and busy shares are counted
LETTER_SECONDS = 10.0  # for which an ended request keeps its letter for itself
HUES = 8
GONE_SECONDS = 15.0  # after which an engine that no scheduler names any more is forgotten


@dataclass(slots=True)
class Request:
    """One request, from its claim to its end, over all engines that have had it."""

    number: int
    letter: str
    hue: int  # which of HUES colours; those of the moment have different ones where there are enough
    id: str
    input: int
    max_new: int
    made: int
    submitted: float
    engine: str
    state: str = "claimed"  # running, claimed (not begun, or given back), or ended
    reason: str = ""  # why it ended
    iterations: int = 0
    began: float | None = None  # when its first iteration was scheduled
    first: float | None = None  # when its first token came
    last: float | None = None  # when its last token came
    gap: float = 0.0  # the longest time between two tokens
    ended: float | None = None
    text: list[list[int]] | None = None  # token ids of its prompt and its answer, where they are shown

    def plain(self) -> dict[str, Any]:
        return {
            "n": self.number,
            "letter": self.letter,
            "hue": self.hue,
            "id": self.id,
            "input": self.input,
            "max_new": self.max_new,
            "made": self.made,
            "submitted": self.submitted,
            "engine": self.engine,
            "state": self.state,
            "reason": self.reason,
            "iterations": self.iterations,
            "began": self.began,
            "first": self.first,
            "gap": self.gap,
            "ended": self.ended,
            "text": self.text is not None,
        }


@dataclass(slots=True)
class Engine:
    """One engine as the page draws it."""

    state: dict[str, Any] = field(default_factory=dict[str, Any])
    named: float = 0.0  # when a scheduler named it last
    rows: dict[int, tuple[Request, list[int]]] = field(default_factory=dict[int, tuple[Request, list[int]]])
    open: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])  # iterations without times
    done: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=ITERATIONS))
    claims: dict[int, Request] = field(default_factory=dict[int, Request])
    asked: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])  # claims that are to arrive
    tokens: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    busy: deque[tuple[float, list[float]]] = field(default_factory=deque[tuple[float, list[float]]])
    new: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # iterations since the last change
    dirty: set[int] = field(default_factory=set[int])  # rows that have changed


class Picture:
    """Takes lines of feeds, gives the whole picture and its changes."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._sources: dict[str, dict[str, Any]] = {}  # address -> how its scheduler is
        self._requests: dict[tuple[str, float], Request] = {}
        self._numbers = 0
        self._letter = -1
        self._queue: tuple[int, float] | None = None
        self._judged: dict[str, int] = {}  # scheduler -> the last event of it that failures know
        self._drawn: dict[str, int] = {}  # scheduler that is followed in full -> the last event of it that all know
        self._incidents = Incidents()
        self._changed_requests: dict[int, Request] = {}
        self._changed_incidents: dict[int, Incident] = {}

    # -- what comes in

    def line(self, address: str, line: Mapping[str, Any], now: float) -> None:
        """Takes a line of the feed of the scheduler at an address."""
        name = line["scheduler"]
        before = self._sources.get(address)
        if before is not None and before["name"] != name:
            self._judged.pop(before["name"], None)
            self._drawn.pop(before["name"], None)
        self._sources[address] = {"name": name, "why": None, "engines": list(line["engines"])}
        if line["queue"] is not None:
            self._queue = line["queue"]
        for engine, state in line["engines"].items():
            known = self._engine(engine)
            term = known.state.get("term", 0)
            if state["term"] < term:
                continue  # an old master that has not noticed yet
            if state["term"] > term:
                self._taken_over(known)
            known.state, known.named = state | {"scheduler": name}, now
            self._note(self._incidents.driven(engine, name, state["why"] is None, now))
        if "held" in line:
            self._drawn.setdefault(name, 0)
        for engine, held in line.get("held", {}).items():
            claims = self._engine(engine).claims
            for claim in claims.keys() - {request["claim"] for request in held}:
                self._end(claims.pop(claim), now, "UNSEEN")  # while the feed was away
            for request in held:
                self._claimed(engine, request)
        judged, drawn = self._judged.get(name, 0), self._drawn.get(name)
        for event in line["events"]:
            engine = self._engine(event["engine"])
            if event["term"] < engine.state.get("term", 0):
                continue
            if event["number"] > judged:
                self._note(self._incidents.event(event, rank_names(event["engine"], engine.state)))
            if drawn is not None and event["number"] > drawn:
                self._event(engine, event)
        if line["events"]:
            newest = line["events"][-1]["number"]
            self._judged[name] = max(judged, newest)
            if drawn is not None:
                self._drawn[name] = max(drawn, newest)
        for engine, rows in line.get("rows", {}).items():
            self._rows(self._engine(engine), rows)

    def away(self, address: str, why: str, now: float) -> None:
        """A scheduler's feed has broken."""
        source = self._sources.setdefault(address, {"name": "", "why": None, "engines": list[str]()})
        first = source["why"] is None
        source["why"] = why
        for engine in source["engines"]:
            self._engine(engine).named = now  # until another scheduler names it
            if not first:
                continue
            if self._engine(engine).state.get("scheduler") == source["name"]:
                live = sum(r.ended is None for r in self._engine(engine).claims.values())
                self._note(self._incidents.driver_gone(engine, source["name"], now, live))

    def rest(self) -> None:
        """Keeps engines and failures alone: feeds are not followed in full from now on."""
        self._drawn.clear()
        self._requests.clear()
        self._changed_requests.clear()
        for engine in self._engines.values():
            for part in (engine.rows, engine.open, engine.done, engine.claims, engine.asked, engine.new, engine.dirty):
                part.clear()

    def forget(self, address: str) -> None:
        """Forgets a scheduler that is gone."""
        self._sources.pop(address, None)

    # -- what goes out

    def whole(self, now: float) -> dict[str, Any]:
        """The whole picture, for a browser that has none."""
        return self._common(now) | {
            "whole": True,
            "rows": {name: {row: _row(*one) for row, one in e.rows.items()} for name, e in self._engines.items()},
            "iterations": {name: list(engine.done) for name, engine in self._engines.items()},
            "requests": [request.plain() for request in self._requests.values()],
            "incidents": [plain(incident) for incident in self._incidents.all],
        }

    def changes(self, now: float) -> dict[str, Any]:
        """Returns the changes since the last call, and all that is small."""
        found = self._common(now)
        rows = {
            name: {row: _row(*engine.rows[row]) if row in engine.rows else None for row in engine.dirty}
            for name, engine in self._engines.items()
            if engine.dirty
        }
        iterations = {name: engine.new[-ITERATIONS:] for name, engine in self._engines.items() if engine.new}
        for engine in self._engines.values():
            engine.dirty.clear()
            engine.new.clear()
        self._forget_old(now)
        requests = [request.plain() for request in self._changed_requests.values()]
        incidents = [plain(incident) for incident in self._changed_incidents.values()]
        self._changed_requests.clear()
        self._changed_incidents.clear()
        parts = {"rows": rows, "iterations": iterations, "requests": requests, "incidents": incidents}
        return found | {name: part for name, part in parts.items() if part}

    def tokens_of(self, number: int) -> tuple[list[int], list[int]] | None:
        """Token ids of a request's prompt and answer, where the schedulers show them."""
        for request in self._requests.values():
            if request.number == number and request.text is not None:
                return request.text[0], request.text[1]
        return None

    def id_of(self, number: int) -> str | None:
        """The id of a request that is not forgotten."""
        return next((request.id for request in self._requests.values() if request.number == number), None)

    def _common(self, now: float) -> dict[str, Any]:
        return {
            "now": now,
            "queue": self._queue,
            "schedulers": {a: {"name": s["name"], "why": s["why"]} for a, s in self._sources.items()},
            "engines": {name: engine.state | self._rates(engine, now) for name, engine in self._engines.items()},
        }

    def _rates(self, engine: Engine, now: float) -> dict[str, Any]:
        for ring in (engine.tokens, engine.busy):
            while ring and ring[0][0] < now - WINDOW:
                ring.popleft()
        stages = engine.state.get("pp", 1)
        busy = [round(min(sum(one[n] for _, one in engine.busy) / WINDOW, 1.0), 3) for n in range(stages)]
        return {
            "tokens_per_second": round(sum(n for _, n in engine.tokens) / WINDOW, 1),
            "iterations_per_second": round(len(engine.busy) / WINDOW, 1),
            "busy": busy,
        }

    # -- events

    def _engine(self, name: str) -> Engine:
        return self._engines.setdefault(name, Engine())

    def _event(self, engine: Engine, event: Mapping[str, Any]) -> None:
        """Takes a journal's line (docs/journal.md)."""
        at = event["at"]
        match event["line"]:
            case {"note": {"claims": names, "submitted": submitted}}:
                for claim, name in names.items():
                    engine.asked[int(claim)] = {"id": name, "submitted": submitted[claim] / 1e6}
            case {"note": {"texts": texts}}:
                for claim, text in texts.items():
                    engine.asked.setdefault(int(claim), {})["text"] = text
            case {"note": {"iteration": number, "times": times}}:
                self._timed(engine, number, times, at)
            case {"event": [kind, fields], "actions": actions}:
                if kind == "Arrived":
                    for arrival in fields["requests"]:
                        self._arrived(engine, event["engine"], arrival)
                elif kind == "EngineLost":
                    self._lost(engine)
                elif kind == "Cancelled":
                    for claim in fields["claims"]:
                        if (request := engine.claims.pop(claim, None)) is not None:
                            self._end(request, at, "CANCELLED")
                for name, action in sorted(actions, key=lambda one: one[0] == "ScheduleBatch"):
                    match name:
                        case "Commit":
                            self._take_outcomes(engine, action["outcomes"], at)
                        case "GiveBack":
                            self._give_back(engine, action["requests"])
                        case "HandOver":
                            self._give_back(engine, [(claim, False) for claim, *_ in action["requests"]])
                        case "ScheduleBatch":
                            self._batch(engine, action, at)
                        case _:
                            pass  # nothing of it is shown
            case _:
                pass

    def _arrived(self, engine: Engine, name: str, arrival: Mapping[str, Any]) -> None:
        asked = engine.asked.pop(arrival["claim"], None)
        if asked is not None and "id" in asked:
            claim, made = arrival["claim"], arrival.get("generated", 0)
            numbers = {"input": arrival["input_tokens"], "max_new": arrival["max_new_tokens"]}
            self._claimed(name, {"claim": claim, "made": made} | numbers | asked)

    def _claimed(self, engine: str, given: Mapping[str, Any]) -> None:
        key = given["id"], given["submitted"]
        request = self._requests.get(key)
        if request is None:
            self._numbers += 1
            request = Request(
                self._numbers,
                *self._next_mark(given["submitted"]),
                *(given["id"], given["input"], given["max_new"], given["made"], given["submitted"], engine),
            )
            request.text = given.get("text")
            self._requests[key] = request
        known = self._engine(engine).claims
        if known.get(given["claim"]) is request:
            return
        known[given["claim"]] = request
        request.engine, request.state = engine, "claimed"
        self._changed(request)

    def _batch(self, engine: Engine, batch: Mapping[str, Any], at: float) -> None:
        for row in batch["free_rows"]:
            if engine.rows.pop(row, None) is not None:
                engine.dirty.add(row)
        number, members = batch["iteration"], list[tuple[int, int, int]]()
        columns = rows_of(batch["members"], claim=0, row=0, start=0, count=1, new_blocks=())
        for claim, row, start, count, blocks in columns:
            request = engine.claims.get(claim)
            if request is None:
                continue
            members.append((request.number, start, count))
            request.iterations += 1
            request.state = "running"
            request.began = at if request.began is None else request.began
            if blocks:
                held = engine.rows.get(row)
                before = held[1] if held is not None and held[0] is request else []
                engine.rows[row] = request, [*before, *(b for b in blocks if b not in before)]
                engine.dirty.add(row)
            self._changed(request)
        engine.open[number] = {"n": number, "members": members, "stop": batch["stop"]}
        while len(engine.open) > ITERATIONS:
            del engine.open[next(iter(engine.open))]

    def _timed(self, engine: Engine, number: int, times: Iterable[list[int]], at: float) -> None:
        iteration = engine.open.pop(number, None)
        if iteration is None:
            return
        # stage, tensor rank, received, taken, started, computed, sent
        first = {stage: [moment / 1e9 for moment in rest[2:5]] for stage, rank, *rest in times if not rank}
        iteration["stages"] = [first[stage] for stage in sorted(first)]
        engine.done.append(iteration)
        engine.new.append(iteration)
        engine.busy.append((at, [sent - started for started, _, sent in iteration["stages"]]))

    def _take_outcomes(self, engine: Engine, outcomes: Mapping[str, Any], at: float) -> None:
        made = 0
        for claim, index, token, reason in rows_of(outcomes, claim=0, base=0, token=None, finish=None):
            request = engine.claims.get(claim)
            if token is not None:
                made += 1
            if request is None:
                continue
            if token is not None and index >= request.made:  # others were known when the page began to look
                request.made = index + 1
                if request.text is not None:
                    request.text[1].append(token)
                request.first = at if index == 0 else request.first
                request.gap = max(request.gap, at - (at if request.last is None else request.last))
                request.last = at
                self._changed(request)
            if reason is not None:
                self._end(engine.claims.pop(claim), at, reason)
        if made:
            engine.tokens.append((at, made))

    def _give_back(self, engine: Engine, requests: Iterable[tuple[int, bool]]) -> None:
        for claim, _ in requests:
            if (request := engine.claims.pop(claim, None)) is not None:
                request.state = "claimed"
                self._changed(request)

    def _end(self, request: Request, at: float, reason: str) -> None:
        request.state, request.reason, request.ended = "ended", reason, at
        self._changed(request)

    def _taken_over(self, engine: Engine) -> None:
        """Another master begins: it admits what it has claimed."""
        for request in engine.claims.values():
            if request.ended is None:
                request.state = "claimed"
                self._changed(request)
        engine.claims.clear()
        engine.asked.clear()
        self._lost(engine)

    def _lost(self, engine: Engine) -> None:
        engine.dirty |= engine.rows.keys()
        engine.rows.clear()
        engine.open.clear()

    def _rows(self, engine: Engine, rows: Iterable[tuple[int, int, list[int]]]) -> None:
        found = {row: (engine.claims[claim], blocks) for claim, row, blocks in rows if claim in engine.claims}
        engine.dirty |= engine.rows.keys() | found.keys()
        engine.rows = found
        for request, _ in found.values():
            request.state = "running"
            self._changed(request)

    # -- bookkeeping

    def _note(self, incident: Incident | None) -> None:
        if incident is not None:
            self._changed_incidents[incident.number] = incident

    def _changed(self, request: Request) -> None:
        self._changed_requests[request.number] = request

    def _next_mark(self, now: float) -> tuple[str, int]:
        """The next letter that no request of the moment has, A to Z, then AA, AB, ...; and the colour that fewest
        have."""
        recent = [r for r in self._requests.values() if r.ended is None or now - r.ended < LETTER_SECONDS]
        uses = [0] * HUES
        for request in recent:
            uses[request.hue] += 1
        hue = min(range(HUES), key=lambda n: (uses[n], (n - self._numbers) % HUES))
        return self._next_letter({request.letter for request in recent}), hue

    def _next_letter(self, taken: set[str]) -> str:
        for n in range(1, 27):
            letter = chr(65 + (self._letter + n) % 26)
            if letter not in taken:
                self._letter = ord(letter) - 65
                return letter
        return next(
            name for a in range(26 * 26) if (name := f"{chr(65 + a // 26)}{chr(65 + a % 26)}") not in taken or a == 675
        )

    def _forget_old(self, now: float) -> None:
        held = {request.number for engine in self._engines.values() for request in engine.claims.values()}
        rest = [key for key, request in self._requests.items() if request.number not in held]
        for key in rest[: max(0, len(rest) - ENDED)]:
            del self._requests[key]
        for name in [name for name, engine in self._engines.items() if engine.named < now - GONE_SECONDS]:
            del self._engines[name]


def rows_of(columns: Mapping[str, Any], **usual: Any) -> Iterable[tuple[Any, ...]]:
    """The rows of a journal's columns. One that is left out has the usual value in each row."""
    length = len(columns.get("claim", ()))
    return zip(*(columns.get(name, repeat(value, length)) for name, value in usual.items()), strict=True)


def _row(request: Request, blocks: list[int]) -> list[Any]:
    """A row as plain values: its request, and its blocks as runs of (first, count)."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return [request.number, runs]


def rank_names(engine: str, state: Mapping[str, Any]) -> list[str]:
    """The ranks of an engine as a reader calls them."""
    ranks = state.get("ranks", ())
    one = len({rank["tensor_rank"] for rank in ranks}) < 2
    return [_rank_name(n, engine, rank, one) for n, rank in enumerate(ranks)]


def _rank_name(n: int, engine: str, rank: Mapping[str, Any], one: bool) -> str:
    where = f"stage {rank['stage']}" + ("" if one else f", tensor rank {rank['tensor_rank']}")
    return f"rank {n} of {engine} ({where})"
