// Small SVG charts with text that readers of screens get, too.

import { h, s } from "./dom.js";

const WIDTH = 640;
const LEFT = 52;

export function legend(items) {
  return h("ul", { class: "legend" }, items.map(([tone, text]) =>
    h("li", { class: `state tone-${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), text)));
}

function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((step) => step * unit).find((step) => step >= value);
}

// series: [{tone, points: [[x, y]], name}]. Points with a null y interrupt a line.
export function lines(label, series, { height = 170, format = String, top = null, x = ageText } = {}) {
  const all = series.flatMap((one) => one.points).filter((point) => point[1] !== null);
  if (!all.length) return h("p", { class: "empty" }, "No data yet.");
  const first = Math.min(...all.map((point) => point[0]));
  const last = Math.max(...all.map((point) => point[0]), first + 1);
  const high = top ?? ceiling(Math.max(...all.map((point) => point[1])));
  const px = (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - 8);
  const py = (value) => height - 22 - (value / high) * (height - 34);
  const paths = series.map((one) => {
    let pen = "M";
    const path = one.points.map(([at, value]) => {
      if (value === null) { pen = "M"; return ""; }
      const part = `${pen}${px(at).toFixed(1)} ${py(value).toFixed(1)}`;
      pen = "L";
      return part;
    }).join("");
    return s("path", { class: `stroke tone-${one.tone}`, d: path, "stroke-linejoin": "round" });
  });
  const grid = [0, 0.5, 1].map((share) => [
    s("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: py(share * high), y2: py(share * high) }),
    s("text", { x: LEFT - 6, y: py(share * high) + 4, "text-anchor": "end" }, format(share * high)),
  ]);
  const ends = [s("text", { x: LEFT, y: height - 4 }, x(first, last)), s("text", { x: WIDTH - 8, y: height - 4, "text-anchor": "end" }, x(last, last))];
  return s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, grid, ends, paths);
}

function ageText(value, last) {
  const age = Math.round(last - value);
  return age < 1 ? "now" : age < 120 ? `${age} s ago` : `${Math.round(age / 60)} min ago`;
}

// Points on two logarithmic axes with the diagonal on which both are equal.
export function scatter(label, points, { x, y, size = 340 }) {
  const high = ceiling(Math.max(...points.flat(), 10));
  const place = (value) => (Math.log(Math.max(1, value)) / Math.log(high)) * (size - 70);
  const px = (value) => 50 + place(value);
  const py = (value) => size - 40 - place(value);
  const ticks = [1, 10, 100, 1000, 10000, 100000].filter((value) => value <= high);
  return s("svg", { class: "chart square", viewBox: `0 0 ${size + 60} ${size}`, role: "img", "aria-label": label },
    ticks.map((value) => [
      s("line", { class: "axis", x1: px(value), x2: px(value), y1: py(1), y2: py(high) }),
      s("line", { class: "axis", x1: px(1), x2: px(high), y1: py(value), y2: py(value) }),
      s("text", { x: px(value), y: size - 24, "text-anchor": "middle" }, value),
      s("text", { x: 44, y: py(value) + 4, "text-anchor": "end" }, value),
    ]),
    s("line", { class: "stroke tone-other", x1: px(1), y1: py(1), x2: px(high), y2: py(high), "stroke-dasharray": "4 4" }),
    points.map(([a, b]) => s("circle", { class: "fill tone-accent", cx: px(a), cy: py(b), r: 3.2, "fill-opacity": 0.55 })),
    s("text", { x: px(high) / 2 + 25, y: size - 6, "text-anchor": "middle" }, x),
    s("text", { x: 0, y: 12 }, y));
}

// parts: [{tone, value, text}]
export function stack(label, parts, total) {
  const shown = parts.filter((part) => part.value > 0);
  const bar = h("div", { class: "stack", role: "img", "aria-label": `${label}: ${shown.map((part) => `${part.text} ${part.value}`).join(", ")}` },
    shown.map((part) => {
      const made = h("span", { class: `tone-${part.tone}` });
      made.style.width = `${(100 * part.value) / Math.max(total, 1)}%`; // by script, which the page's policy allows
      return made;
    }));
  return bar;
}

// Cumulative distributions over a logarithmic axis. series: [{tone, dashed, values}], each the quantiles 1 %, 2 %, ...
export function distribution(label, series, { format = String, height = 240 } = {}) {
  const floor = 1e-4;
  const all = series.flatMap((one) => one.values).map((value) => Math.max(value, floor));
  const low = Math.log10(Math.min(...all)) - 0.05;
  const high = Math.max(Math.log10(Math.max(...all)) + 0.05, low + 0.5);
  const px = (value) => LEFT + ((Math.log10(Math.max(value, floor)) - low) / (high - low)) * (WIDTH - LEFT - 8);
  const py = (share) => height - 22 - share * (height - 34);
  const spread = high - low;
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const step of spread < 1.5 ? [1, 2, 5] : spread < 3 ? [1, 3] : [1]) ticks.push(step * 10 ** power);
  }
  return s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label },
    [0, 0.5, 0.95].map((share) => [
      s("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: py(share), y2: py(share) }),
      s("text", { x: LEFT - 6, y: py(share) + 4, "text-anchor": "end" }, `${100 * share} %`),
    ]),
    ticks.filter((value) => px(value) >= LEFT && px(value) <= WIDTH - 20).map((value) => [
      s("line", { class: "axis", x1: px(value), x2: px(value), y1: py(0), y2: py(1) }),
      s("text", { x: px(value), y: height - 6, "text-anchor": "middle" }, format(value)),
    ]),
    series.map((one) => s("path", {
      class: `stroke tone-${one.tone}`, "stroke-dasharray": one.dashed ? "5 4" : null, "stroke-linejoin": "round",
      d: one.values.map((value, at) => `${at ? "L" : "M"}${px(value).toFixed(1)} ${py((at + 1) / (one.values.length + 1)).toFixed(1)}`).join(""),
    })));
}
