// Elements whose contents are always text. No string from the server is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Replace the children of an element, but keep the focus on the element with the same id or link.
export function show(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) && active !== element ? active.id || active.getAttribute("href") : null;
  const scrolled = [...element.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  element.replaceChildren();
  add(element, children);
  [...element.querySelectorAll(".scroll")].forEach((one, at) => { one.scrollLeft = scrolled[at] ?? 0; });
  if (key) {
    const same = [...element.querySelectorAll("[id], a[href]")].find((one) => one.id === key || one.getAttribute("href") === key);
    same?.focus({ preventScroll: true });
  }
}

export function table(head, rows, caption) {
  const cell = (tag, one, at) => {
    const numeric = head[at].number ? "number" : "";
    return h(tag, { class: [numeric, head[at].optional ? "optional" : ""].join(" ").trim() || null }, one);
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null,
      h("thead", null, h("tr", null, head.map((one, at) => { const made = cell("th", one.name, at); made.scope = "col"; return made; }))),
      h("tbody", null, rows.map((row) => h("tr", null, row.map((one, at) => cell("td", one, at)))))));
}

export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", null, title), children);
}

export function figure(name, value, note) {
  return h("div", { class: "figure" }, h("dt", null, name), h("dd", null, value, note ? h("small", null, " ", note) : null));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== "").map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

export function state(name, text, color = null) {
  return h("span", { class: `state ${color ? `tone-${color}` : tone(name)}` }, h("span", { class: "dot", "aria-hidden": "true" }), text);
}

const TONES = {
  running: "running", no_slot: "slot", token_budget: "budget", no_kv: "memory", behind_memory: "memory", kv_on_cpu: "move",
  kv_in_transit: "move", behind_real_time: "policy", step_time: "policy", held_by_batcher: "policy", held_by_admission: "policy", held_by_eviction: "policy",
};

export function tone(name) {
  return `tone-${TONES[name] ?? "other"}`;
}

// Reasons whose remedies the simulator can try.
const SIMULATED = new Set([
  "no_slot", "token_budget", "no_kv", "behind_memory", "held_by_batcher", "held_by_admission", "held_by_eviction",
]);

export function advice(reason, words) {
  if (!words.remedy) return null;
  return h("p", { class: "advice" }, words.remedy, " ", SIMULATED.has(reason) ? h("a", { href: "#/whatif" }, "Try it on the recorded load") : null);
}

export function requestLink(id, choice) {
  if (!id) return h("span", { class: "soft" }, "another client");
  return h("a", { class: "id", href: `#/request/${encodeURIComponent(id)}` }, shorten(id), choice ? ` #${choice}` : null);
}

function shorten(id) {
  return id.length > 22 ? `${id.slice(0, 13)}…${id.slice(-6)}` : id;
}
