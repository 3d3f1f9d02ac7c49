// Messages of a chat, and how an answer grows from the events of its stream.

export class Conversation {
  // {role, content}; answers also have {reasoning, calls, note, id, error}, where `id` is that of the request, and
  // `view`, which shows them; results of tools {callId, name}.
  messages = [];

  get last() {
    return this.messages.at(-1);
  }

  // Calls of the last answer that wait for results.
  get pending() {
    const last = this.last;
    return last?.role === "assistant" && !last.error ? last.calls : [];
  }

  ask(content) {
    this.messages.push({ role: "user", content });
  }

  begin() {
    const answer = { role: "assistant", content: "", reasoning: "", calls: [], note: "", id: "", error: "" };
    this.messages.push(answer);
    return answer;
  }

  answerCalls(results) {
    this.pending.forEach((call, at) => this.messages.push({ role: "tool", callId: call.id, name: call.name, content: results[at] }));
  }

  // The messages as the API takes them. Answers without anything in them are left out.
  sent(system) {
    const found = system ? [{ role: "system", content: system }] : [];
    for (const one of this.messages) {
      if (one.role === "user") found.push({ role: "user", content: one.content });
      else if (one.role === "tool") found.push({ role: "tool", tool_call_id: one.callId, content: one.content });
      else if (one.calls.length) {
        const calls = one.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
        found.push({ role: "assistant", content: one.content || null, tool_calls: calls });
      } else if (one.content) found.push({ role: "assistant", content: one.content });
    }
    return found;
  }
}

// Add a chunk of a stream to an answer, and return whether it had anything to show.
export function take(answer, chunk) {
  answer.id = chunk.id ?? answer.id;
  const delta = chunk.choices?.[0]?.delta ?? {};
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
}
