// Batches of this key.

import { Unauthorized, getJson } from "../data.js";
import { card, h, show, table } from "../dom.js";
import { clock, count } from "../format.js";

const PERIOD_MS = 3000;

export function batches(store, main) {
  let timer = null;
  let isClosed = false;
  const body = h("div");
  main.append(h("h1", null, "Batches"), body);

  async function load() {
    if (!store.hello) {
      timer = setTimeout(load, 200);
      return;
    }
    if (!store.hello.has_batches) {
      show(body, card("Batches", h("p", { class: "soft" }, "This server has no batches. The flag --batch-dir enables them.")));
      return;
    }
    try {
      const found = await getJson("/v1/batches?limit=50");
      if (!isClosed) show(body, found.data.length ? list(found.data) : card("Batches", h("p", { class: "soft" }, "This key has no batches. ", h("code", null, "skipjoin batch submit FILE"), " creates one.")));
    } catch (error) {
      if (!isClosed && !(error instanceof Unauthorized)) show(body, card("Batches", h("p", { class: "soft" }, error.message)));
    }
    if (!isClosed) timer = setTimeout(load, PERIOD_MS);
  }
  load();
  return { close: () => { isClosed = true; clearTimeout(timer); } };
}

function list(found) {
  const head = [{ name: "Batch" }, { name: "Status" }, { name: "Lines" }, { name: "Failed", number: true }, { name: "Created" }, { name: "Window ends" }];
  return card("Batches", table(head, found.map((one) => {
    const counts = one.request_counts;
    const done = counts.completed + counts.failed;
    const bar = h("span");
    bar.style.width = `${(100 * done) / Math.max(1, counts.total)}%`;
    return [h("span", { class: "id" }, one.id), one.status,
      [h("span", { class: "progress", "aria-hidden": "true" }, bar), `${count(done)} of ${count(counts.total)}`],
      count(counts.failed), clock(one.created_at), one.expires_at ? clock(one.expires_at) : ""];
  }), "Batches"));
}
