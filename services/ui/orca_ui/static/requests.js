// The requests of the last minutes, and the story of one.

import { chip, clock, h, plural, say, seconds } from "./dom.js";
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
    const began = request.began;
    if (row.told === told && began !== null) return;
    row.told = told;
    row.line.dataset.state = request.state;
    say(row.cells[0], stateOf(request));
    say(row.count, `${request.made} of ${request.max_new}`);
    row.bar.style.width = `${Math.min(100, (100 * request.made) / Math.max(1, request.max_new))}%`;
    say(row.cells[2], began === null && request.made ? "" : seconds(Math.max(0, (began ?? request.ended ?? now) - request.submitted)));
    say(row.cells[3], request.first ? seconds(Math.max(0, request.first - request.submitted)) : "");
    say(row.cells[4], request.gap ? seconds(request.gap) : "");
  }
}

const LIVING = ["queued", "claimed", "running"];

/** One request from its submission to its end, as `orca explain` tells it. */
class Story extends HTMLElement {
  show(n, store) {
    this.n = n;
    this.asked = null; // how the request stood when the schedulers were asked last
    this.asking = this.over = false;
    this.build(store.requests.get(n));
    this.draw(store);
    const dialog = this.closest("dialog");
    if (!dialog.open) dialog.showModal();
  }

  draw(store) {
    const request = this.n === undefined ? null : store.requests.get(this.n);
    if (!request || (this.asked && !this.closest("dialog").open)) return;
    say(this.lead, `${plural(request.input, "input token")}, ${request.made} of at most ${plural(request.max_new, "new token")}.`);
    // An answer costs a scheduler up to 0.7 s of one core, so it is asked when something has changed for the request.
    const stands = request.state === "ended" ? Math.floor(store.now) : `${request.state} ${request.first !== null}`;
    if (this.over || this.asking || stands === this.asked) return;
    this.asked = stands;
    this.tell(this.n);
  }

  async tell(n) {
    this.asking = true;
    try {
      const answer = await fetch(`requests/${n}`, { headers: key.headers });
      const told = await answer.json();
      if (n !== this.n) return;
      this.over = !LIVING.includes(told.state);
      say(this.whole, answer.ok ? `${told.sentence}.` : told.error.message);
      if (!answer.ok) return;
      this.bar.replaceChildren(...told.parts.map((part) => segment(part, told.seconds)));
      this.list.replaceChildren(...told.parts.map((part) => h("li", {}, h("time", {}, `+${seconds(part.begin)}`), h("span", {}, part.sentence))));
    } catch {
      // the page's service is away, which the head of the page tells
    } finally {
      if (n === this.n) this.asking = false;
    }
  }

  build(request) {
    this.lead = h("p");
    this.whole = h("p", {}, "The schedulers are asked.");
    this.bar = h("div", { class: "life", "aria-hidden": "true" });
    this.list = h("ol");
    this.text = h("div", { class: "text" });
    const close = h("button", { type: "button", class: "quiet", onclick: () => this.closest("dialog").close() }, "Close");
    const show = h("button", { type: "button", onclick: () => this.showText(request.n) }, "Show the text");
    show.hidden = !request.text;
    this.replaceChildren(
      h("div", { class: "title" }, chip(request), h("h2", { id: "story-title" }, `Request ${request.letter}`), close),
      h("p", {}, h("code", {}, request.id), h("span", { class: "muted" }, ` came at ${clock(request.submitted)}`)),
      this.lead, this.whole, this.bar, h("h3", {}, "Where its time went"), this.list, show, this.text,
    );
  }

  async showText(n) {
    const answer = await fetch(`requests/${n}/text`, { headers: key.headers });
    const found = await answer.json();
    const parts = answer.ok ? [["Prompt", found.prompt], ["Answer", found.text]] : [["", found.error.message]];
    this.text.replaceChildren(...parts.flatMap(([name, text]) => [h("h3", {}, name), h("pre", {}, text ?? "The endpoint does not tell.")]));
  }
}

/** A part of a request's time, as long as its share of the whole. */
function segment(part, whole) {
  const kind = { run: "run", lost: "lost", forming: "lost", "taken over": "lost" }[part.kind] ?? "wait";
  const element = h("i", { class: kind, title: part.sentence });
  element.style.flexGrow = String(Math.max(0.004, part.seconds / whole));
  return element;
}

document.getElementById("story").addEventListener("click", (event) => {
  if (event.target.id === "story") event.target.close(); // the backdrop
});

customElements.define("orca-requests", Requests);
customElements.define("orca-story", Story);
