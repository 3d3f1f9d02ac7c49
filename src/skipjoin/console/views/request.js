// The life of one request, from its arrival to its end.

import { Unauthorized, getJson } from "../data.js";
import { advice, card, facts, h, requestLink, s, show, state, table, tone } from "../dom.js";
import { END_WORDS, amount, clock, count, duration, plural } from "../format.js";

const WIDTH = 1000;
// Shorter waits, such as those for a decision, need no explanation.
const MIN_WAIT_S = 1e-3;

export function request(store, main, id) {
  let timer = null;
  let isClosed = false;
  const body = h("div");
  main.append(body);
  show(body, h("p", { class: "soft" }, "Loading…"));

  async function load() {
    try {
      const found = await getJson(`/debug/requests/${encodeURIComponent(id)}`);
      if (isClosed) return;
      show(body, page(found));
      if (found.choices.every((choice) => choice.is_finished) && found.choices.length) return;
    } catch (error) {
      if (isClosed) return;
      if (!(error instanceof Unauthorized)) show(body, h("h1", null, "Request ", h("span", { class: "mono" }, id)), h("p", { class: "bad" }, error.message));
    }
    timer = setTimeout(load, 1000);
  }
  load();
  return { close: () => { isClosed = true; clearTimeout(timer); } };
}

function page(found) {
  return [
    h("h1", null, "Request ", h("span", { class: "mono" }, found.id)),
    found.request_id ? h("p", { class: "soft small" }, "x-request-id ", h("code", null, found.request_id)) : null,
    found.choices.map((choice) => [
      found.choices.length > 1 ? h("h1", null, `Choice ${choice.choice}`) : null,
      why(found.reasons, choice), history(found.reasons, choice), standing(choice), details(choice), intervals(found.reasons, choice),
    ]),
    found.lost_choices ? h("p", { class: "bad" }, `${found.lost_choices} choices have no history: their engine exited, or does not answer.`) : null,
  ];
}

function why(reasons, choice) {
  const waited = Object.entries(choice.seconds).filter(([name]) => name !== "running").reduce((sum, one) => sum + one[1], 0);
  const current = choice.intervals.at(-1);
  const waits = !choice.is_finished && choice.state !== "running";
  const longest = choice.longest_wait;
  const title = choice.is_finished
    ? `Ended (${END_WORDS[choice.state] ?? choice.state}) after ${duration(choice.total_s)}; it waited ${duration(waited)} of that`
    : waits ? `Waits: ${reasons[choice.state].short}, for ${duration(current.end_s - current.begin_s)} so far` : `Runs, after ${duration(waited)} of waiting`;
  const about = waits ? choice.state : longest;
  return card(title,
    about && (waits || waited > MIN_WAIT_S) ? [
      h("p", null, waits ? reasons[about].text : ["The longest wait, ", h("strong", null, duration(choice.seconds[about])), ": ", reasons[about].text]),
      choice.competitors.length ? h("p", null, "Ran longest meanwhile: ", choice.competitors.map((one, at) => [at ? ", " : "", requestLink(one.id, one.choice), ` (${duration(one.seconds)}${one.service === "best-effort" ? ", best-effort" : ""}${one.is_finished ? ", ended" : ""})`])) : null,
      advice(about, reasons[about]),
    ] : h("p", { class: "soft" }, waited > 0 ? "It waited for less than a millisecond." : "It never waited."));
}

function history(reasons, choice) {
  const total = Math.max(choice.total_s, 1e-9);
  const x = (seconds) => (seconds / total) * WIDTH;
  const bars = choice.intervals.map((one) => s("rect", {
    class: `fill edge ${tone(one.state)}`, x: x(one.begin_s), y: one.state === "running" ? 4 : 12, rx: 2,
    width: Math.max(1, x(one.end_s - one.begin_s)), height: one.state === "running" ? 30 : 14,
  }, s("title", null, `${reasons[one.state].short}: ${duration(one.end_s - one.begin_s)}`)));
  const first = choice.first_token_s;
  const mark = first === null ? null : s("line", { class: "stroke first", x1: x(first), x2: x(first), y1: 0, y2: 38 });
  const states = [...new Set(choice.intervals.map((one) => one.state))];
  return card("History",
    s("svg", { class: "history", viewBox: `0 0 ${WIDTH} 38`, preserveAspectRatio: "none", role: "img", "aria-label": "Intervals from arrival to end; the table below has the numbers" }, bars, mark),
    first === null ? null : h("p", { class: "soft small" }, `The line marks the first token, after ${duration(first)}.`),
    h("ul", { class: "legend" }, states.map((name) => h("li", null, state(name, `${reasons[name].short} ${duration(choice.seconds[name])}`)))));
}

// Where a live request stands in the scheduler's order, and what decides that.
function standing(choice) {
  if (choice.place === null) return null;
  const prompts = choice.facts.find((fact) => fact.label === "prefill ahead");
  const ahead = prompts && prompts.value > 0 ? ` At least ${duration(prompts.value)} of prefill ahead of you.` : "";
  return card("Rank",
    h("p", null, `Number ${count(choice.place + 1)} of ${plural(choice.live_requests, "live request")} in the scheduler's order.${ahead}`),
    choice.facts.length ? table([{ name: "Figure" }, { name: "Value", number: true }, { name: "Meaning" }], choice.facts.map((fact) => [
      fact.label, amount(fact.value, fact.unit), h("span", { class: "soft" }, fact.meaning),
    ]), "What decides its rank") : null);
}

function details(choice) {
  const forecast = choice.forecast;
  const range = forecast && forecast.low !== null ? `, 80 % between ${count(forecast.low)} and ${count(forecast.high)}` : "";
  const objectives = Object.entries(choice.objectives).map(([name, one]) =>
    [`Objective ${name.toUpperCase()}`, [`${duration(one.bound_s)}: `, one.value_s === null ? "open" : duration(one.value_s), " ",
      h("span", { class: one.met === false ? "bad" : one.met ? "good" : "soft" }, one.met === false ? "missed" : one.met ? "met" : "open")]]);
  return card("Facts", facts([
    ["Arrived", clock(choice.arrived_at)], ["First token", choice.first_token_s === null ? "not yet" : `after ${duration(choice.first_token_s)}`],
    ["Prompt", `${count(choice.prompt_tokens)} tokens, ${count(choice.cached_tokens)} of them cached`],
    ["Output", `${count(choice.output_tokens)} of at most ${count(choice.max_tokens)} tokens`],
    forecast ? ["Forecast", `${count(forecast.tokens)} tokens${range}, by ${forecast.source}`] : null,
    ...objectives,
    ["Class", `${choice.service}${choice.is_urgent ? ", urgent" : ""}, priority ${choice.priority}`],
    choice.program ? ["Program", choice.program] : null,
    ["Preempted", Object.entries(choice.preemptions).map(([name, times]) => `${times} × ${name}`).join(", ") || "never"],
    ["Engine", `replica ${choice.replica}, number ${choice.number}`],
  ]));
}

function intervals(reasons, choice) {
  const head = [{ name: "From", number: true }, { name: "For", number: true }, { name: "State" }, { name: "Note" }];
  const omitted = Object.entries(choice.omitted_s).map(([name, seconds]) => ["between", duration(seconds), state(name, reasons[name].short), "shorter intervals, added up"]);
  return card("Intervals", table(head, [...choice.intervals.map((one) => [
    duration(one.begin_s), duration(one.end_s - one.begin_s), state(one.state, reasons[one.state].short),
    [one.preempted ? `preempted (${one.preempted})` : "", one.short_blocks ? `${one.short_blocks} KV blocks short` : "", one.is_current ? "now" : ""].filter(Boolean).join(", "),
  ]), ...omitted], "Intervals"));
}
