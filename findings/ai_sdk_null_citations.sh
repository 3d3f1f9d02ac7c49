#!/usr/bin/env bash
# Finding: Vercel's AI SDK refuses a message of Anthropic's format whose text block has citations null.
# Version: @ai-sdk/anthropic 3.0.140, ai 6.0.326
# Guess: null means the same as a field that is left out, as in Anthropic's own clients, whose type of it is optional.
# What happens: generateText fails with "Invalid JSON response"; without the field the same message is read. A stream with
#   the null is read, too.
# Why it matters: a server tested with Anthropic's clients only fails users of the AI SDK without streams. Skipjoin
#   left the null in and leaves it out now.
source "$(dirname "$0")/support.bash"
node_packages @ai-sdk/anthropic@3.0.140 ai@6.0.326
cat > "$work/run.mjs" <<'JS'
import http from "node:http";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText } from "ai";

const message = {
  id: "msg_1", type: "message", role: "assistant", model: "m", stop_reason: "end_turn", stop_sequence: null,
  usage: { input_tokens: 1, output_tokens: 1 },
};
let block;
const server = http.createServer((request, response) => {
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ ...message, content: [block] }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const model = createAnthropic({ baseURL: `http://127.0.0.1:${server.address().port}/v1`, apiKey: "x" })("m");
for (const [name, more] of [["without citations", {}], ["citations null", { citations: null }]]) {
  block = { type: "text", text: "hello", ...more };
  try {
    console.log(`${name}: ${(await generateText({ model, prompt: "x", maxRetries: 0, maxOutputTokens: 8 })).text}`);
  } catch (error) {
    console.log(`${name}: ${error.message}`);
  }
}
server.close();
JS
(cd "$work" && AI_SDK_LOG_WARNINGS=false node run.mjs 2>/dev/null | grep citations) | expect "without citations: hello
citations null: Invalid JSON response"
