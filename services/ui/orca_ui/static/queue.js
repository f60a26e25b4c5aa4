// The queue: how many requests wait, since when, and the last minute of it.

import { h, number, plural, s, say, seconds } from "./dom.js";

const MOST = 48; // waiting requests that are drawn one by one
const WIDTH = 240;
const HEIGHT = 28;

class Queue extends HTMLElement {
  connectedCallback() {
    this.text = h("p", { class: "caption" });
    this.line = h("div", { class: "queue", "aria-hidden": "true" });
    this.past = s("svg", { class: "past", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": "The queue's length in the last minute" });
    this.append(h("div", { class: "queue-row" }, this.text, this.line, this.past));
  }

  draw(store) {
    const [waiting, oldest] = store.queue ?? [null, 0];
    if (waiting === null) say(this.text, "the queue is not known now");
    else if (waiting === 0) say(this.text, "Nothing waits.");
    else say(this.text, `${plural(waiting, "request")} ${waiting === 1 ? "waits" : "wait"}, the first for ${seconds(oldest)}`);
    const pips = Math.min(waiting ?? 0, MOST);
    while (this.line.childElementCount > pips) this.line.firstElementChild.remove(); // the front of the queue has left
    while (this.line.childElementCount < pips) this.line.append(h("i"));
    this.line.dataset.more = (waiting ?? 0) > MOST ? `+${number(waiting - MOST)}` : "";
    const most = Math.max(4, ...store.waited.map((one) => one[1]));
    const points = store.waited.map(([at, count]) => `${(WIDTH - ((store.now - at) / 60) * WIDTH).toFixed(1)},${(HEIGHT - 1 - (count / most) * (HEIGHT - 3)).toFixed(1)}`);
    if (!this.curve) this.past.append((this.curve = s("polyline")));
    this.curve.setAttribute("points", points.join(" "));
  }
}

customElements.define("orca-queue", Queue);
