// The recorded load in the simulator, under other recipes and limits.

import { distribution, legend } from "../charts.js";
import { events, post, Unauthorized } from "../data.js";
import { card, h, show, state, table } from "../dom.js";
import { count, duration, plural, signed } from "../format.js";

const TONES = ["other", "running", "slot", "budget", "move", "memory", "policy", "accent"];
const LIMITS = [
  ["max_num_seqs", "Slots"], ["max_num_batched_tokens", "Tokens per step"], ["kv_blocks", "KV blocks"],
];
const TIMES = [[300, "5 minutes"], [900, "15 minutes"], [3600, "hour"]];
const FIGURES = [
  ["ttft_s.p50", "TTFT p50"], ["ttft_s.p95", "TTFT p95"], ["ttft_s.mean", "TTFT mean"],
  ["jct_s.p50", "Total p50"], ["jct_s.p95", "Total p95"], ["jct_s.mean", "Total mean"],
];
// The answer stays when another view is opened.
let result = null;

export function whatif(store, main) {
  let running = null;
  let form = null;
  const settings = h("section", { class: "card" });
  const answer = h("div", { "aria-live": "polite" });
  main.append(h("h1", null, "What if"),
    h("p", { class: "soft" }, "The lengths and times of the requests that ended, simulated under other recipes and limits. The server itself does not change."),
    settings, answer);

  function build() {
    const { hello, now } = store;
    const blocks = now.engines[0]?.device_blocks;
    const own = { max_num_seqs: hello.max_num_seqs, max_num_batched_tokens: hello.max_num_batched_tokens, kv_blocks: blocks };
    const first = new Set(["fcfs", "fastserve", "srpt"].filter((name) => name !== hello.recipe).slice(0, 2));
    form = h("form", { onsubmit: (event) => { event.preventDefault(); running ? running.abort() : start(); } },
      h("fieldset", { class: "choices" }, h("legend", null, "Recipes to try"),
        hello.recipes.map((name) => h("label", null, h("input", { type: "checkbox", name: "recipe", value: name, checked: first.has(name) }), ` ${name}`, name === hello.recipe ? h("span", { class: "soft" }, " (now)") : null))),
      h("div", { class: "fields" },
        LIMITS.map(([name, text]) => h("label", null, text, h("input", { id: name, type: "number", min: 1, step: 1, placeholder: own[name] == null ? "the server's" : `now ${count(own[name])}` }))),
        h("label", null, "Requests of the last", h("select", { id: "since" }, TIMES.map(([seconds, text]) => h("option", { value: seconds, selected: seconds === 3600 }, text))))),
      h("p", { class: "tools start" }, h("button", { id: "simulate", class: "main" }, "Simulate"), h("progress", { id: "progress", max: 1, value: "0", hidden: true, "aria-label": "Progress" }), h("span", { id: "doing", class: "soft", role: "status" })));
    show(settings, hello.sees_all ? form : h("p", { class: "soft" }, "Only a key with operator=yes may start simulations."));
    if (result) show(answer, report(result));
  }

  const part = (id) => form.querySelector(`#${id}`);

  function progress(doing, share) {
    part("simulate").textContent = running ? "Cancel" : "Simulate";
    part("progress").hidden = !running;
    part("progress").value = share;
    part("doing").textContent = doing;
  }

  async function start() {
    const recipes = [...form.querySelectorAll("input[name=recipe]:checked")].map((one) => one.value);
    if (!recipes.length) return progress("Choose at least one recipe.", 0);
    const asked = { recipes, since_s: Number(part("since").value) };
    for (const [name] of LIMITS) if (part(name).value) asked[name] = Number(part(name).value);
    running = new AbortController();
    progress("starts", 0);
    let end = "";
    try {
      for await (const [name, data] of events(await post("/debug/replay", asked, running.signal))) {
        const found = JSON.parse(data);
        if (name === "progress") progress(found.doing, found.share);
        else if (name === "failed") throw new Error(found.message);
        else if (name === "result") { result = found; show(answer, report(found)); }
      }
    } catch (error) {
      end = error.name === "AbortError" ? "Canceled." : error instanceof Unauthorized ? "The key was not accepted." : error.message;
    }
    running = null;
    progress(end, 0);
  }

  return {
    update: () => { if (!form) build(); },
    close: () => running?.abort(),
  };
}

function report(found) {
  const [real, model, ...tried] = found.outcomes;
  const head = [{ name: "" }, ...FIGURES.map(([, name]) => ({ name, number: true })), { name: "Preemptions", number: true }];
  const rows = found.outcomes.map((one, at) => [
    state("", one.name, TONES[at % TONES.length]),
    ...FIGURES.map(([name]) => [duration(one.figures[name]), at > 1 ? change(one.figures[name], model.figures[name]) : null]),
    one.preemptions === null ? "" : count(one.preemptions),
  ]);
  rows.splice(2, 0, [h("span", { class: "soft" }, "error of the simulator"), ...FIGURES.map(([name]) => h("span", { class: "soft" }, name in found.errors ? signed(found.errors[name]) : "–")), ""]);
  return [
    card(`${plural(found.requests, "request")} replayed`,
      h("p", null, tried.length ? verdict(model, tried) : "Choose another recipe or limit to compare."),
      table(head, rows, "Measured and simulated times"),
      found.is_far ? h("p", { class: "bad" }, "The simulator is far from what was measured: the machine was busy, clients waited for answers before they sent more, or prefix-cache hits saved much. Compare simulated rows with each other only.") : null,
      h("p", { class: "soft small" }, `Changes are against the simulation of the server as it is. Simulated rows rest on the cost model that the engine updates from its own steps, on the measured time between steps (${duration(found.between_steps_s)}) and around the engine (${duration(found.around_s)}). They leave out prefix-cache hits.`)),
    card("Time to first token", distribution("Share of requests by time to first token", found.outcomes.map((one, at) => ({ tone: TONES[at % TONES.length], values: one.curve, dashed: at === 0 })), { format: duration }),
      legend(found.outcomes.map((one, at) => [TONES[at % TONES.length], one.name]))),
  ];
}

function change(value, base) {
  if (!(base > 0) || Math.abs(value / base - 1) < 0.005) return null;
  return h("small", { class: value < base ? "good" : "bad" }, ` ${signed(value / base - 1)}`);
}

// One sentence about the best of the tried ones.
function verdict(model, tried) {
  const of = (one) => one.figures["ttft_s.p95"];
  const best = tried.reduce((a, b) => (of(b) < of(a) ? b : a));
  const share = of(best) / of(model) - 1;
  const total = best.figures["jct_s.mean"] / model.figures["jct_s.mean"] - 1;
  if (share > -0.05) return "None of them would shorten the 95th percentile of the time to first token by more than 5 %.";
  return [h("strong", null, best.name), ` would change the 95th percentile of the time to first token by ${signed(share)}, and the mean total time by ${signed(total)}.`];
}
