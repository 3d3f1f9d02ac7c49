// Attainment of objectives, and latency percentiles over time, from finished requests.

import { legend, lines } from "../charts.js";
import { card, h, show, table } from "../dom.js";
import { count, duration, percent, quantile } from "../format.js";

const BUCKETS = 30;

export function objectives(store, main) {
  const body = h("div");
  main.append(h("h1", null, "Objectives"), body);
  return { update: () => show(body, attainment(store), h("div", { class: "grid" }, over(store, "ttft_s", "Time to first token"), over(store, "tpot_s", "Time per output token")), classes(store)) };
}

function attainment(store) {
  const rows = [];
  for (const service of ["real-time", "best-effort"]) {
    for (const name of ["ttft", "tpot", "jct"]) {
      const met = store.finished.filter((one) => one.service === service && name in one.objectives).map((one) => one.objectives[name]);
      if (met.length) rows.push([service, name.toUpperCase(), percent(met.filter(Boolean).length / met.length), count(met.length)]);
    }
  }
  if (!rows.length) return card("Attainment", h("p", { class: "soft" }, "No finished request had an objective. The flags --slo-ttft-ms, --slo-tpot-ms and --slo-jct-ms set them for all requests."));
  return card("Attainment", table([{ name: "Class" }, { name: "Objective" }, { name: "Met", number: true }, { name: "Requests", number: true }], rows, "Attainment"));
}

function over(store, field, title) {
  const found = store.finished.filter((one) => one[field] !== null);
  if (found.length < 2) return card(title, h("p", { class: "soft" }, "Two finished requests are needed."));
  const first = found[0].ended_at;
  const width = Math.max(1, (store.now.time - first) / BUCKETS);
  const parts = Array.from({ length: BUCKETS + 1 }, () => []);
  for (const one of found) parts[Math.min(BUCKETS, Math.floor((one.ended_at - first) / width))].push(one[field]);
  const points = (level) => parts.map((part, at) => [first + (at + 0.5) * width, quantile(part, level)]).filter((point) => point[1] !== null);
  return card(title,
    lines(`${title}, median and 95th percentile over time`, [{ tone: "running", points: points(0.5) }, { tone: "slot", points: points(0.95) }], { format: duration }),
    legend([["running", "p50"], ["slot", "p95"]]));
}

function classes(store) {
  const rows = ["real-time", "best-effort"].map((service) => {
    const some = store.finished.filter((one) => one.service === service);
    const cell = (field, level) => duration(quantile(some.map((one) => one[field]).filter((one) => one !== null), level)) || "–";
    return [service, count(some.length), cell("ttft_s", 0.5), cell("ttft_s", 0.95), cell("tpot_s", 0.5), cell("tpot_s", 0.95), cell("jct_s", 0.5), cell("jct_s", 0.95)];
  });
  const head = ["Requests", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "Total p50", "Total p95"];
  return card("Finished requests", table([{ name: "Class" }, ...head.map((name) => ({ name, number: true }))], rows, "Latencies by class"));
}
