// The requests of the last minutes, and the story of one.

import { chip, clock, h, number, plural, say, seconds } from "./dom.js";
import { key } from "./live.js";

const MOST = 40;
const WORDS = { LENGTH: "length", EOS: "end of text", STOP_TOKEN: "stop token", STOP: "stop", CANCELLED: "cancelled", DEADLINE: "deadline", NOT_FINITE: "not finite", STUCK: "stuck", UNSEEN: "ended unseen" };

function stateOf(request) {
  if (request.state === "ended") return WORDS[request.reason] ?? request.reason.toLowerCase();
  if (request.state === "running") return "runs";
  return request.made || request.iterations ? "starts again" : "begins soon";
}

class Requests extends HTMLElement {
  rows = new Map();

  connectedCallback() {
    this.body = h("tbody");
    this.empty = h("p", { class: "muted" }, "No request so far. The chat makes one.");
    const heads = [["Request"], ["State"], ["Tokens", "num"], ["Waited", "num wide-only"], ["First token", "num wide-only"], ["Longest gap", "num wide-only"]];
    this.table = h("table", {}, h("caption", { class: "hidden" }, "Requests of the last minutes, the newest first"), h("thead", {}, h("tr", {}, ...heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), this.body);
    this.append(this.empty, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of requests" }, this.table));
  }

  draw(store) {
    const all = [...store.requests.values()].sort((a, b) => (a.state === "ended") - (b.state === "ended") || b.n - a.n).slice(0, MOST);
    this.empty.hidden = all.length > 0;
    this.table.hidden = !all.length;
    const kept = new Set(all.map((request) => request.n));
    for (const [n, row] of this.rows) {
      if (!kept.has(n)) {
        row.line.remove();
        this.rows.delete(n);
      }
    }
    let before = null;
    for (const request of all) {
      const row = this.rows.get(request.n) ?? this.add(request);
      this.fill(row, request, store.now);
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== row.line && !row.line.contains(document.activeElement)) this.body.insertBefore(row.line, place);
      before = row.line;
    }
  }

  add(request) {
    const open = () => document.dispatchEvent(new CustomEvent("story", { detail: request.n }));
    const button = h("button", { type: "button", class: "request", "aria-haspopup": "dialog", onclick: open }, h("span", { class: "hidden" }, "Story of request "), chip(request), h("code", {}, request.id));
    const cells = Array.from({ length: 5 }, () => h("td"));
    cells[1].className = "num";
    const bar = h("span", { class: "bar" }, h("i"));
    const count = h("span");
    cells[1].append(count, bar);
    for (const cell of cells.slice(2)) cell.className = "num wide-only";
    const line = h("tr", {}, h("th", { scope: "row" }, button), ...cells);
    const row = { line, cells, count, bar: bar.firstChild };
    this.rows.set(request.n, row);
    return row;
  }

  fill(row, request, now) {
    const told = request.state + request.made + request.reason;
    const began = request.story.find((part) => part[1] === "started")?.[0];
    if (row.told === told && began !== undefined) return;
    row.told = told;
    row.line.dataset.state = request.state;
    say(row.cells[0], stateOf(request));
    say(row.count, `${request.made} of ${request.max_new}`);
    row.bar.style.width = `${Math.min(100, (100 * request.made) / Math.max(1, request.max_new))}%`;
    say(row.cells[2], began === undefined && request.made ? "" : seconds(Math.max(0, (began ?? request.ended ?? now) - request.submitted)));
    say(row.cells[3], request.first ? seconds(Math.max(0, request.first - request.submitted)) : "");
    say(row.cells[4], request.gap ? seconds(request.gap) : "");
  }
}

const TELL = {
  queued: () => "came into the queue",
  claimed: (detail) => `${detail} claimed it`,
  started: (detail) => `began: ${detail}`,
  "first token": () => "made its first token",
  "given back": (detail) => `went back to the queue: ${detail}`,
  ended: (detail) => `ended: ${WORDS[detail] ?? detail.toLowerCase()}`,
};

/** One request from its arrival to its end. */
class Story extends HTMLElement {
  show(n, store) {
    this.n = n;
    this.told = "";
    this.textOf = null;
    this.draw(store);
    const dialog = this.closest("dialog");
    if (!dialog.open) dialog.showModal();
  }

  draw(store) {
    const request = this.n === undefined ? null : store.requests.get(this.n);
    if (!request || (this.told && !this.closest("dialog").open)) return;
    const told = `${request.made} ${request.story.length} ${request.state} ${request.text}`;
    if (told === this.told) return;
    if (!this.told) this.build(request);
    this.told = told;
    this.lead.replaceChildren(...sentences(request, store.now).map((one) => h("p", {}, one)));
    this.bar.replaceChildren(...segments(request, store.now));
    const begin = request.submitted;
    this.list.replaceChildren(...request.story.map(([at, what, detail]) => h("li", {}, h("time", {}, `+${seconds(Math.max(0, at - begin))}`), h("span", {}, TELL[what]?.(detail) ?? `${what} ${detail}`))));
  }

  build(request) {
    this.lead = h("div");
    this.bar = h("div", { class: "life", "aria-hidden": "true" });
    this.list = h("ol");
    this.text = h("div", { class: "text" });
    const close = h("button", { type: "button", class: "quiet", onclick: () => this.closest("dialog").close() }, "Close");
    const show = h("button", { type: "button", onclick: () => this.showText(request.n) }, "Show the text");
    show.hidden = !request.text;
    this.replaceChildren(
      h("div", { class: "title" }, chip(request), h("h2", { id: "story-title" }, `Request ${request.letter}`), close),
      h("p", {}, h("code", {}, request.id), h("span", { class: "muted" }, ` came at ${clock(request.submitted)}`)),
      this.lead, this.bar, h("h3", {}, "What happened"), this.list, show, this.text,
    );
  }

  async showText(n) {
    const answer = await fetch(`requests/${n}/text`, { headers: key.headers });
    const found = await answer.json();
    const parts = answer.ok ? [["Prompt", found.prompt], ["Answer", found.text]] : [["", found.error.message]];
    this.text.replaceChildren(...parts.flatMap(([name, text]) => [h("h3", {}, name), h("pre", {}, text ?? "The endpoint does not tell.")]));
  }
}

function sentences(request, now) {
  const began = request.story.find((part) => part[1] === "started")?.[0];
  const end = request.ended ?? now;
  const found = [];
  const waited = Math.max(0, (began ?? end) - request.submitted);
  found.push(`${plural(request.input, "input token")}, ${request.made} of at most ${plural(request.max_new, "new token")}.`);
  found.push(began ? `It waited ${seconds(waited)} before its first iteration${request.first ? `, and had its first token after ${seconds(Math.max(0, request.first - request.submitted))}` : ""}.` : request.made ? "It had begun before this page looked." : `It has waited ${seconds(waited)} so far.`);
  if (request.iterations) {
    const mates = request.mates / request.iterations;
    found.push(`It took part in ${plural(request.iterations, "iteration")}, with ${number(mates)} other${mates === 1 ? "" : "s"} on average${request.gap ? `; the longest gap between two tokens was ${seconds(request.gap)}` : ""}.`);
  }
  if (request.ended !== null) found.push(`It ended after ${seconds(Math.max(0, end - request.submitted))}: ${stateOf(request)}.`);
  return found;
}

/** Spans of a request's life: waiting, running, given back. */
function segments(request, now) {
  const end = Math.max(request.ended ?? now, request.submitted + 1e-6);
  const whole = end - request.submitted;
  const marks = request.story.filter(([, what]) => ["queued", "started", "given back", "ended"].includes(what));
  return marks.flatMap(([at, what], place) => {
    if (what === "ended") return [];
    const until = marks[place + 1]?.[0] ?? end;
    const part = h("i", { class: what === "started" ? "run" : what === "queued" ? "wait" : "lost", title: `${what === "started" ? "ran" : "waited"} ${seconds(Math.max(0, until - at))}` });
    part.style.flexGrow = String(Math.max(0.004, (until - at) / whole));
    return [part];
  });
}

document.getElementById("story").addEventListener("click", (event) => {
  if (event.target.id === "story") event.target.close(); // the backdrop
});

customElements.define("orca-requests", Requests);
customElements.define("orca-story", Story);
