// What each step consisted of, and which requests ran when. Zoom with the buttons, + and -, or the wheel.

import { Unauthorized, getJson } from "../data.js";
import { legend } from "../charts.js";
import { h, show, tone } from "../dom.js";
import { OPERATORS_ONLY, clock, count } from "../format.js";
import { trace } from "../perfetto.js";

const SPANS_S = [5, 15, 60, 300];
const HISTORIES = 100;
const PERIOD_MS = 2000;
const LANE = 14;
const CHARTS = 150;
const LEFT = 64;

export function timeline(store, main) {
  let span = 60;
  let frozen = null; // end of the shown time while paused
  let histories = [];
  let timer = null;
  let isClosed = false;
  const canvas = h("canvas", { role: "img", "aria-label": "Steps and requests over time", height: 1 });
  const note = h("p", { class: "soft small", role: "status" }, "Steps are recorded from now on, while a console is open.");
  const buttons = SPANS_S.map((seconds) => h("button", { id: `span-${seconds}`, onclick: () => zoom(seconds) }, `${seconds} s`));
  const pause = h("button", { id: "pause", "aria-pressed": "false", onclick: () => { frozen = frozen === null ? store.now?.time ?? null : null; pause.setAttribute("aria-pressed", frozen !== null); draw(); } }, "Pause");
  const names = h("ul", { class: "legend" });
  main.append(h("h1", null, "Timeline"),
    h("section", { class: "card" }, h("div", { class: "tools" }, h("h2", null, "Steps and requests"), buttons, pause, h("button", { id: "export", onclick: () => save() }, "Export for Perfetto")),
      canvas, note, legend([["running", "runs; prefill tokens"], ["move", "decode tokens; swapped"], ["slot", "waits for a slot"], ["memory", "waits for KV; preemptions"], ["budget", "waits for the token budget"], ["policy", "held by a policy"], ["other", "other waits"]])), names);

  function zoom(seconds) {
    span = seconds;
    draw();
  }

  function step(by) {
    const at = SPANS_S.findIndex((one) => one >= span);
    zoom(SPANS_S[Math.max(0, Math.min(SPANS_S.length - 1, at + by))]);
  }

  const onKey = (event) => {
    if (event.target.closest("input, textarea")) return;
    if (event.key === "+") step(-1);
    else if (event.key === "-") step(1);
  };
  addEventListener("keydown", onKey);
  canvas.addEventListener("wheel", (event) => { if (event.ctrlKey || event.altKey) { event.preventDefault(); step(Math.sign(event.deltaY)); } }, { passive: false });
  canvas.addEventListener("click", (event) => {
    const lane = Math.floor((event.offsetY - CHARTS - 20) / LANE);
    const history = lane >= 0 ? histories[lane] : null;
    if (history?.id) location.hash = `#/request/${encodeURIComponent(history.id)}`;
  });
  const resized = new ResizeObserver(() => draw());
  resized.observe(canvas.parentElement);

  async function load() {
    try {
      if (frozen === null) {
        const found = await getJson(`/debug/histories?since_s=${span}&most=${HISTORIES}`);
        histories = found.histories.sort((a, b) => b.arrived_at - a.arrived_at);
      }
      draw();
    } catch (error) {
      if (!(error instanceof Unauthorized)) note.textContent = error.message;
    }
    if (!isClosed) timer = setTimeout(load, PERIOD_MS);
  }
  load();

  function draw() {
    if (isClosed || !store.now) return;
    for (const [at, button] of buttons.entries()) button.setAttribute("aria-pressed", SPANS_S[at] === span);
    const end = frozen ?? store.now.time;
    const shown = store.steps.filter((one) => one.end >= end - span && one.begin <= end);
    paint(canvas, shown, histories, end - span, end);
    const swaps = shown.reduce((sum, one) => sum + one.blocks_in + one.blocks_out, 0);
    const total = (field) => count(shown.reduce((sum, one) => sum + one[field], 0));
    note.textContent = !store.hello.sees_totals ? `${OPERATORS_ONLY} Click a request to see its history.` : `${total("steps")} steps, ${total("prefill")} prefill and ${total("decodes")} decode tokens, ${total("preemptions")} preemptions, ${count(swaps)} blocks swapped. Click a request to see its history.`;
  }

  function save() {
    const text = JSON.stringify(trace(store.steps, histories));
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    h("a", { href: url, download: `skipjoin-${clock(store.now.time).replaceAll(":", "")}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  return {
    update: draw,
    close: () => { isClosed = true; clearTimeout(timer); removeEventListener("keydown", onKey); resized.disconnect(); },
  };
}

// The color of a class of the style sheet.
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name.replace("tone-", "")}`).trim();
}

function paint(canvas, steps, histories, begin, end) {
  const width = canvas.clientWidth || 800;
  const height = CHARTS + 28 + Math.max(1, histories.length) * LANE;
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = "11px system-ui, sans-serif";
  const x = (time) => LEFT + ((time - begin) / (end - begin)) * (width - LEFT - 6);
  axis(draw, begin, end, x, height, width);
  bars(draw, steps, x, width, begin, end);
  histories.forEach((history, at) => lane(draw, history, CHARTS + 22 + at * LANE, x, begin, end));
}

function axis(draw, begin, end, x, height, width) {
  draw.fillStyle = color("soft");
  draw.strokeStyle = color("line");
  const step = (end - begin) / 6;
  for (let at = 0; at <= 6; at += 1) {
    const time = begin + at * step;
    draw.beginPath();
    draw.moveTo(x(time), 0);
    draw.lineTo(x(time), height);
    draw.stroke();
    const text = at === 6 ? "now" : `−${Math.round((end - time) * 10) / 10} s`;
    draw.textAlign = at === 6 ? "right" : at === 0 ? "left" : "center";
    draw.fillText(text, Math.min(x(time), width - 4), CHARTS + 12);
  }
  draw.textAlign = "right";
  for (const [text, y] of [["tokens", 42], ["requests", 92], ["swaps", 128]]) draw.fillText(text, LEFT - 8, y);
}

// Steps are added up per pixel, so that a long span is drawn quickly.
function bars(draw, steps, x, width, begin, end) {
  const pixels = Array.from({ length: Math.ceil(width) }, () => ({ prefill: 0, decodes: 0, requests: 0, swaps: 0, preemptions: 0 }));
  for (const step of steps) {
    const pixel = pixels[Math.min(pixels.length - 1, Math.max(0, Math.floor(x(Math.min(end, Math.max(begin, step.end))))))];
    pixel.prefill += step.prefill;
    pixel.decodes += step.decodes;
    pixel.requests = Math.max(pixel.requests, step.requests);
    pixel.swaps += step.blocks_in + step.blocks_out;
    pixel.preemptions += step.preemptions;
  }
  const most = (value) => pixels.reduce((top, pixel) => Math.max(top, value(pixel)), 1);
  const tokens = most((pixel) => pixel.prefill + pixel.decodes);
  const requests = most((pixel) => pixel.requests);
  const swaps = most((pixel) => pixel.swaps);
  pixels.forEach((pixel, at) => {
    const decodes = (pixel.decodes / tokens) * 60;
    const prefill = (pixel.prefill / tokens) * 60;
    rect(draw, "move", at, 66 - decodes, 1, decodes);
    rect(draw, "running", at, 66 - decodes - prefill, 1, prefill);
    rect(draw, "other", at, 104 - (pixel.requests / requests) * 30, 1, (pixel.requests / requests) * 30);
    rect(draw, "move", at, 134 - (pixel.swaps / swaps) * 22, 1, pixel.swaps ? Math.max(2, (pixel.swaps / swaps) * 22) : 0);
    if (pixel.preemptions) rect(draw, "memory", at, 108, 1.5, 5);
  });
  draw.fillStyle = color("soft");
  draw.textAlign = "right";
  draw.fillText(`${count(tokens)}`, LEFT - 8, 14);
  draw.fillText(`${count(requests)}`, LEFT - 8, 78);
}

function rect(draw, name, x, y, width, height) {
  if (height <= 0) return;
  draw.fillStyle = color(name);
  draw.fillRect(x, y, width, height);
}

function lane(draw, history, y, x, begin, end) {
  for (const [state, from, until] of history.intervals) {
    const left = Math.max(from, begin);
    const right = Math.min(until ?? end, end);
    if (right <= left) continue;
    const isRunning = state === "running";
    draw.fillStyle = color(tone(state));
    draw.globalAlpha = isRunning ? 1 : 0.75;
    draw.fillRect(x(left), y + (isRunning ? 0 : 4), Math.max(1, x(right) - x(left)), isRunning ? LANE - 3 : LANE - 10);
    draw.globalAlpha = 1;
  }
  draw.fillStyle = color("soft");
  draw.textAlign = "right";
  draw.fillText(history.id ? `…${history.id.slice(-6)}` : "other", LEFT - 8, y + LANE - 4);
}
