// Shell of the console: tabs, the connection, and the view that the address names.

import { Store, connect, follow, setKey } from "./data.js";
import { h, show } from "./dom.js";
import { batches } from "./views/batches.js";
import { forecasts } from "./views/forecasts.js";
import { memory } from "./views/memory.js";
import { now } from "./views/now.js";
import { objectives } from "./views/objectives.js";
import { replicas } from "./views/replicas.js";
import { request } from "./views/request.js";
import { timeline } from "./views/timeline.js";
import { whatif } from "./views/whatif.js";

// A view is made by (store, main, argument) and returns {update, close}. `update` runs with every snapshot.
const VIEWS = { now, timeline, memory, objectives, forecasts, whatif, batches, replicas };
const TITLES = {
  now: "Now", timeline: "Timeline", memory: "Memory", objectives: "Objectives", forecasts: "Forecasts", whatif: "What if", batches: "Batches",
  replicas: "Replicas",
};

const { servers, chosen } = await connect();
const store = new Store();
const main = document.getElementById("main");
let view = null;

function open() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const shown = name === "request" ? "request" : VIEWS[name] ? name : "now";
  view?.close?.();
  main.replaceChildren();
  const argument = decodeURIComponent(rest.join("/"));
  view = shown === "request" ? request(store, main, argument) : VIEWS[shown](store, main);
  document.title = `${shown === "request" ? "Request" : TITLES[shown]} – Skipjoin console`;
  show(document.getElementById("tabs"), Object.keys(VIEWS).map((one) =>
    h("a", { href: `#/${one}`, "aria-current": one === shown ? "page" : null }, TITLES[one])),
    h("a", { href: `/${location.search}` }, "Chat"));
  if (store.now) view.update?.();
}

function status(text, kind) {
  const link = document.getElementById("link");
  link.className = `link ${kind}`;
  if (link.textContent !== text) link.textContent = text;
}

function update() {
  status("live", "live");
  const { model, recipe, version, sees_all: all } = store.hello;
  show(document.getElementById("server"), `${model} · recipe ${recipe} · ${version}${all ? "" : " · own requests only"}`);
  if (store.now) view.update?.();
}

function askKey() {
  const dialog = document.getElementById("keys");
  return new Promise((resolve) => {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", required: true });
    show(dialog, h("form", { onsubmit: (event) => {
      event.preventDefault();
      setKey(input.value.trim());
      dialog.close();
    } },
    h("h2", { id: "keys-title" }, "This server needs an API key"),
    h("label", { for: "key" }, "A key with operator=yes sees all requests, another key its own. It stays in this tab."),
    input, h("button", { class: "main" }, "Continue")));
    dialog.addEventListener("close", resolve, { once: true });
    dialog.showModal();
  });
}

if (servers.length > 1) {
  const choice = h("select", { "aria-label": "Server", onchange: () => { location.search = `?server=${choice.value}`; } },
    servers.map((one, at) => h("option", { value: at, selected: at === chosen }, one.name)));
  document.getElementById("server").before(choice);
}
addEventListener("hashchange", () => { open(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
open();
status("connecting", "");
follow(store, { data: update, key: askKey, lost: (why) => status(`not connected: ${why}`, "lost") });
