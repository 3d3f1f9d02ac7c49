export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.9995e-3) return seconds > 0 ? `${Math.round(seconds * 1e6)} µs` : "0 s";
  if (seconds < 0.9995) return `${three(seconds * 1e3)} ms`;
  if (seconds < 100) return `${three(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${three(seconds / 3600)} h`;
}

// A value of a policy, with its unit.
export function amount(value, unit) {
  if (typeof value !== "number") return value;
  if (unit === "s") return value < 0 ? `−${duration(-value)}` : duration(value);
  return `${three(value)}${unit ? ` ${value === 1 ? unit.replace(/s$/, "") : unit}` : ""}`;
}

export function three(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

export function count(value) {
  if (value === null) return "–";
  return value >= 1e6 ? `${three(value / 1e6)} M` : Math.round(value).toLocaleString("en-US");
}

export function percent(share) {
  return share !== null && Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–";
}

export function signed(share) {
  const percents = Math.round(100 * share);
  return `${percents > 0 ? "+" : percents < 0 ? "−" : ""}${Math.abs(percents)} %`;
}

export const OPERATORS_ONLY = "Only a key with operator=yes sees figures of all keys together.";

// How a request ended, by its reason.
export const END_WORDS = {
  stop: "end of the output", length: "maximum of tokens", abort: "aborted", deadline: "deadline passed", error: "error",
};

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function quantile(values, level) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(level * sorted.length))];
}
