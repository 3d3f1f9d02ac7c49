// Chat with the served model. The conversation stays in this page.

import { Conversation, take } from "./conversation.js";
import { Unauthorized, connect, events, getJson, post, setKey } from "./data.js";
import { h, show } from "./dom.js";
import { count, duration } from "./format.js";
import { MarkdownView } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = { temperature: Number, top_p: Number, max_tokens: (text) => Math.round(Number(text)), seed: (text) => Math.round(Number(text)) };
const ENDS = { length: "ended at the maximum of tokens, ", content_filter: "ended by a filter, " };

const conversation = new Conversation();
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

// The JSON of a field of the settings, or undefined if it is empty.
function parsed(id, what) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} in the settings is not JSON: ${error.message}`);
  }
}

function body(messages) {
  const found = { messages, stream: true, stream_options: { include_usage: true } };
  const schema = parsed("schema", "The JSON schema");
  if (schema !== undefined) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed("tools", "The list of tools");
  if (tools !== undefined) found.tools = [tools].flat();
  if ($("model").value) found.model = $("model").value;
  if ($("service_tier").value) found.service_tier = $("service_tier").value;
  for (const [name, read] of Object.entries(NUMBERS)) if ($(name).value !== "") found[name] = read($(name).value);
  return found;
}

async function generate() {
  const messages = conversation.sent($("system").value.trim());
  const answer = conversation.begin();
  running = new AbortController();
  const begin = performance.now();
  const seconds = () => (performance.now() - begin) / 1000;
  let first = null;
  draw();
  try {
    for await (const [, data] of events(await post("/v1/chat/completions", body(messages), running.signal))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (take(answer, chunk)) first ??= seconds();
      answer.note += ENDS[chunk.choices?.[0]?.finish_reason] ?? "";
      if (chunk.usage) answer.note += `${count(chunk.usage.completion_tokens)} tokens in ${duration(seconds())}, first after ${duration(first ?? seconds())}`;
      drawLast();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else answer.error = error instanceof Unauthorized ? "This server needs an API key: enter it in the settings." : error.message;
  }
  running = null;
  draw();
  if (!conversation.pending.length) $("text").focus();
}

const NAMES = { user: "You", assistant: "Model", tool: "Result of" };

function entry(message) {
  const isLast = message === conversation.last;
  const isGrowing = isLast && running !== null;
  return h("article", { class: `message ${message.role}` },
    h("p", { class: "who" }, NAMES[message.role], message.role === "tool" ? h("code", null, ` ${message.name}`) : null),
    message.reasoning ? h("details", { class: "reasoning", open: isGrowing && !message.content }, h("summary", null, "Reasoning"), h("div", { class: "text" }, message.reasoning)) : null,
    message.content || isGrowing ? text(message) : null,
    (message.calls ?? []).map(called),
    isLast && !isGrowing && conversation.pending.length ? results(conversation.pending) : null,
    message.error ? h("p", { class: "bad", role: "alert" }, message.error) : null,
    message.role === "assistant" && !isGrowing ? h("p", { class: "soft small links" },
      message.note ? h("span", null, message.note) : null,
      message.id ? h("a", { href: `/console${location.search}#/request/${encodeURIComponent(message.id)}`, target: "_blank" }, "Why did it take this long?") : null,
      isLast ? h("button", { id: "again", onclick: again }, "Regenerate") : null) : null);
}

function text(message) {
  if (!message.content) return h("div", { class: "text" }, message.reasoning || message.calls?.length ? "" : "…");
  if (message.role !== "assistant") return h("div", { class: "text" }, message.content);
  message.view ??= new MarkdownView();
  return message.view.update(message.content);
}

function called(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is not complete yet.
  }
  return h("div", { class: "call" }, h("p", null, "Calls ", h("code", null, call.name)), h("pre", null, text));
}

// A form for the results of the calls, which the model continues with.
function results(calls) {
  const boxes = calls.map((call) => h("textarea", { rows: 2, required: true, placeholder: "What the tool returns" }));
  return h("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    conversation.answerCalls(boxes.map((box) => box.value));
    generate();
  } }, calls.map((call, at) => h("label", null, h("span", null, "Result of ", h("code", null, call.name)), boxes[at])), h("button", { class: "main" }, "Send results"));
}

function draw() {
  show($("log"), conversation.messages.length ? conversation.messages.map(entry) : h("p", { class: "empty" }, "Write a message to begin. The conversation is kept in this page only."));
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("fresh").hidden = !conversation.messages.length;
  scrollTo(0, document.body.scrollHeight);
}

function drawLast() {
  const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 120;
  $("log").lastElementChild.replaceWith(entry(conversation.last));
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);
}

function again() {
  conversation.messages.pop();
  generate();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  conversation.ask(text);
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
$("fresh").addEventListener("click", () => {
  running?.abort();
  conversation.messages = [];
  draw();
  $("text").focus();
});
$("key").addEventListener("change", () => {
  setKey($("key").value.trim());
  loadModels();
});
$("console").href = `/console${location.search}`;
await connect();
draw();
loadModels();
