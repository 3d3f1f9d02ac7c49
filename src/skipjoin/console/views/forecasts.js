// How well output lengths are predicted.

import { scatter } from "../charts.js";
import { card, figure, h, show } from "../dom.js";
import { count, percent, quantile, three } from "../format.js";

export function forecasts(store, main) {
  const body = h("div");
  main.append(h("h1", null, "Forecasts"), body);
  return { update: () => show(body, page(store)) };
}

function page(store) {
  const known = store.finished.filter((one) => one.forecast && one.output_tokens && (one.reason === "stop" || one.reason === "length"));
  if (!known.length) {
    return card("Calibration", h("p", { class: "soft" }, `No finished request had a forecast. The recipe ${store.hello.recipe} may read none; alise, econoserve and bros do.`));
  }
  const ratios = known.map((one) => Math.abs(Math.log2(one.forecast.tokens / one.output_tokens)));
  const bounded = known.filter((one) => one.forecast.low !== null);
  const inside = bounded.filter((one) => one.forecast.low <= one.output_tokens && one.output_tokens <= one.forecast.high);
  const ended = known.filter((one) => one.reason === "length").length;
  return [
    h("dl", { class: "figures" },
      figure("Requests", count(known.length)),
      figure("Median error", `× ${three(2 ** quantile(ratios, 0.5))}`),
      figure("95th percentile", `× ${three(2 ** quantile(ratios, 0.95))}`),
      figure("In the 80 % interval", bounded.length ? percent(inside.length / bounded.length) : "–")),
    card("Calibration", scatter("Predicted and actual output lengths", known.slice(-500).map((one) => [one.forecast.tokens, one.output_tokens]), { x: "predicted tokens", y: "actual tokens" }),
      h("p", { class: "soft small" }, `Points on the dashed line are exact. ${count(ended)} requests ended at their limit of tokens.`)),
  ];
}
