// Chrome's trace format, which Perfetto and chrome://tracing read.

const STEPS = 1;
const REQUESTS = 2;

export function trace(steps, histories) {
  const origin = Math.min(...steps.map((one) => one.begin), ...histories.map((one) => one.arrived_at));
  const micros = (time) => Math.round((time - origin) * 1e6);
  const found = [group(STEPS, "Engine"), group(REQUESTS, "Requests")];
  const span = (pid, tid, name, begin, end, args) => found.push({ ph: "X", pid, tid, name, ts: micros(begin), dur: Math.max(1, micros(end) - micros(begin)), args });
  for (const step of steps) {
    span(STEPS, step.replica + 1, step.steps > 1 ? `${step.steps} steps` : "step", step.begin, step.end, step);
    found.push({ ph: "C", pid: STEPS, name: "tokens", ts: micros(step.end), args: { prefill: step.prefill, decodes: step.decodes } });
  }
  histories.forEach((history, at) => {
    const lane = at + 1000;
    found.push({ ph: "M", pid: REQUESTS, tid: lane, name: "thread_name", args: { name: history.id || "another client" } });
    for (const [state, begin, end, preempted] of history.intervals) {
      span(REQUESTS, lane, state, begin, end ?? history.now, preempted ? { preempted } : {});
    }
  });
  return { traceEvents: found, displayTimeUnit: "ms" };
}

function group(pid, name) {
  return { ph: "M", pid, name: "process_name", args: { name } };
}
