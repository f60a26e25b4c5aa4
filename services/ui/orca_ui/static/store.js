// The picture as this browser has it. Every part is set by its name, so a change that comes twice changes nothing.

const ITERATIONS = 64; // of each engine that are kept
const REQUESTS = 300;

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.now = 0;
    this.queue = null;
    this.schedulers = {};
    this.engines = {};
    this.rows = {}; // engine -> row -> [request, runs of blocks]
    this.iterations = {}; // engine -> iterations, the oldest first
    this.requests = new Map(); // number -> request
    this.incidents = new Map();
    this.waited = []; // [time, requests in the queue]
  }

  take(message) {
    if (message.whole) {
      const waited = this.waited;
      this.clear();
      this.waited = waited;
    }
    this.now = message.now;
    this.queue = message.queue;
    this.schedulers = message.schedulers;
    this.engines = message.engines;
    if (message.queue) this.waited.push([message.now, message.queue[0]]);
    while (this.waited.length && this.waited[0][0] < message.now - 60) this.waited.shift();
    for (const request of message.requests ?? []) this.requests.set(request.n, request);
    for (const incident of message.incidents ?? []) this.incidents.set(incident.number, incident);
    for (const [engine, rows] of Object.entries(message.rows ?? {})) {
      const known = (this.rows[engine] ??= {});
      for (const [row, one] of Object.entries(rows)) {
        if (one === null) delete known[row];
        else known[row] = one;
      }
    }
    for (const [engine, iterations] of Object.entries(message.iterations ?? {})) {
      const known = (this.iterations[engine] ??= []);
      const last = known.length ? known[known.length - 1].stages[0][0] : 0;
      known.push(...iterations.filter((one) => one.stages[0][0] > last));
      known.splice(0, known.length - ITERATIONS);
    }
    if (this.requests.size > REQUESTS) {
      for (const [n, request] of this.requests) {
        if (this.requests.size <= REQUESTS) break;
        if (request.state !== "running") this.requests.delete(n);
      }
    }
  }
}
