// Recent failures as stories.

import { clock, h, plural, seconds } from "./dom.js";

class Failures extends HTMLElement {
  connectedCallback() {
    this.list = h("ol", { class: "failures" });
    this.empty = h("p", { class: "muted" }, "None since the schedulers started.");
    this.append(this.empty, h("div", { role: "log", "aria-label": "Recent failures", tabindex: "0" }, this.list));
    this.told = "";
  }

  draw(store) {
    const all = [...store.incidents.values()].sort((a, b) => b.at - a.at);
    const told = JSON.stringify(all);
    if (told === this.told) return;
    this.told = told;
    this.empty.hidden = all.length > 0;
    this.list.replaceChildren(...all.map((one) => this.item(one)));
  }

  item(one) {
    const parts = [];
    if (one.verdict !== null) parts.push(`verdict ${seconds(one.verdict)}`);
    if (one.formed !== null) parts.push(one.kind === "scheduler" ? `driven again ${seconds(one.formed)}` : `formed again ${seconds(one.formed)}`);
    if (one.streams) parts.push(`${plural(one.streams, "stream")} paused${one.pause === null ? "" : ` ${seconds(one.pause)}`}`);
    const state = one.over ? "over" : "now";
    return h("li", { class: state },
      h("p", {}, h("time", {}, clock(one.at)), h("b", {}, ` ${one.what}`), one.over ? null : h("span", { class: "state bad" }, "open")),
      h("p", { class: "parts" }, parts.join(", ") || "not judged yet"),
      one.why ? h("details", {}, h("summary", {}, "Why"), h("p", { class: "muted" }, one.why)) : null);
  }
}

customElements.define("orca-failures", Failures);
