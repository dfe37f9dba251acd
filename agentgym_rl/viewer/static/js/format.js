// Numbers and times for readers.

const NONE = "–";

/** Up to four significant digits; exact values stand in titles. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return Number(value.toPrecision(4)).toString();
}

export function score(value) {
  return value === null || value === undefined ? NONE : Number(value.toFixed(3)).toString();
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${Number((100 * value).toFixed(1))}%`;
}

export function seconds(value) {
  if (typeof value !== "number") return NONE;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** False for evaluations and conversations, which have no steps but the version of a policy, often 0. */
export function isTraining({ has_metrics, phases }) {
  return has_metrics || "train" in phases || "val" in phases;
}

/** What a trajectory is called, also one of a file that names no items. */
export function itemName(id) {
  return id || "unnamed";
}

/** How long ago, of seconds since 1970. */
export function ago(time) {
  if (!time) return NONE;
  const passed = Date.now() / 1000 - time;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 172800) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} days ago`;
}
