// Engines as they are: state, ranks, the Figure 8 timeline, and the slot map.

import { colour, h, number, plural, s, say, seconds } from "./dom.js";
import { grid } from "./grid.js";

const WORDS = {
  Opening: "reads the pool", Incomplete: "waits for pods", Greeting: "greets its ranks", Forming: "forms", Recording: "forms",
  Running: "runs", Draining: "drains", Lost: "lost a rank", Waiting: "forms again", Replacing: "gets new pods",
  Closing: "is released", Ended: "has ended",
};

class Engines extends HTMLElement {
  cards = new Map();

  draw(store) {
    const names = Object.keys(store.engines).sort();
    for (const [name, card] of this.cards) {
      if (!names.includes(name)) {
        card.remove();
        this.cards.delete(name);
      }
    }
    if (!names.length && !this.childElementCount) this.append(h("p", { class: "card empty" }, "No engine has told of itself yet."));
    for (const name of names) {
      let card = this.cards.get(name);
      if (!card) {
        this.querySelector(".empty")?.remove();
        card = document.createElement("orca-engine");
        card.name = name;
        this.cards.set(name, card);
        this.append(card);
      }
      card.draw(store);
    }
  }
}

class Engine extends HTMLElement {
  connectedCallback() {
    if (this.childElementCount) return;
    this.className = "card";
    const id = `engine-${this.name}`;
    this.state = h("span", { class: "state" });
    this.driver = h("p", { class: "muted driver" });
    this.numbers = h("dl", { class: "numbers" });
    this.values = {};
    for (const [name, unit] of [["tokens", "tokens/s"], ["iterations", "iterations/s"], ["batch", "requests"], ["flight", "batches in flight"], ["slots", "slots reserved"]]) {
      this.values[name] = h("dd");
      this.numbers.append(h("div", {}, this.values[name], h("dt", {}, unit)));
    }
    this.ranks = h("ul", { class: "ranks", "aria-label": `Ranks of ${this.name}` });
    this.timeline = document.createElement("orca-timeline");
    this.slots = document.createElement("orca-slots");
    this.setAttribute("role", "region");
    this.setAttribute("aria-labelledby", id);
    this.append(
      h("div", { class: "title" }, h("h2", { id }, this.name), this.state, this.driver),
      this.numbers, this.timeline, this.slots,
      h("details", {}, h("summary", {}, "Pods and ranks"), this.ranks),
    );
  }

  draw(store) {
    const engine = store.engines[this.name];
    const runs = engine.why === null;
    const scheduler = Object.values(store.schedulers).find((one) => one.name === engine.scheduler);
    const silent = scheduler?.why;
    say(this.state, silent ? "no master" : WORDS[engine.state] ?? engine.state);
    this.state.className = `state ${silent ? "bad" : runs ? "good" : "bad"}`;
    say(this.driver, silent ? `its scheduler ${scheduler.why}; another one takes over` : runs ? `${plural(engine.pp, "stage")} of ${plural(engine.tp, "rank")}, policy ${engine.policy}` : engine.why);
    say(this.values.tokens, number(engine.tokens_per_second));
    say(this.values.iterations, number(engine.iterations_per_second));
    say(this.values.batch, `${engine.requests} of ${engine.max_batch_size * engine.n_workers}`);
    say(this.values.flight, `${engine.in_flight} of ${engine.n_workers}`);
    say(this.values.slots, engine.slots ? `${Math.round((100 * engine.reserved) / engine.slots)} %` : "none");
    this.timeline.draw(store, this.name);
    this.slots.draw(store, this.name);
    this.drawRanks(engine);
  }

  drawRanks(engine) {
    const lines = engine.ranks.map((rank, n) =>
      [`rank ${n}`, `stage ${rank.stage}${engine.tp > 1 ? `, tensor rank ${rank.tensor_rank}` : ""}`, rank.pid ? `pid ${rank.pid} on ${rank.host}` : "no process", `pod ${engine.pods[rank.pod] || "absent"}`]);
    const told = JSON.stringify(lines);
    if (told === this.told) return;
    this.told = told;
    this.ranks.replaceChildren(...lines.map((line) => h("li", {}, h("b", {}, line[0]), ...line.slice(1).map((part) => h("span", {}, part)))));
  }
}

const LABEL = 92; // pixels of the stages' names
const NARROWEST = 18; // pixels that a typical block of the slowest stage has at least
const GAP = 6;

/** Stages over time: blocks are iterations, stripes in them requests. The paper's Figure 8. */
class Timeline extends HTMLElement {
  connectedCallback() {
    if (this.childElementCount) return;
    this.caption = h("p", { class: "muted caption" });
    this.hold = h("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.toggle() }, "Hold");
    this.figure = h("div", { class: "figure" });
    this.append(h("div", { class: "title" }, h("h3", {}, "Iterations"), this.caption, this.hold), this.figure);
    this.held = null;
    this.drawn = "";
  }

  toggle() {
    this.held = this.held ? null : this.last;
    this.hold.setAttribute("aria-pressed", String(this.held !== null));
    if (this.store) this.draw(this.store, this.engine);
  }

  draw(store, name) {
    this.store = store;
    this.engine = name;
    const engine = store.engines[name];
    const all = this.held ?? store.iterations[name] ?? [];
    const width = Math.floor(this.figure.clientWidth);
    const shown = drawable(all, width - LABEL);
    this.last = shown;
    this.tell(store, engine, shown);
    const mark = this.held ? `held ${width}` : `${width} ${shown.length} ${shown.at(-1)?.stages[0][0]} ${engine.pp} ${engine.busy.map((share) => Math.round(share * 20))} ${shown[0]?.n}`;
    if (mark === this.drawn || width < 100) return;
    this.drawn = mark;
    this.figure.replaceChildren(this.picture(store, engine, shown, width));
  }

  tell(store, engine, shown) {
    if (!shown.length) {
      say(this.caption, "Nothing has run since this page was opened.");
      return;
    }
    const last = shown.at(-1);
    const ago = store.now - Math.max(...last.stages.map((stage) => stage[2]));
    const span = last.stages.at(-1)[2] - shown[0].stages[0][0];
    say(this.caption, this.held ? `held: the last ${shown.length} before ${last.n}` : ago > 2 ? `the last ran ${seconds(ago)} ago` : `the last ${shown.length}, ${seconds(span)} in all`);
  }

  picture(store, engine, shown, width) {
    const most = Math.max(1, ...shown.map((one) => one.members.length));
    const lane = Math.min(96, Math.max(34, most * 13));
    const height = engine.pp * (lane + GAP) + 20;
    const begin = shown.length ? shown[0].stages[0][0] : 0;
    const end = shown.length ? Math.max(...shown.at(-1).stages.map((stage) => stage[2])) : 1;
    const scale = (width - LABEL - 2) / Math.max(end - begin, 1e-6);
    const x = (at) => LABEL + (at - begin) * scale;
    const letters = [...new Set(shown.flatMap((one) => one.members.map((m) => m[0])))].map((n) => store.requests.get(n)?.letter ?? "?");
    const svg = s("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": shown.length ? `${shown.length} iterations over ${plural(engine.pp, "stage")}, of the requests ${letters.join(", ")}` : "No iterations yet",
    });
    for (let stage = 0; stage < engine.pp; stage++) {
      const top = stage * (lane + GAP);
      svg.append(
        s("rect", { class: "lane", x: LABEL, y: top, width: width - LABEL, height: lane, rx: 3 }),
        s("text", { class: "name", x: 0, y: top + lane / 2 - 3 }, `stage ${stage}`),
        s("text", { class: "busy", x: 0, y: top + lane / 2 + 12 }, `busy ${Math.round(100 * (engine.busy[stage] ?? 0))} %`),
      );
      let free = LABEL;
      for (const one of shown) {
        const times = one.stages[stage];
        if (!times) continue;
        const left = Math.max(x(times[0]), free);
        const right = Math.max(x(times[2]), left + 2);
        free = right;
        svg.append(this.block(store, one, left, top, Math.max(right - left - 1, 1), lane));
      }
    }
    const step = tick((end - begin) / Math.max(2, Math.floor((width - LABEL) / 90)));
    for (let at = 0; shown.length && at <= end - begin; at += step) {
      const where = x(begin + at);
      svg.append(
        s("line", { class: "tick", x1: where, x2: where, y1: height - 20, y2: height - 15 }),
        s("text", { class: "axis", x: Math.min(where + 3, width - 40), y: height - 5 }, at ? seconds(at) : "0"),
      );
    }
    return svg;
  }

  block(store, one, left, top, width, lane) {
    const group = s("g", { class: "block" });
    const each = lane / one.members.length;
    const told = [];
    one.members.forEach(([n, start, count], place) => {
      const request = store.requests.get(n);
      const begins = start === 0 || count > 1;
      const y = top + place * each;
      const letter = request?.letter ?? "?";
      told.push(begins ? `${letter} (${count} tokens)` : letter);
      group.append(s("rect", { x: left, y, width, height: Math.max(each - 0.5, 0.5), fill: colour(request), rx: each > 6 ? 2 : 0 }));
      if (begins) group.append(s("rect", { class: "begins", x: left, y, width: Math.min(3, width), height: Math.max(each - 0.5, 0.5) }));
      if (each >= 11 && width >= 11 * letter.length) {
        const text = begins && width > 40 ? `${letter} ${count}` : letter;
        group.append(s("text", { x: left + width / 2, y: y + each / 2 + 4 }, text));
      }
    });
    group.append(s("title", {}, `iteration ${one.n}: ${told.join(", ")}`));
    return group;
  }
}

/** The last iterations, or fewer: a typical block keeps NARROWEST pixels, so a pause is as long as it was. */
function drawable(all, width) {
  const shown = [];
  const lengths = [];
  const end = all.length ? Math.max(...all.at(-1).stages.map((stage) => stage[2])) : 0;
  for (let n = all.length - 1; n >= 0; n--) {
    const first = all[n].stages[0];
    lengths.push(Math.max(...all[n].stages.map((stage) => stage[2] - stage[0])));
    const typical = [...lengths].sort((a, b) => a - b)[lengths.length >> 1];
    if (shown.length && (typical * width) / (end - first[0]) < NARROWEST) break;
    shown.unshift(all[n]);
  }
  return shown;
}

/** A round number of seconds that is not below this one. */
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-6)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= least * 0.999);
}

/** Blocks of slots, in the colours of the requests that have reserved them. */
class Slots extends HTMLElement {
  connectedCallback() {
    if (this.childElementCount) return;
    this.caption = h("p", { class: "muted caption" });
    this.canvas = h("canvas", { role: "img" });
    this.append(h("div", { class: "title" }, h("h3", {}, "Slots"), this.caption), this.canvas);
    this.drawn = "";
  }

  draw(store, name) {
    const engine = store.engines[name];
    const blocks = Math.floor(engine.slots / engine.block_size);
    const rows = Object.values(store.rows[name] ?? {});
    const width = Math.floor(this.clientWidth);
    if (width < 100) return;
    const map = grid(blocks, width);
    const free = engine.slots - engine.reserved;
    const square = map.each > 1 ? `, ${number(map.each)} of them a square` : "";
    say(this.caption, `${number(engine.reserved)} reserved, ${number(free)} free, in blocks of ${engine.block_size}${square}`);
    this.canvas.setAttribute("aria-label", `${number(engine.reserved)} of ${number(engine.slots)} slots are reserved by ${plural(rows.length, "request")}`);
    const mark = JSON.stringify([width, blocks, rows, document.documentElement.dataset.theme, matchMedia("(prefers-color-scheme: dark)").matches]);
    if (mark === this.drawn) return;
    this.drawn = mark;
    this.paint(store, rows, map, width);
  }

  paint(store, rows, { side, columns, squares, each, height }, width) {
    const sharp = window.devicePixelRatio || 1;
    this.canvas.width = width * sharp;
    this.canvas.height = height * sharp;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const inset = side > 5 ? 1.5 : 0.5;
    const square = (n, fill) => {
      pen.fillStyle = fill;
      pen.fillRect((n % columns) * side, Math.floor(n / columns) * side, side - inset, side - inset);
    };
    const empty = getComputedStyle(this.canvas).color;
    for (let n = 0; n < squares; n++) square(n, empty);
    pen.font = `600 ${side - 7}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (const [id, runs] of rows) {
      const request = store.requests.get(id);
      for (const [first, count] of runs) {
        for (let n = Math.floor(first / each); n * each < first + count; n++) {
          square(n, colour(request));
          if (side < 14) continue;
          pen.fillStyle = "#111";
          pen.fillText(request?.letter ?? "?", (n % columns) * side + (side - inset) / 2, Math.floor(n / columns) * side + side / 2);
        }
      }
    }
  }
}

customElements.define("orca-timeline", Timeline);
customElements.define("orca-slots", Slots);
customElements.define("orca-engine", Engine);
customElements.define("orca-engines", Engines);
