// Chat with the served model. The conversation stays in this page.

import { Unauthorized, connect, events, getJson, post, setKey } from "./data.js";
import { h, show } from "./dom.js";
import { count, duration } from "./format.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = { temperature: Number, top_p: Number, max_tokens: (text) => Math.round(Number(text)), seed: (text) => Math.round(Number(text)) };

// {role, content, note, id, error}: an answer has the id of its request.
const messages = [];
let running = null;

async function loadModels() {
  try {
    const found = await getJson("/v1/models");
    show($("model"), found.data.map((one) => h("option", { value: one.id }, one.id)));
  } catch (error) {
    show($("model"), h("option", { value: "" }, error instanceof Unauthorized ? "needs an API key (Settings)" : "not available yet"));
    if (error instanceof Unauthorized) $("settings").open = true;
    else setTimeout(loadModels, 3000);
  }
}

function body() {
  const system = $("system").value.trim();
  const sent = messages.filter((one) => !one.error && one.content).map(({ role, content }) => ({ role, content }));
  const found = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...sent],
    stream: true,
    stream_options: { include_usage: true },
  };
  const schema = $("schema").value.trim();
  if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  if ($("model").value) found.model = $("model").value;
  if ($("service_tier").value) found.service_tier = $("service_tier").value;
  for (const [name, read] of Object.entries(NUMBERS)) if ($(name).value !== "") found[name] = read($(name).value);
  return found;
}

async function generate() {
  const answer = { role: "assistant", content: "", note: "", id: "", error: "" };
  let sent = null;
  try {
    sent = body();
  } catch (error) {
    answer.error = `The JSON schema in the settings is not JSON: ${error.message}`;
  }
  messages.push(answer);
  if (!sent) {
    draw();
    return;
  }
  running = new AbortController();
  const begin = performance.now();
  const seconds = () => (performance.now() - begin) / 1000;
  let first = null;
  draw();
  try {
    const response = await post("/v1/chat/completions", sent, running.signal);
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.id = chunk.id ?? answer.id;
      const text = chunk.choices?.[0]?.delta?.content ?? "";
      if (text && first === null) first = seconds();
      answer.content += text;
      const reason = chunk.choices?.[0]?.finish_reason;
      if (reason === "length") answer.note = "ended at the maximum of tokens, ";
      if (chunk.usage) answer.note += `${count(chunk.usage.completion_tokens)} tokens in ${duration(seconds())}, first after ${duration(first ?? seconds())}`;
      drawLast();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else answer.error = error instanceof Unauthorized ? "This server needs an API key: enter it in the settings." : error.message;
  }
  running = null;
  draw();
  $("text").focus();
}

function entry(message, at) {
  const isLast = at === messages.length - 1;
  const tools = message.role === "assistant" && [
    message.note ? h("span", null, message.note) : null,
    message.id ? h("a", { href: `/console${location.search}#/request/${encodeURIComponent(message.id)}`, target: "_blank" }, "Why did it take this long?") : null,
    isLast && !running ? h("button", { id: "again", onclick: again }, "Regenerate") : null,
  ];
  return h("article", { class: `message ${message.role}` },
    h("p", { class: "who" }, message.role === "user" ? "You" : "Model"),
    h("div", { class: "text" }, message.content || (running && isLast ? "…" : "")),
    message.error ? h("p", { class: "bad" }, message.error) : null,
    tools ? h("p", { class: "soft small links" }, tools) : null);
}

function draw() {
  show($("log"), messages.length ? messages.map(entry) : h("p", { class: "empty" }, "Write a message to begin. The conversation is kept in this page only."));
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  scrollTo(0, document.body.scrollHeight);
}

function drawLast() {
  const last = $("log").lastElementChild;
  last.querySelector(".text").textContent = messages.at(-1).content || "…";
  if (innerHeight + scrollY > document.body.scrollHeight - 120) scrollTo(0, document.body.scrollHeight);
}

function again() {
  messages.pop();
  generate();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  $("text").value = "";
  generate();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", () => {
  setKey($("key").value.trim());
  loadModels();
});
document.getElementById("console").href = `/console${location.search}`;
await connect();
draw();
loadModels();
