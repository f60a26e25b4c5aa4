// The stream of server-sent events. fetch, not EventSource: it can send an API key.

export const key = {
  get value() {
    return sessionStorage.getItem("key") ?? "";
  },
  set value(given) {
    sessionStorage.setItem("key", given);
  },
  /** The header of a call. */
  get headers() {
    return this.value ? { authorization: `Bearer ${this.value}` } : {};
  },
};

const SILENT = 5000; // ms without an event, of which five come in a second; then the connection is made again
const AGAIN = 1000;

/**
 * Calls `take` with each message, for ever. `tell` gets why there is none now, "" when there is; `ask` asks for a key.
 */
export async function follow(take, tell, ask) {
  for (;;) {
    const leaving = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => leaving.abort(), SILENT);
    };
    try {
      alive();
      const answer = await fetch("live", { headers: key.headers, signal: leaving.signal, cache: "no-store" });
      if (answer.status === 401) {
        clearTimeout(timer);
        await ask();
        continue;
      }
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      tell("");
      await each(answer.body, (data) => {
        alive();
        take(JSON.parse(data));
      });
      tell("the page's service is starting again");
    } catch (error) {
      tell(error.name === "AbortError" ? "the page's service is silent" : navigator.onLine ? String(error.message) : "this device is offline");
    }
    clearTimeout(timer);
    leaving.abort();
    await new Promise((resume) => setTimeout(resume, AGAIN));
  }
}

/** Calls `take` with the data of each event of a body. */
export async function each(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value.replaceAll("\r", "");
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = rest.slice(0, end);
      rest = rest.slice(end + 2);
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) take(data.join("\n"));
    }
  }
}
