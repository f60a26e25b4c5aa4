// A box to chat with the model, and to compare two settings side by side. It calls the endpoint's OpenAI API.

import { h, plural, say, seconds } from "./dom.js";
import { each, key } from "./live.js";

class Chat extends HTMLElement {
  connectedCallback() {
    this.turns = []; // {prompt, answers}
    this.chats = false; // whether the model has a chat template; a base model goes on with a text instead
    this.log = h("div", { class: "turns" });
    this.text = h("textarea", { rows: 3, name: "prompt", required: true, placeholder: "def main(" });
    this.compare = h("input", { type: "checkbox", name: "compare", onchange: () => this.settings() });
    this.sides = [setting("A", 0), setting("B", 1)];
    this.send = h("button", {}, "Send");
    this.stop = h("button", { type: "button", class: "quiet", onclick: () => this.leaving?.abort() }, "Stop");
    this.stop.hidden = true;
    this.status = h("p", { class: "muted", role: "status" });
    this.model = h("p", { class: "muted" });
    const form = h("form", { onsubmit: (event) => this.submit(event) },
      h("label", { class: "block" }, "Message", this.text),
      ...this.sides.map((side) => side.element),
      h("div", { class: "actions" }, h("label", {}, this.compare, " Compare two settings"), this.stop, this.send));
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.append(this.model, this.log, form, this.status);
    this.settings();
    this.begin();
  }

  /** Asks which model there is. Called again when a key was given. */
  async begin() {
    try {
      const about = await (await fetch("about")).json();
      if (about.keys && !key.value) return;
      const answer = await fetch("v1/models", { headers: key.headers });
      if (answer.ok) {
        const model = (await answer.json()).data[0];
        this.name = model.id;
        this.chats = model.chat_template === true;
        say(this.model, `${this.name} ${this.chats ? "answers" : "has no chat template: it goes on with your text"}. Enter sends, Shift+Enter begins a line.`);
      }
    } catch { /* the page tells that its service is away */ }
  }

  settings() {
    this.sides[1].element.hidden = !this.compare.checked;
    this.sides[0].name(this.compare.checked);
  }

  async submit(event) {
    event.preventDefault();
    const prompt = this.text.value;
    if (!prompt || this.leaving) return;
    if (!this.name) await this.begin();
    this.leaving = new AbortController();
    this.send.disabled = true;
    this.stop.hidden = false;
    const sides = this.compare.checked ? this.sides : this.sides.slice(0, 1);
    const turn = { prompt, answers: sides.map((side) => new Answer(side, this.compare.checked)) };
    const before = [...this.turns];
    this.log.append(h("div", { class: "turn" }, h("p", { class: "prompt" }, prompt), h("div", { class: "answers" }, ...turn.answers.map((one) => one.element))));
    this.turns.push(turn);
    this.text.value = "";
    say(this.status, "");
    this.log.scrollTop = this.log.scrollHeight;
    const ends = await Promise.all(turn.answers.map((answer) => this.ask(answer, before, prompt)));
    this.leaving = null;
    this.send.disabled = false;
    this.stop.hidden = true;
    say(this.status, ends.join(" "));
    this.text.focus();
  }

  async ask(answer, before, prompt) {
    try {
      return await this.call(answer, before, prompt);
    } catch (error) {
      if (error.name === "AbortError") return answer.end("stopped");
      return answer.fail(error.message);
    }
  }

  async call(answer, before, prompt) {
    const messages = before.flatMap((turn) => [{ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answers[0].text }]);
    const body = {
      model: this.name, stream: true, stream_options: { include_usage: true }, ...answer.side.values(),
      ...(this.chats ? { messages: [...messages, { role: "user", content: prompt }] } : { prompt }),
    };
    answer.began = performance.now();
    const reply = await fetch(this.chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: { "content-type": "application/json", ...key.headers }, body: JSON.stringify(body), signal: this.leaving.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    let ended = "was cut off";
    await each(reply.body, (data) => {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice) answer.add(this.chats ? choice.delta.content ?? "" : choice.text);
      if (choice?.finish_reason) ended = choice.finish_reason === "length" ? "ended at its length" : "ended";
      if (event.usage) answer.tokens = event.usage.completion_tokens;
      const close = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
      if (close) this.log.scrollTop = this.log.scrollHeight;
    });
    return answer.end(ended);
  }
}

/** What one answer is made with. */
function setting(letter, temperature) {
  const warm = h("input", { type: "number", name: `temperature-${letter}`, min: 0, max: 2, step: 0.1, value: temperature, inputmode: "decimal" });
  const most = h("input", { type: "number", name: `tokens-${letter}`, min: 1, max: 4096, step: 1, value: 48, inputmode: "numeric" });
  const legend = h("legend", {}, letter);
  return {
    letter,
    element: h("fieldset", {}, legend, h("label", {}, "Temperature ", warm), h("label", {}, "Tokens ", most)),
    name: (shown) => legend.classList.toggle("hidden", !shown),
    values: () => ({ temperature: Number(warm.value), max_tokens: Number(most.value) }),
    get words() {
      return `temperature ${Number(warm.value)}`;
    },
  };
}

class Answer {
  constructor(side, named) {
    this.side = side;
    this.text = "";
    this.tokens = 0;
    this.first = null;
    this.named = named;
    this.body = h("pre", { tabindex: "0" });
    this.foot = h("p", { class: "muted foot" }, "waits");
    this.element = h("section", { class: "answer", "aria-label": named ? `Answer ${side.letter}` : "Answer" }, named ? h("h3", {}, `${side.letter}: ${side.words}`) : null, this.body, this.foot);
  }

  add(text) {
    if (this.first === null && text) this.first = performance.now();
    this.text += text;
    this.body.append(text);
    if (this.first !== null) say(this.foot, `first token ${seconds((this.first - this.began) / 1000)}`);
  }

  end(how) {
    const first = this.first === null ? "no text" : `first token ${seconds((this.first - this.began) / 1000)}`;
    const whole = (performance.now() - this.began) / 1000;
    say(this.foot, `${first}, ${this.tokens ? `${plural(this.tokens, "token")} in ` : ""}${seconds(whole)}, ${how}`);
    return `${this.named ? `Answer ${this.side.letter}` : "The answer"} ${how}.`;
  }

  fail(why) {
    this.foot.classList.add("wrong");
    say(this.foot, why);
    return `${this.named ? `Answer ${this.side.letter}` : "The answer"} failed.`;
  }
}

customElements.define("orca-chat", Chat);
