// The engines behind this server.

import { card, h, show, table } from "../dom.js";
import { count, percent } from "../format.js";

export function replicas(store, main) {
  const body = h("div");
  main.append(h("h1", null, "Replicas"), body);
  return { update: () => show(body, page(store)) };
}

function page(store) {
  const { now, hello } = store;
  const head = [{ name: "Replica" }, { name: "State" }, { name: "Running", number: true }, { name: "Waiting", number: true }, { name: "KV", number: true },
    { name: "Steps", number: true }, { name: "Tokens", number: true }, { name: "Preemptions", number: true }, { name: "Device" }];
  const rows = now.engines.map((one) => [one.replica, one.is_hung ? h("span", { class: "bad" }, "hung") : "up", count(one.running), count(one.waiting),
    percent(one.used_blocks === null ? null : one.used_blocks / one.device_blocks), count(one.engine_steps_total), count(one.generation_tokens_total), count(one.num_preemptions_total), `${one.dtype} on ${one.device}`]);
  for (const number of now.silent_replicas) rows.push([number, h("span", { class: "bad" }, "no reply"), "", "", "", "", "", "", ""]);
  return card(`${now.engines.length} of ${hello.replicas} engines answer`, table(head, rows, "Engines"),
    now.engines.length + now.silent_replicas.length < hello.replicas ? h("p", { class: "bad" }, "Engines are missing. The server's log says why.") : null);
}
