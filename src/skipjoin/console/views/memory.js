// KV blocks by owner on both tiers, and hits of the prefix cache.

import { legend, lines, stack } from "../charts.js";
import { card, h, requestLink, show, table } from "../dom.js";
import { OPERATORS_ONLY, count, percent } from "../format.js";

const STATES = { running: "running", preempted: "slot", swapped: "move", waiting: "other" };

export function memory(store, main) {
  const body = h("div");
  main.append(h("h1", null, "Memory"), body);
  const totals = () => store.now.engines.map((engine) => engineCard(store, engine));
  const hidden = card("KV of all keys", h("p", { class: "soft" }, OPERATORS_ONLY));
  return { update: () => show(body, store.hello.sees_totals ? totals() : hidden, h("div", { class: "grid" }, store.hello.sees_totals ? history(store) : null, holders(store))) };
}

function engineCard(store, engine) {
  const groups = store.now.groups.filter((group) => group.replica === engine.replica);
  const held = (field, filter) => groups.filter(filter).reduce((sum, group) => sum + group[field], 0);
  const byState = (field) => Object.entries(STATES).map(([name, tone]) => ({ tone, text: name, value: held(field, (group) => group.state === name) }));
  const device = byState("device_blocks");
  const sum = device.reduce((total, part) => total + part.value, 0);
  // Requests that share a block each count it.
  const shared = Math.max(0, sum - engine.used_blocks);
  const cached = Math.min(engine.kv_cached_blocks, engine.device_blocks - engine.used_blocks);
  device.push({ tone: "cached", text: "cached, free", value: cached });
  const total = Math.max(engine.device_blocks, sum + cached);
  const free = engine.device_blocks - engine.used_blocks - cached;
  const gib = (engine.device_blocks * engine.block_bytes) / 2 ** 30;
  const classes = ["real-time", "best-effort"].map((name) => [name, held("device_blocks", (group) => group.service === name), held("cpu_blocks", (group) => group.service === name)]);
  const cpu = byState("cpu_blocks");
  cpu.push({ tone: "cached", text: "cached, free", value: engine.kv_cpu_cached_blocks });
  return card(`Replica ${engine.replica}: ${count(engine.used_blocks)} of ${count(engine.device_blocks)} device blocks in use (${gib.toFixed(gib < 1 ? 3 : 1)} GiB)`,
    stack("Device", device, total),
    legend([...device.filter((part) => part.value).map((part) => [part.tone, `${part.text} ${count(part.value)}`]), ["free", `free ${count(Math.max(0, free))}`]]),
    shared ? h("p", { class: "soft small" }, `${count(shared)} of these blocks are counted more than once, because requests share them.`) : null,
    engine.cpu_blocks ? [h("h2", null, `CPU memory: ${count(engine.cpu_blocks)} blocks`), stack("CPU memory", cpu, engine.cpu_blocks),
      legend(cpu.filter((part) => part.value).map((part) => [part.tone, `${part.text} ${count(part.value)}`]))] : null,
    table([{ name: "Class" }, { name: "Device blocks", number: true }, { name: "CPU blocks", number: true }],
      classes.map(([name, on, off]) => [name, count(on), count(off)]), "KV by class"));
}

function history(store) {
  const points = (field) => store.history.map((one) => [one.time, one[field]]);
  const last = store.history.at(-1);
  return card("KV in use and prefix-cache hits",
    lines("KV in use and prefix-cache hits over time", [{ tone: "running", points: points("usage") }, { tone: "budget", points: points("hit_share") }], { top: 1, format: percent }),
    legend([["running", `KV in use ${percent(last.usage)}`], ["budget", `prompt tokens found in the prefix cache (${percent(last.hits / Math.max(1, last.queries))} since the start)`]]));
}

function holders(store) {
  const rows = [...store.now.rows].sort((a, b) => b.device_blocks + b.cpu_blocks - a.device_blocks - a.cpu_blocks).slice(0, 10).filter((row) => row.device_blocks + row.cpu_blocks);
  if (!rows.length) return card("Largest holders", h("p", { class: "soft" }, "No request holds KV."));
  return card("Largest holders", table([{ name: "Request" }, { name: "State" }, { name: "Device", number: true }, { name: "CPU", number: true }],
    rows.map((row) => [requestLink(row.id, row.choice), row.state, count(row.device_blocks), count(row.cpu_blocks)]), "Largest holders"));
}
