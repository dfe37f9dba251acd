// How a trajectory ended, in words and chips.

import { h } from "./dom.js";

// What each stop reason says; see `StopReason`.
const MEANINGS = {
  done: "the environment ended the episode",
  max_rounds: "the turns of this training step were used up",
  length: "no token budget was left, or an observation did not fit",
  env_error: "the environment or its server failed: a fault, never a reward",
  engine_error: "the engine failed: a fault",
  deadline: "took longer than agentgym.timeout: a fault",
};
const FAULTS = new Set(["env_error", "engine_error", "deadline"]);

export function isFault({ stop_reason }) {
  return FAULTS.has(stop_reason);
}

export function outcome(summary) {
  if (isFault(summary)) return h("span", { class: "chip bad", title: summary.error }, "fault");
  if (summary.success === null) return h("span", { class: "chip" }, "unknown");
  return summary.success ? h("span", { class: "chip good" }, "success") : h("span", { class: "chip warn" }, "failure");
}

export function stopChip(summary) {
  const reason = summary.stop_reason || "unknown";
  const tone = isFault(summary) ? "chip bad" : "chip";
  return h("span", { class: tone, title: MEANINGS[reason] ?? null }, reason);
}

/** A sentence on why the episode ended as it did. */
export function explanation(summary) {
  const reason = summary.stop_reason || "unknown";
  const meaning = MEANINGS[reason] ?? "the file does not say why";
  const tries = summary.attempt > 1 ? `, on attempt ${summary.attempt}` : "";
  return `Ended by ${reason}: ${meaning}${tries}.`;
}
