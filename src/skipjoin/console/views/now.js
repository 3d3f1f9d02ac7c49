// What runs and what waits, why, and what would change it.

import { advice, facts, figure, h, requestLink, show, state, table } from "../dom.js";
import { END_WORDS, count, duration, percent, plural, quantile } from "../format.js";

const RECENT_S = 60;

export function now(store, main) {
  const figures = h("dl", { class: "figures" });
  const why = h("section", { class: "card", "aria-label": "Why requests wait" });
  const own = h("section", { class: "card", "aria-label": "Figures of the recipe" });
  const list = h("div");
  const agents = h("section", { class: "card", "aria-label": "Programs" });
  const done = h("section", { class: "card" });
  const filter = h("input", { id: "filter", type: "search", placeholder: "Filter by id, class, program or reason", "aria-label": "Filter requests", oninput: () => update() });
  const jump = h("input", { id: "jump", placeholder: "Request id or x-request-id", "aria-label": "Open a request by id" });
  main.append(h("h1", null, "Now"), figures, why, own,
    h("section", { class: "card" }, h("div", { class: "tools" }, h("h2", null, "Requests"), filter,
      h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); if (jump.value.trim()) location.hash = `#/request/${encodeURIComponent(jump.value.trim())}`; } }, jump, h("button", null, "Open"))), list),
    agents, done);

  function update() {
    if (!store.now) return;
    show(figures, numbers(store));
    const pairs = ofRecipe(store);
    own.hidden = !pairs.length;
    show(own, [h("h2", null, `Recipe ${store.hello.recipe}`), facts(pairs)]);
    show(why, waits(store));
    show(list, rows(store, filter.value.trim().toLowerCase()));
    const found = programs(store.now.rows);
    agents.hidden = !found.length;
    show(agents, found);
    show(done, finished(store));
  }
  return { update };
}

function numbers(store) {
  const { now: data, hello, history } = store;
  const last = history.at(-1);
  const recent = store.finished.filter((one) => one.ended_at > data.time - RECENT_S);
  const first = recent.map((one) => one.ttft_s).filter((one) => one !== null);
  const slots = hello.max_num_seqs === null ? "" : `of ${hello.max_num_seqs * Math.max(1, data.engines.length)} slots`;
  const total = (groups) => groups.reduce((sum, group) => sum + group.requests, 0);
  const waiting = total(data.groups.filter((group) => group.wait_reason)) + data.rows.filter((row) => row.replica === null).length;
  return [
    figure("Running", count(total(data.groups.filter((group) => !group.wait_reason))), slots),
    figure("Waiting", count(waiting)),
    figure("KV in use", percent(data.load.kv_cache_usage)),
    figure("Tokens/s", last.tokens_s === null ? "–" : count(last.tokens_s)),
    figure("TTFT p50", first.length ? duration(quantile(first, 0.5)) : "–", ""),
    figure("TTFT p95", first.length ? duration(quantile(first, 0.95)) : "–"),
    figure("Preemptions/s", last.preemptions_s === null ? "–" : last.preemptions_s.toFixed(last.preemptions_s < 10 ? 1 : 0)),
  ];
}

// What only some recipes have: levels of a feedback queue, deadlines of tokens, nested reservations.
function ofRecipe(store) {
  const { engines } = store.now;
  const sums = (name) => engines.reduce((sum, one) => (one[name] ?? []).map((value, at) => value + (sum[at] ?? 0)), []);
  const total = (name) => engines.reduce((sum, one) => sum + (one[name] ?? 0), 0);
  const levels = sums("queue_requests"), [inTime, late] = sums("deadline_requests"), [hosted] = sums("kv_hosted_requests"), [blocks] = sums("kv_hosted_blocks");
  const has = (values) => values.some((value) => value > 0);
  return [
    has(levels) ? ["Requests by level, 0 first", levels.map((value, level) => [level, value]).filter(([, value]) => value > 0).map(([level, value]) => `${level}: ${count(value)}`).join(", ")] : null,
    total("queue_demotions_total") ? ["Moved between levels", `${count(total("queue_demotions_total"))} times down, ${count(total("queue_promotions_total"))} times to the first`] : null,
    inTime + late > 0 ? ["Next token of real-time requests", `${count(inTime)} in time, ${count(late)} late`] : null,
    hosted > 0 ? ["Hosted", `${plural(hosted, "request")} in ${plural(blocks, "block")} that others reserve`] : null,
    total("kv_bidirectional_blocks") > 0 ? ["Bidirectional", `${plural(total("kv_bidirectional_blocks"), "block")} that two requests fill`] : null,
  ].filter(Boolean);
}

export function waits(store) {
  const totals = new Map();
  for (const group of store.now.groups) {
    if (group.wait_reason) totals.set(group.wait_reason, (totals.get(group.wait_reason) ?? 0) + group.requests);
  }
  for (const row of store.now.rows) if (row.replica === null) totals.set(row.wait_reason, (totals.get(row.wait_reason) ?? 0) + 1);
  if (!totals.size) return [h("h2", null, "Why requests wait"), h("p", { class: "soft" }, "No request waits.")];
  const sorted = [...totals].sort((a, b) => b[1] - a[1]);
  return [h("h2", null, "Why requests wait"), h("ul", { class: "reasons" }, sorted.map(([name, number]) => {
    const words = store.hello.reasons[name];
    return h("li", null, h("span", { class: "count" }, count(number)),
      h("div", null, h("p", null, state(name, h("strong", null, words.short))), h("p", null, words.text),
        advice(name, words)));
  }))];
}

function rows(store, wanted) {
  const { hello, now: data } = store;
  const words = (row) => (row.wait_reason ? hello.reasons[row.wait_reason].short : row.state);
  const matches = data.rows.filter((row) => !wanted || `${row.id} ${row.adapter ?? ""} ${row.service} ${row.program ?? ""} ${row.state} ${words(row)}`.toLowerCase().includes(wanted));
  const total = data.groups.reduce((sum, group) => sum + group.requests, 0);
  if (!matches.length) return h("p", { class: "empty" }, wanted ? "No request matches." : "No request is live.");
  const head = [
    { name: "Request" }, { name: "State" }, { name: "Waits", number: true }, { name: "Age", number: true },
    { name: "Output" }, { name: "Forecast", number: true, optional: true }, { name: "KV blocks", number: true, optional: true },
    { name: "Class", optional: true }, { name: "Objective", optional: true },
  ];
  return [
    table(head, matches.map((row) => [
      requestLink(row.id, row.choice),
      state(row.wait_reason ?? "running", row.wait_reason ? `${words(row)}${row.state === "waiting" ? "" : `, ${row.state}`}` : "running"),
      row.wait_s === null ? "" : duration(row.wait_s), duration(row.age_s), output(row), forecast(row),
      count(row.device_blocks) + (row.cpu_blocks ? ` + ${count(row.cpu_blocks)} CPU` : ""),
      row.service + (row.is_urgent ? ", urgent" : "") + (row.adapter ? `, ${row.adapter}` : ""), objective(row),
    ]), "Live requests"),
    data.rows.length >= hello.max_rows ? h("p", { class: "soft small" }, `The first ${data.rows.length} of ${plural(total, "request")} in the scheduler's order.`) : null,
  ];
}

function programs(rows) {
  const byName = Map.groupBy(rows.filter((row) => row.program), (row) => row.program);
  if (!byName.size) return [];
  const head = [
    { name: "Program" }, { name: "Calls", number: true }, { name: "Running", number: true }, { name: "Longest wait", number: true },
    { name: "Tokens", number: true }, { name: "KV blocks", number: true, optional: true },
  ];
  const sum = (calls, of) => calls.reduce((total, row) => total + of(row), 0);
  return [h("h2", null, "Programs"), table(head, [...byName].map(([name, calls]) => [
    name, count(calls.length), count(calls.filter((row) => !row.wait_reason).length), duration(Math.max(...calls.map((row) => row.wait_s ?? 0))),
    count(sum(calls, (row) => row.prompt_tokens + row.output_tokens)), count(sum(calls, (row) => row.device_blocks + row.cpu_blocks)),
  ]), "Live calls by program")];
}

function output(row) {
  const share = Math.min(1, row.output_tokens / Math.max(1, row.predicted_tokens ?? row.max_tokens));
  const bar = h("span");
  bar.style.width = `${100 * share}%`;
  return [h("span", { class: "progress", "aria-hidden": "true" }, bar), `${count(row.output_tokens)} of ≤ ${count(row.max_tokens)}`];
}

function forecast(row) {
  if (row.predicted_tokens === null) return "";
  const range = row.predicted_low === null ? "" : ` (${count(row.predicted_low)}–${count(row.predicted_high)})`;
  return `${count(row.predicted_tokens)}${range}`;
}

function objective(row) {
  return ["ttft", "tpot", "jct"].filter((name) => row[`${name}_s`] !== null).map((name) => `${name.toUpperCase()} ${duration(row[`${name}_s`])}`).join(", ");
}

function finished(store) {
  const recent = store.finished.slice(-8).reverse();
  if (!recent.length) return [h("h2", null, "Recently finished"), h("p", { class: "soft" }, "None yet.")];
  const head = [
    { name: "Request" }, { name: "End" }, { name: "Total", number: true }, { name: "First token", number: true },
    { name: "Waited", number: true }, { name: "Output", number: true }, { name: "Preempted", number: true, optional: true },
    { name: "Class", optional: true },
  ];
  return [h("h2", null, "Recently finished"), table(head, recent.map((one) => [
    requestLink(one.id, one.choice), END_WORDS[one.reason] ?? one.reason, duration(one.jct_s), one.ttft_s === null ? "–" : duration(one.ttft_s),
    duration(one.waited_s), count(one.output_tokens), count(one.preemptions), one.service,
  ]), "Recently finished requests")];
}
