// The server's events, and what the views keep of them. Everything is bounded.

const KEEP_S = 300;
const MAX_FINISHED = 2000;
const MAX_STEPS = 30000;
const KEY = "skipjoin-key";

// The page's own server, or one of those that a separate console shows, chosen by ?server=1.
let base = "";

export async function connect() {
  const found = await (await fetch("/console/servers.json")).json();
  const chosen = Math.max(0, found.findIndex((one, at) => String(at) === new URLSearchParams(location.search).get("server")));
  base = found[chosen].path;
  return { servers: found, chosen };
}

export class Unauthorized extends Error {}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY + base, key);
  else sessionStorage.removeItem(KEY + base);
}

export function headers() {
  const key = sessionStorage.getItem(KEY + base);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function getJson(path) {
  const response = await fetch(base + path, { headers: headers(), redirect: "error" });
  if (response.status === 401) throw new Unauthorized();
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `HTTP status ${response.status}`);
  return body;
}

export async function post(path, body, signal) {
  const response = await fetch(base + path, {
    method: "POST", redirect: "error", signal, headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body),
  });
  if (response.status === 401) throw new Unauthorized();
  if (!response.ok) throw new Error((await response.json())?.error?.message ?? `HTTP status ${response.status}`);
  return response;
}

// Events of a stream as [name, data]. fetch, unlike EventSource, can send the key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5).trimStart();
      }
      yield [name, data];
    }
  }
}

export class Store {
  hello = null;
  now = null;
  history = []; // one entry per snapshot of the last KEEP_S seconds
  finished = []; // oldest first
  steps = [];

  take(name, data) {
    if (name === "hello") {
      this.hello = data;
      this.history = [];
      this.steps = [];
      this.finished = [...data.finished];
    } else if (name === "snapshot") {
      this.#snapshot(data);
    }
  }

  #snapshot(data) {
    const before = this.history.at(-1);
    // null where this key may not see the totals of all keys
    const total = (field) => (this.hello.sees_totals ? data.engines.reduce((sum, one) => sum + one[field], 0) : null);
    const entry = {
      time: data.time, running: data.load.running, waiting: data.load.waiting, usage: data.load.kv_cache_usage,
      tokens: total("generation_tokens_total"), preemptions: total("num_preemptions_total"),
      queries: total("prefix_cache_queries_total"), hits: total("prefix_cache_hits_total"),
    };
    const seconds = before ? entry.time - before.time : 0;
    const rate = (field) => (seconds > 0 && entry[field] !== null ? Math.max(0, entry[field] - before[field]) / seconds : null);
    entry.tokens_s = rate("tokens");
    entry.preemptions_s = rate("preemptions");
    entry.hit_share = before && entry.queries > before.queries ? (entry.hits - before.hits) / (entry.queries - before.queries) : null;
    this.now = data;
    this.history.push(entry);
    while (this.history[0].time < data.time - KEEP_S) this.history.shift();
    const fields = this.hello.step_fields;
    for (const step of data.steps) this.steps.push(Object.fromEntries(fields.map((field, at) => [field, step[at]])));
    const old = this.steps.findIndex((step) => step.end >= data.time - KEEP_S);
    this.steps.splice(0, Math.max(old < 0 ? this.steps.length : old, this.steps.length - MAX_STEPS));
    this.finished.push(...[...data.finished].reverse());
    this.finished.splice(0, this.finished.length - MAX_FINISHED);
  }
}

// Follow the server until the page is closed, and connect again after a loss.
export async function follow(store, on) {
  for (;;) {
    try {
      const response = await fetch(`${base}/debug/events`, { headers: headers(), redirect: "error", cache: "no-store" });
      if (response.status === 401) throw new Unauthorized();
      if (!response.ok) throw new Error((await response.json())?.error?.message ?? `HTTP status ${response.status}`);
      for await (const [name, data] of events(response)) {
        store.take(name, JSON.parse(data));
        on.data();
      }
      on.lost("the server ended the stream");
    } catch (error) {
      if (error instanceof Unauthorized) await on.key();
      else on.lost(error instanceof TypeError ? "the server does not answer" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
